"""Tree builders: from a drafter's proposals to the draft tree that is verified.

B rows, W expanded nodes, N tree nodes, k children, V_d draft vocabulary. A builder is an object with `nodes`, `depth`
and `build`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from headsmith.heads.drafter import Drafter, DraftState, Proposal
from headsmith.heads.tree import DraftTree
from torch import Tensor


class TreeBuilder(Protocol):
    """Shapes what is drafted. `nodes` counts node 0, `depth` the levels below it."""

    @property
    def nodes(self) -> int: ...

    @property
    def depth(self) -> int: ...

    def build(
        self,
        drafter: Drafter,
        state: DraftState,
        proposal: Proposal,
        root: Tensor,
        active: Tensor,
        generator: torch.Generator | None = None,
    ) -> DraftTree:
        """Draft below `root` [B]; rows that are not `active` [B] get a tree of 0 nodes."""


@dataclass(frozen=True)
class FixedTree:
    """A tree of fixed shape, given as paths of child ranks: `((0,), (1,), (0, 0))` is a root with two children,
    the better of which has one.

    Args:
        paths: every node once, each with all its ancestors and its better siblings.
        sampled: draw the children from the drafter's distribution without replacement, in place of the best ones.
            The shape is known before any draw, as exactness demands.
    """

    paths: tuple[tuple[int, ...], ...]
    sampled: bool = False
    name: str = "fixed"
    _levels: list[list[tuple[int, ...]]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        known = set(self.paths)
        for path in self.paths:
            needed = [path[:-1]] if len(path) > 1 else []
            needed += [(*path[:-1], path[-1] - 1)] if path and path[-1] > 0 else []
            missing = [p for p in needed if p not in known]
            if not path or missing:
                raise ValueError(f"the path {list(path)} of a fixed tree needs {missing or 'at least one rank'} too")
        ordered = sorted(known, key=lambda p: (len(p), p))
        depth = max((len(p) for p in ordered), default=0)
        object.__setattr__(self, "_levels", [[p for p in ordered if len(p) == d + 1] for d in range(depth)])

    @property
    def nodes(self) -> int:
        return 1 + len(self.paths)

    @property
    def depth(self) -> int:
        return len(self._levels)

    def build(
        self,
        drafter: Drafter,
        state: DraftState,
        proposal: Proposal,
        root: Tensor,
        active: Tensor,
        generator: torch.Generator | None = None,
    ) -> DraftTree:
        grown = _Growing(root, active, drafter.draft_ids, self.sampled)
        index: dict[tuple[int, ...], int] = {(): 0}  # path -> column among the grown nodes
        expanded: dict[tuple[int, ...], int] = {(): 0}  # path -> number among the expanded nodes
        source: dict[tuple[int, ...], int] = {(): 0}  # path -> its place in the proposal at hand
        for depth, level in enumerate(self._levels[: drafter.max_depth]):
            width = 1 + max(path[-1] for path in level)
            ids, scores = grown.children(proposal, width, generator, [index[p] for p in source])
            for path in level:
                place = source[path[:-1]]
                valid = scores[:, place, path[-1]] > -torch.inf
                index[path] = grown.add(ids[:, place, path[-1]], valid, index[path[:-1]], path)
            following = self._levels[depth + 1] if depth + 1 < min(self.depth, drafter.max_depth) else []
            inner = list(dict.fromkeys(path[:-1] for path in following))
            if not inner:
                break
            tokens, valid = grown.columns([index[p] for p in inner])
            parents = torch.tensor([expanded[p[:-1]] for p in inner], device=root.device).expand(tokens.shape)
            proposal = drafter.expand(state, parents, tokens, valid)
            for path in inner:
                expanded[path] = len(expanded)
            source = {path: place for place, path in enumerate(inner)}
        return grown.tree()


def chain(depth: int = 4, sampled: bool = False) -> FixedTree:
    """One draft token a level, `depth` of them."""
    if depth < 1:
        raise ValueError(f"a chain has a depth of at least 1, not {depth}")
    return FixedTree(tuple((0,) * d for d in range(1, depth + 1)), sampled=sampled, name="chain")


# Rank paths by their usual worth: a wide first level, a long first branch.
DEFAULT_PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0))


@dataclass(frozen=True)
class DynamicTree:
    """The tree of EAGLE-2 (arXiv:2406.16858): a beam by summed log-probability, the best nodes of the whole pool kept.

    Children are the drafter's best tokens and therefore fixed; sampled ones may not be re-ranked by their own score.

    Args:
        total: nodes verified, node 0 included.
        depth: levels drafted.
        top_k: width of the beam, and children looked at a node.
    """

    total: int = 8
    depth: int = 5
    top_k: int = 3
    name: str = "dynamic"

    def __post_init__(self) -> None:
        if self.total < 2 or self.depth < 1 or self.top_k < 1:
            raise ValueError(
                f"a dynamic tree needs total >= 2, depth >= 1 and top_k >= 1, "
                f"not {self.total}, {self.depth}, {self.top_k}"
            )

    @property
    def nodes(self) -> int:
        return self.total

    def build(
        self,
        drafter: Drafter,
        state: DraftState,
        proposal: Proposal,
        root: Tensor,
        active: Tensor,
        generator: torch.Generator | None = None,
    ) -> DraftTree:
        ids, scores = _best(proposal, self.top_k, drafter.draft_ids)
        pool = _Pool(root.shape[0], ids[:, 0], scores[:, 0])
        beam = pool.last()  # [B, W] indices into the pool
        number = torch.zeros_like(beam)  # number of each beam node's parent among the expanded nodes
        done = 0
        for _ in range(1, min(self.depth, drafter.max_depth)):
            width = beam.shape[1]
            tokens, total = pool.at(beam)
            # A child never scores above its parent: where no beam node beats the last one kept, the tree is final.
            if not bool((active & (total.max(1).values > pool.last_kept(self.total - 1))).any()):
                break
            proposal = drafter.expand(state, number, tokens, (total > -torch.inf) & active[:, None])
            ids, scores = _best(proposal, self.top_k, drafter.draft_ids)
            start = pool.extend(ids, scores + total[..., None], beam)
            fresh = pool.scores[:, start:]
            picked = fresh.topk(min(self.top_k, fresh.shape[1]), dim=1).indices
            beam = picked + start
            number = picked // ids.shape[2] + 1 + done
            done += width
        return pool.tree(root, active, self.total)


class _Pool:
    """Candidates of a dynamic tree: [B, P] tokens, summed scores, parent (pool index, -1 is node 0) and depth."""

    def __init__(self, batch: int, ids: Tensor, scores: Tensor) -> None:
        self.tokens, self.scores = ids, scores
        self.parents = torch.full_like(ids, -1)
        self.depth = torch.ones_like(ids)

    def last(self) -> Tensor:
        return torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)

    def at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.tokens.gather(1, index), self.scores.gather(1, index)

    def last_kept(self, size: int) -> Tensor:
        """[B] score of the worst of the `size` best candidates; -inf where there are fewer."""
        if self.scores.shape[1] < size:
            return self.scores.new_full(self.scores.shape[:1], -torch.inf)
        return self.scores.topk(size, dim=1).values[:, -1]

    def extend(self, ids: Tensor, scores: Tensor, parents: Tensor) -> int:
        """Add [B, W, k] children of the pool nodes `parents` [B, W]; return where they begin."""
        start = self.tokens.shape[1]
        depth = self.depth.gather(1, parents)[..., None].expand_as(ids) + 1
        self.tokens = torch.cat((self.tokens, ids.flatten(1)), 1)
        self.scores = torch.cat((self.scores, scores.flatten(1)), 1)
        self.parents = torch.cat((self.parents, parents[..., None].expand_as(ids).flatten(1)), 1)
        self.depth = torch.cat((self.depth, depth.flatten(1)), 1)
        return start

    def tree(self, root: Tensor, active: Tensor, total: int) -> DraftTree:
        # A child never scores above its parent and stands behind it, so a stable order keeps parents first.
        order = self.scores.sort(dim=1, descending=True, stable=True).indices[:, : total - 1]
        kept = self.scores.gather(1, order) > -torch.inf
        place = torch.zeros_like(self.tokens)
        place.scatter_(1, order, torch.arange(1, order.shape[1] + 1, device=order.device).expand_as(order))
        parents = self.parents.gather(1, order)
        parents = torch.where(parents < 0, 0, place.gather(1, parents.clamp(min=0)))
        first = torch.zeros_like(root)[:, None]
        return DraftTree(
            tokens=torch.cat((root[:, None], self.tokens.gather(1, order)), 1),
            parents=torch.cat((first - 1, torch.where(kept, parents, 0)), 1),
            depth=torch.cat((first, torch.where(kept, self.depth.gather(1, order), 1)), 1),
            counts=torch.where(active, kept.sum(1) + 1, 0),
        ).best_chain_first()


class _Growing:
    """Nodes of a fixed tree in the order they are added; a node without a token is invalid with all below it."""

    def __init__(self, root: Tensor, active: Tensor, draft_ids: Tensor | None, sampled: bool) -> None:
        self.draft_ids, self.active = draft_ids, active
        self.tokens, self.valid = [root], [active]
        self.parents, self.depth, self.ranks = [-1], [0], [0]
        self.q: dict[int, Tensor] | None = {} if sampled else None

    def children(
        self, proposal: Proposal, width: int, generator: torch.Generator | None, nodes: list[int]
    ) -> tuple[Tensor, Tensor]:
        if self.q is None:
            return _best(proposal, width, self.draft_ids)
        if proposal.ids is not None:
            raise ValueError("children can only be sampled from scores over the whole draft vocabulary")
        probabilities = proposal.scores.double().softmax(-1)
        for place, node in enumerate(nodes):
            self.q[node] = probabilities[:, place]
        noise = torch.empty_like(probabilities).exponential_(generator=generator)
        # Exponential races: the order of arrival is the order of draws without replacement.
        drawn = (probabilities / noise).topk(min(width, probabilities.shape[-1]), dim=-1).indices
        scores = probabilities.gather(-1, drawn).log()
        return _pad(_to_tokens(drawn, self.draft_ids), scores, width)

    def add(self, tokens: Tensor, valid: Tensor, parent: int, path: tuple[int, ...]) -> int:
        self.tokens.append(tokens)
        self.valid.append(valid & self.valid[parent])
        self.parents.append(parent)
        self.depth.append(len(path))
        self.ranks.append(path[-1])
        return len(self.tokens) - 1

    def columns(self, index: list[int]) -> tuple[Tensor, Tensor]:
        return torch.stack([self.tokens[i] for i in index], 1), torch.stack([self.valid[i] for i in index], 1)

    def tree(self) -> DraftTree:
        tokens, valid = torch.stack(self.tokens, 1), torch.stack(self.valid, 1)
        parents = torch.tensor(self.parents, device=tokens.device).expand_as(tokens)
        depth = torch.tensor(self.depth, device=tokens.device).expand_as(tokens)
        ranks = torch.tensor(self.ranks, device=tokens.device).expand_as(tokens)
        # Real nodes move to the front in their order, so that a row is described by its count.
        order = (~valid).long().sort(dim=1, stable=True).indices
        place = order.argsort(dim=1)
        parents = parents.gather(1, order)
        parents = torch.where(parents < 0, -1, place.gather(1, parents.clamp(min=0)))
        q = None
        if self.q is not None:
            one = next(iter(self.q.values()))
            nodes = [self.q.get(i, torch.zeros_like(one)) for i in range(tokens.shape[1])]
            q = torch.stack(nodes, 1).gather(1, order[..., None].expand(-1, -1, one.shape[-1]))
        return DraftTree(
            tokens=tokens.gather(1, order),
            parents=torch.where(self.active[:, None], parents, self._line(parents)),
            depth=depth.gather(1, order),
            counts=valid.sum(1),
            q=q,
            draft_ids=self.draft_ids,
            draw_order=None if q is None else ranks.gather(1, order),
        )

    @staticmethod
    def _line(parents: Tensor) -> Tensor:
        return torch.arange(-1, parents.shape[1] - 1, device=parents.device).expand_as(parents)


def _best(proposal: Proposal, width: int, draft_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """The `width` best continuations of every node, [B, W, width] token ids and scores (-inf: none)."""
    scores, index = proposal.scores.topk(min(width, proposal.scores.shape[-1]), dim=-1)
    ids = _to_tokens(index, draft_ids) if proposal.ids is None else proposal.ids.gather(-1, index)
    return _pad(ids, scores, width)


def _to_tokens(index: Tensor, draft_ids: Tensor | None) -> Tensor:
    return index if draft_ids is None else draft_ids[index]


def _pad(ids: Tensor, scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    missing = width - ids.shape[-1]
    if missing <= 0:
        return ids, scores
    pad = (0, missing)
    return torch.nn.functional.pad(ids, pad), torch.nn.functional.pad(scores, pad, value=-torch.inf)


def _fixed(paths: Any = DEFAULT_PATHS, sampled: bool = False) -> FixedTree:
    return FixedTree(tuple(tuple(path) for path in paths), sampled=sampled)


TREES = {"chain": chain, "fixed": _fixed, "dynamic": DynamicTree}


def make_tree(tree: str | TreeBuilder) -> TreeBuilder:
    """A builder from its name, with options after a colon: `chain`, `chain:depth=3`, `dynamic:total=8,depth=5,top_k=3`.

    Raises: ValueError for an unknown name or option.
    """
    if not isinstance(tree, str):
        return tree
    name, _, rest = tree.partition(":")
    if name not in TREES:
        raise ValueError(f"unknown tree {name!r}; known are {', '.join(TREES)}")
    options = {}
    for item in filter(None, rest.split(",")):
        key, sign, value = item.partition("=")
        if not sign or not (value.isdigit() or value in ("true", "false")):
            raise ValueError(f"tree option {item!r} should read name=number, as in 'dynamic:total=8,depth=5'")
        options[key] = int(value) if value.isdigit() else value == "true"
    try:
        return TREES[name](**options)  # type: ignore[operator]
    except TypeError as error:
        raise ValueError(f"tree {tree!r}: {error}") from None
