"""Drafters that follow a script: what the conformance suite drives the decoder with.

A script is, for every row, the prompt and the answer that the target is known to give.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from headsmith.heads.drafter import DraftState, Needs, Proposal, TargetFeatures
from torch import Tensor

SCORES = (-0.2, -1.8, -3.5)  # of the best three children


@dataclass
class ScriptState(DraftState):
    known: list[int] = field(default_factory=list)
    nodes: list[list[tuple[int, bool]]] = field(default_factory=list)  # (depth, on the script's path)
    observed: list[list[int]] = field(default_factory=list)


class ScriptedDrafter:
    """Proposes the script's next token at a chosen rank, with decoys around it.

    Args:
        scripts: prompt and answer of every row.
        vocab: size of the target's vocabulary.
        right: (row, level) -> whether the script's token is among the children at all.
        rank: (row, level) -> the rank it is given among three.
        stops: (row, level) -> whether there is no continuation at all.
        draft_ids: a reduced draft vocabulary; a script token outside it cannot be drafted.
        explicit: propose the three children by their ids alone, which spares large vocabularies dense scores.
    """

    def __init__(
        self,
        scripts: list[list[int]],
        vocab: int,
        right: Callable[[int, int], bool] = lambda row, level: True,
        rank: Callable[[int, int], int] = lambda row, level: 0,
        stops: Callable[[int, int], bool] = lambda row, level: False,
        draft_ids: Tensor | None = None,
        explicit: bool = False,
        max_depth: int = 16,
        needs: Needs | None = None,
    ) -> None:
        self.scripts, self.vocab = scripts, vocab
        self.right, self.rank, self.stops = right, rank, stops
        self.draft_ids, self.explicit = draft_ids, explicit
        self.max_depth = max_depth
        self.needs = needs or Needs(positions="none")

    def start(self, session: Any, input_ids: Tensor, lengths: Tensor) -> ScriptState:
        self.state = ScriptState(
            session, len(self.scripts), known=[1] * len(self.scripts), observed=[[r[0]] for r in self.scripts]
        )
        return self.state

    def observe(
        self, state: ScriptState, features: TargetFeatures | None, next_tokens: Tensor, counts: Tensor
    ) -> Proposal:
        assert (features is None) == (self.needs.positions == "none")
        for row, count in enumerate(counts.tolist()):
            state.known[row] += count
            state.observed[row] += next_tokens[row, :count].tolist()
        state.nodes = [[(0, True)] for _ in self.scripts]
        return self._propose([[(0, True)] for _ in self.scripts])

    def expand(self, state: ScriptState, parents: Tensor, tokens: Tensor, valid: Tensor) -> Proposal:
        levels = []
        for row, (above, new) in enumerate(zip(parents.tolist(), tokens.tolist())):
            level = []
            for parent, token in zip(above, new):
                depth, on_path = state.nodes[row][parent]
                level.append((depth + 1, on_path and token == self._script(row, depth)))
            state.nodes[row] += level
            levels.append(level)
        return self._propose(levels)

    def _script(self, row: int, depth: int) -> int:
        index = self.state.known[row] + depth
        return self.scripts[row][index] if index < len(self.scripts[row]) else 0

    def _propose(self, levels: list[list[tuple[int, bool]]]) -> Proposal:
        if self.explicit:
            return self._propose_ids(levels)
        scores = torch.full((len(levels), len(levels[0]), self.vocab), -torch.inf)
        for row, level in enumerate(levels):
            for place, (depth, on_path) in enumerate(level):
                if not self.stops(row, depth + 1):
                    scores[row, place] = self._scores(row, depth, on_path)
        return Proposal(scores if self.draft_ids is None else scores[..., self.draft_ids])

    def _propose_ids(self, levels: list[list[tuple[int, bool]]]) -> Proposal:
        ids = [[self._children(row, *node) for node in level] for row, level in enumerate(levels)]
        stopped = [[self.stops(row, depth + 1) for depth, _ in level] for row, level in enumerate(levels)]
        scores = torch.tensor(SCORES).where(~torch.tensor(stopped)[..., None], -torch.inf)
        return Proposal(scores, torch.tensor(ids))

    def _children(self, row: int, depth: int, on_path: bool) -> list[int]:
        truth = self._script(row, depth)
        # Decoys are never the truth, so that a wrong drafter is wrong everywhere.
        children = [(truth + 1 + 7 * i + depth) % self.vocab for i in range(3)]
        children = [c if c != truth else (truth + 5) % self.vocab for c in children]
        if on_path and self.right(row, depth + 1):
            children[self.rank(row, depth + 1)] = truth
        return children

    def _scores(self, row: int, depth: int, on_path: bool) -> Tensor:
        scores = torch.full((self.vocab,), -9.0)
        scores[self._script(row, depth)] = -torch.inf
        for token, score in zip(self._children(row, depth, on_path), SCORES):
            scores[token] = score
        return scores
