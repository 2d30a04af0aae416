"""The draft tree: what a drafter proposes and the target verifies in one forward.

B rows, N nodes (node 0 included), V_d draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class DraftTree:
    """A ragged batch of draft trees, parents before children.

    Node 0 is the last committed token: parent -1, depth 0, its keys and values not cached yet. With L cached
    tokens in a row, a node sits at position L + depth and in cache slot L + index.

    Args:
        tokens: [B, N] token ids of the target's vocabulary.
        parents: [B, N] index of each node's parent; parents[:, 0] = -1.
        depth: [B, N] distance from node 0.
        counts: [B] how many leading nodes of a row are real; 0 for a row that takes no part.
        q: [B, N, V_d] the distribution from which the children of each node were *sampled*, in draft-vocabulary
            ids; None where children are fixed (top-k, lookup).
        draft_ids: [V_d] token id of each draft id; None where the two vocabularies are one.
        draw_order: [B, N] rank of a node among its siblings in the order they were drawn; None for fixed children.
    """

    tokens: Tensor
    parents: Tensor
    depth: Tensor
    counts: Tensor
    q: Tensor | None = None
    draft_ids: Tensor | None = None
    draw_order: Tensor | None = None

    @classmethod
    def root(cls, tokens: Tensor, counts: Tensor | None = None) -> DraftTree:
        """A tree of node 0 alone, [B] tokens: what plain decoding verifies."""
        column = tokens[:, None]
        if counts is None:
            counts = torch.ones_like(tokens)
        return cls(column, torch.full_like(column, -1), torch.zeros_like(column), counts)

    @property
    def size(self) -> int:
        return self.tokens.shape[1]

    def valid(self) -> Tensor:
        """[B, N] bool: which nodes are real."""
        return torch.arange(self.size, device=self.tokens.device) < self.counts[:, None]

    def ancestors(self) -> Tensor:
        """[B, N, N] bool: entry (i, j) says that node j is node i or one of its ancestors."""
        return ancestor_mask(self.parents)

    def best_chain_first(self) -> DraftTree:
        """The same tree with the chain of first children right behind node 0.

        Such nodes then stand in the slots they would have in plain decoding, and round as they would there.
        """
        valid = self.valid()
        siblings = (self.parents[:, :, None] == self.parents[:, None, :]) & valid[:, None, :]
        first = valid & ~siblings.tril(-1).any(2)
        # On the chain stands whoever has none but first children among its ancestors and itself.
        front = first & ~(self.ancestors() & ~first[:, None, :]).any(2)
        order = (~front).long().sort(dim=1, stable=True).indices
        place = order.argsort(dim=1)
        parents = self.parents.gather(1, order)
        return DraftTree(
            tokens=self.tokens.gather(1, order),
            parents=torch.where(parents < 0, parents, place.gather(1, parents.clamp(min=0))),
            depth=self.depth.gather(1, order),
            counts=self.counts,
        )


def ancestor_mask(parents: Tensor) -> Tensor:
    """[B, N] parents (-1 at roots, every parent before its children) -> [B, N, N] mask of ancestors-or-self."""
    size = parents.shape[1]
    nodes = torch.arange(size, device=parents.device)
    # Whoever is reached in two halves of the way: the reach doubles each time, and no node waits for its parent.
    reached = ((parents[:, :, None] == nodes) | (nodes[:, None] == nodes)).float()
    for _ in range((size - 1).bit_length()):
        reached = (reached @ reached).clamp(max=1)
    return reached > 0
