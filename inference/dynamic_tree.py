"""The dynamic draft tree of EAGLE-2, and the beam that cost-aware trees grow too.

B rows, W beam nodes, P candidates, k children.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from headsmith.heads.drafter import Drafter, DraftState, Proposal
from headsmith.heads.tree import DraftTree
from torch import Tensor

from .proposals import best_children


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
        beam = Beam(drafter, state, proposal, active, self.top_k)
        for _ in range(1, min(self.depth, drafter.max_depth)):
            # A child never scores above its parent: where no beam node beats the last one kept, the tree is final.
            if not bool((active & (beam.best() > beam.pool.last_kept(self.total - 1))).any()):
                break
            beam.grow()
        return beam.pool.tree(root, active, self.total)


class Beam:
    """A pool of candidates, and the nodes of its deepest level that are expanded next.

    Args:
        proposal: the first level's.
        active: [B] rows that take part.
        top_k: width of the beam, and children looked at a node.
    """

    def __init__(self, drafter: Drafter, state: DraftState, proposal: Proposal, active: Tensor, top_k: int) -> None:
        self.drafter, self.state, self.active, self.top_k = drafter, state, active, top_k
        ids, scores = best_children(proposal, top_k, drafter.draft_ids)
        self.pool = Pool(ids[:, 0], scores[:, 0])
        self.nodes = self.pool.last()  # [B, W] indices into the pool
        self._number = torch.zeros_like(self.nodes)  # of each node's parent among the expanded nodes
        self._done = 0

    def best(self) -> Tensor:
        """[B] score of the best node to be expanded."""
        return self.pool.at(self.nodes)[1].max(1).values

    def grow(self) -> Tensor:
        """Draft one level deeper; return the scores [B, W, k] of the children given their parents."""
        width = self.nodes.shape[1]
        tokens, total = self.pool.at(self.nodes)
        valid = (total > -torch.inf) & self.active[:, None]
        proposal = self.drafter.expand(self.state, self._number, tokens, valid)
        ids, scores = best_children(proposal, self.top_k, self.drafter.draft_ids)
        start = self.pool.extend(ids, scores + total[..., None], self.nodes)
        fresh = self.pool.scores[:, start:]
        picked = fresh.topk(min(self.top_k, fresh.shape[1]), dim=1).indices
        self.nodes = picked + start
        self._number = picked // ids.shape[2] + 1 + self._done
        self._done += width
        return scores


class Pool:
    """Candidates of a tree: [B, P] tokens, summed scores, parent (pool index, -1 is node 0) and depth."""

    def __init__(self, ids: Tensor, scores: Tensor) -> None:
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
        """The tree of the `total` best nodes, node 0 included."""
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
