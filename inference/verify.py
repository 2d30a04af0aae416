"""Verification: which draft tokens the target keeps, and the token of its own that follows them.

Pure functions of a tree, of the target's word at its nodes, and of explicit random numbers. Every rule walks
down from node 0, one level a step, all rows at once. A row that has stopped repeats its last step with the
same numbers and so comes to the same end: no step needs to know who is still walking.

B rows, N nodes (node 0 included), D depth of the deepest node, V vocabulary, V_d draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from headsmith.heads.tree import DraftTree
from torch import Tensor


class NonFiniteLogitsError(ValueError):
    """A distribution holds NaN or infinity; the logits behind it did, or every token had been masked out."""


@dataclass
class Verified:
    """What one round commits in every row: the accepted path's tokens, then `bonus`.

    Args:
        path: [B, D+1] node indices of the accepted path, node 0 first, then padded with 0.
        counts: [B] how many of them are real: accepted draft tokens + 1; 0 for rows whose tree has no node.
        bonus: [B] the target's own token after the last accepted node; undefined where counts is 0.
    """

    path: Tensor
    counts: Tensor
    bonus: Tensor


def accept_probability(p: Tensor, q: Tensor) -> Tensor:
    """With what probability a token drawn from q is kept under the target p: min(1, p/q), elementwise.

    A token that q never draws has nothing to keep: 0, whatever p says.
    """
    return torch.where(q > 0, (p / q).clamp(max=1), 0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What is left to sample from once a draw from q was rejected: normalise(max(p - q, 0)), last axis.

    Where nothing is left (p = q, a draw that is never rejected) it is p, and nothing is divided by 0.
    """
    left = (p - q).clamp_(min=0)
    left += p * (left.sum(-1, keepdim=True) <= 0)
    return left / left.sum(-1, keepdim=True)


def inverse_cdf(p: Tensor, uniforms: Tensor) -> Tensor:
    """The token each uniform number in [0, 1) falls on, never one of probability zero.

    Args: p: [B, V], need not sum to exactly 1.  uniforms: [B].  Returns: [B] token ids.
    """
    # A running sum ends short of 1, and a parallel one may wobble where p is zero. So only tokens with mass
    # have a reach; the number is scaled to the longest reach and stays below it: some token is always beyond.
    reach = torch.where(p > 0, p.cumsum(-1), -1)
    total = reach.amax(-1)
    mark = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return (reach > mark[:, None]).view(torch.uint8).argmax(-1)


def verify_greedy(tree: DraftTree, choices: Tensor) -> Verified:
    """Keep the draft tokens that the target would have chosen itself (temperature 0).

    Args: choices: [B, N] the target's argmax after each node.
    """
    deepest = _deepest(tree)
    agreed = tree.valid() & (tree.tokens == choices.gather(1, tree.parents.clamp(min=0)))
    node = torch.zeros_like(tree.counts)
    path = [node]
    for _ in range(deepest):
        child = _first_child(tree, node, agreed)
        path.append(child)
        node = torch.where(child > 0, child, node)
    return _verified(tree, path, deepest, _at(choices, node))


def uniforms_needed(tree: DraftTree) -> int:
    """How many random numbers a row `verify_lossless` takes: one a node, N.

    Fixed children: column i is the draw at node i. Sampled children: column i > 0 decides on node i, column 0
    is the last draw. A walk meets a node once: no number is used twice. Padding a row changes nothing in it.
    """
    return tree.size


def verify_lossless(tree: DraftTree, probs: Tensor, uniforms: Tensor) -> Verified:
    """Keep draft tokens such that what is emitted follows the target's distribution exactly.

    Fixed children (`tree.q` is None): one token is drawn from p at each node; the walk descends if a child
    carries it, else that same token is the bonus. Sampled children: recursive rejection in draw order (EAGLE,
    arXiv:2401.15077; SpecInfer, arXiv:2305.09781); on a chain that is speculative sampling, min(1, p/q)
    (arXiv:2302.01318).

    The rule for sampled children is lossless only if no sampled child was dropped or reordered because of its
    own value or score: the shape of the tree may depend only on what was known before those siblings were
    drawn.

    Args:
        probs: [B, N, V] the target's *processed* distribution after each node (temperature, top-p, …).
        uniforms: [B, U >= uniforms_needed(tree)] independent numbers in [0, 1); float64 gives tokens rarer
            than 2^-24 their due.

    Raises:
        NonFiniteLogitsError: a distribution of a real node is not finite.
        ValueError: a distribution does not sum to 1, uniforms are too few, draw_order is missing or has gaps.
    """
    needed = uniforms_needed(tree)
    if uniforms.shape[1] < needed:
        raise ValueError(
            f"verify_lossless got {uniforms.shape[1]} uniforms a row, needs {needed}: uniforms_needed(tree)"
        )
    _check_distributions("target", probs, tree.valid())
    if tree.q is None:
        return _verify_fixed(tree, probs, uniforms)
    return _verify_sampled(tree, probs, uniforms, tree.q)


def verify_typical(
    tree: DraftTree, probs: Tensor, choices: Tensor, epsilon: float = 0.09, delta: float = 0.3
) -> Verified:
    """Typical acceptance (Medusa, arXiv:2401.10774). It CHANGES the output distribution: it is not lossless.

    A draft token is accepted if the target gives it more than min(epsilon, delta · exp(-entropy)), where the
    distribution and its entropy are those after the token's parent. The longest accepted path wins, among
    equals the likeliest.

    Args: probs: [B, N, V] as in `verify_lossless`.  choices: [B, N] the target's own token after each node.
    """
    valid = tree.valid()
    _check_distributions("target", probs, valid)
    deepest, parents = _deepest(tree), tree.parents.clamp(min=0)
    threshold = (delta * torch.exp(-torch.special.entr(probs).sum(-1))).clamp(max=epsilon)
    likelihood = probs[torch.arange(len(probs), device=probs.device)[:, None], parents, tree.tokens]
    drafted = tree.parents >= 0
    passed = valid & (~drafted | (likelihood > threshold.gather(1, parents)))
    log_likelihood = torch.where(drafted, likelihood.log(), 0)

    accepted, score = passed, torch.zeros_like(log_likelihood)
    for _ in range(deepest):  # after d rounds, nodes down to depth d have heard from all their ancestors
        accepted = passed & accepted.gather(1, parents)
        score = log_likelihood + torch.where(drafted, score.gather(1, parents), 0)
    depth = torch.where(accepted, tree.depth, -1)
    longest = accepted & (depth == depth.amax(1, keepdim=True))
    end = torch.where(longest, score, -torch.inf).argmax(1)

    node, path = end, []
    for level in range(deepest, 0, -1):
        reached = _at(tree.depth, node) == level
        path.append(torch.where(reached, node, 0))
        node = torch.where(reached, _at(parents, node), node)
    return _verified(tree, [torch.zeros_like(end), *reversed(path)], deepest, _at(choices, end))


def _verify_fixed(tree: DraftTree, probs: Tensor, uniforms: Tensor) -> Verified:
    deepest, valid = _deepest(tree), tree.valid()
    node = torch.zeros_like(tree.counts)
    path, token = [node], node
    for _ in range(deepest + 1):
        token = inverse_cdf(_distribution(probs, node).to(_precise(probs)), _at(uniforms, node))
        child = _first_child(tree, node, valid & (tree.tokens == token[:, None]))
        if _none(child > 0):
            break
        path.append(child)
        node = torch.where(child > 0, child, node)
    return _verified(tree, path, deepest, token)


def _verify_sampled(tree: DraftTree, probs: Tensor, uniforms: Tensor, q: Tensor) -> Verified:
    if tree.draw_order is None:
        raise ValueError("the tree has q but no draw_order; sampled children are verified in the order they were drawn")
    _check_draw_order(tree, tree.draw_order)
    _check_distributions("draft", q, _has_children(tree))
    deepest, valid = _deepest(tree), tree.valid()
    siblings = int(torch.where(valid & (tree.parents >= 0), tree.draw_order, -1).max()) + 1
    dtype = torch.promote_types(_precise(probs), q.dtype)
    rows = torch.arange(len(probs), device=probs.device)

    node = torch.zeros_like(tree.counts)
    path, p = [node], _distribution(probs, node)
    for _ in range(deepest + 1):
        p = _distribution(probs, node).to(dtype)
        undrawn = _over_vocabulary(_distribution(q, node).to(dtype), tree.draft_ids, p.shape[-1])
        taken = torch.zeros_like(node)
        for rank in range(siblings):
            child = _first_child(tree, node, valid & (tree.draw_order == rank))
            waiting = (child > 0) & (taken == 0)
            if _none(waiting):
                break
            token = _at(tree.tokens, child)
            q_k = undrawn / undrawn.sum(-1, keepdim=True).clamp(min=torch.finfo(dtype).tiny)
            p_x, q_x = _at(p, token), _at(q_k, token)
            # A child that q could not have drawn here counts as absent: to accept or to reject it would both
            # change the law.
            tested = waiting & (q_x > 0)
            accepted = tested & (_at(uniforms, child) < accept_probability(p_x, q_x))
            taken = torch.where(accepted, child, taken)
            rejected = tested & ~accepted
            if not _none(rejected):
                # A row that rejected nothing subtracts nothing: cheaper than to choose between two [B, V].
                p = residual(p, q_k * rejected[:, None])
            undrawn[rows, token] = 0
        if _none(taken > 0):
            break
        path.append(taken)
        node = torch.where(taken > 0, taken, node)
    return _verified(tree, path, deepest, inverse_cdf(p, uniforms[:, 0]))


def _at(values: Tensor, index: Tensor) -> Tensor:
    """Entry index[b] of each row: [B, M] and [B] give [B]."""
    return values.gather(1, index[:, None])[:, 0]


def _distribution(probs: Tensor, node: Tensor) -> Tensor:
    """[B, V] a copy of the distribution at each row's node, of [B, N, V]; whole rows, the quickest way."""
    batch, size, _ = probs.shape
    return probs.flatten(0, 1).index_select(0, torch.arange(batch, device=node.device) * size + node)


def _first_child(tree: DraftTree, node: Tensor, eligible: Tensor) -> Tensor:
    """[B] the first child of `node` [B] among the `eligible` [B, N]; 0, nobody's child, if there is none."""
    return (eligible & (tree.parents == node[:, None])).view(torch.uint8).argmax(1)


def _none(mask: Tensor) -> bool:
    """Whether no row is left. Asked on the CPU alone: a GPU would wait longer for it than the steps take."""
    return mask.device.type == "cpu" and not bool(mask.any())


def _deepest(tree: DraftTree) -> int:
    return int(torch.where(tree.valid(), tree.depth, 0).max())


def _verified(tree: DraftTree, path: list[Tensor], deepest: int, bonus: Tensor) -> Verified:
    """Bring the steps to D+1 columns: a walk may have ended early, or tried one level below the deepest."""
    nodes = torch.stack(path[: deepest + 1], dim=1)
    nodes = F.pad(nodes, (0, deepest + 1 - nodes.shape[1]))
    return Verified(nodes, (nodes > 0).sum(1) + (tree.counts > 0), bonus)


def _precise(values: Tensor) -> torch.dtype:
    """The dtype of `values`, at least float32: a half-precision running sum loses whole tokens."""
    return torch.promote_types(values.dtype, torch.float32)


def _over_vocabulary(q: Tensor, draft_ids: Tensor | None, size: int) -> Tensor:
    """Bring [B, V_d] over draft ids to [B, V] over token ids."""
    if draft_ids is None:
        return q
    return q.new_zeros(len(q), size).index_copy_(1, draft_ids, q)


def _has_children(tree: DraftTree) -> Tensor:
    """[B, N] bool: which nodes have a real child."""
    nodes = torch.arange(tree.size, device=tree.parents.device)
    return ((tree.parents[:, None, :] == nodes[:, None]) & tree.valid()[:, None, :]).any(-1)


def _check_distributions(whose: str, probs: Tensor, used: Tensor) -> None:
    """Raise if a used row of [B, N, V] is not a distribution. Its sum tells, and needs no copy."""
    sums = probs.sum(-1)
    wrong = used & ~((sums - 1).abs() < 0.05)  # NaN fails too; bfloat16 rows are off by up to 0.004
    if not bool(wrong.any()):
        return
    row, node = wrong.nonzero()[0].tolist()
    found = float(sums[row, node])
    where = f"the {whose}'s distribution at row {row}, node {node}"
    if not bool(probs[row, node].isfinite().all()):
        raise NonFiniteLogitsError(
            f"{where} is not finite; look for NaN or overflow in the logits, or for a mask of every token"
        )
    raise ValueError(f"{where} sums to {found:.4g}, expected 1; pass probabilities, not logits")


def _check_draw_order(tree: DraftTree, order: Tensor) -> None:
    """Raise unless the children of a node carry the ranks 0, 1, 2, … once each: a gap is a draw dropped."""
    nodes = torch.arange(tree.size, device=order.device)
    mine, other = order[:, :, None], order[:, None, :]
    before = (other < mine) | ((other == mine) & (nodes[None, :] < nodes[:, None]))
    sibling = (tree.parents[:, :, None] == tree.parents[:, None, :]) & tree.valid()[:, None, :]
    wrong = tree.valid() & (tree.parents >= 0) & ((before & sibling).sum(-1) != order)
    if bool(wrong.any()):
        row, node = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"draw_order at row {row}, node {node} is {int(order[row, node])}, but its siblings do not fill "
            "the ranks before it; dropping a sampled child is not lossless: keep all draws or fix children"
        )
