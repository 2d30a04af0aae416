"""Draft trees of a fixed shape, chains among them.

B rows, N tree nodes, V_d draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from headsmith.heads.drafter import Drafter, DraftState, Proposal
from headsmith.heads.tree import DraftTree
from torch import Tensor

from .proposals import best_children, pad_width, to_tokens

# Rank paths by their usual worth: a wide first level, a long first branch.
DEFAULT_PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0))


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
            return best_children(proposal, width, self.draft_ids)
        if proposal.ids is not None:
            raise ValueError("children can only be sampled from scores over the whole draft vocabulary")
        probabilities = proposal.scores.double().softmax(-1)
        for place, node in enumerate(nodes):
            self.q[node] = probabilities[:, place]
        noise = torch.empty_like(probabilities).exponential_(generator=generator)
        # Exponential races: the order of arrival is the order of draws without replacement.
        drawn = (probabilities / noise).topk(min(width, probabilities.shape[-1]), dim=-1).indices
        scores = probabilities.gather(-1, drawn).log()
        return pad_width(to_tokens(drawn, self.draft_ids), scores, width)

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
