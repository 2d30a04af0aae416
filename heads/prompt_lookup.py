"""Prompt lookup: the continuation of the latest earlier occurrence of the last few tokens. Nothing is trained.

After "Prompt Lookup Decoding" (Saxena, 2023). B rows, W nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .drafter import DraftState, Needs, Proposal, TargetFeatures, register


@dataclass
class LookupState(DraftState):
    """The tokens of every row, and the continuations found for it this round."""

    tokens: list[list[int]] = field(default_factory=list)
    found: list[list[list[int]]] = field(default_factory=list)
    nodes: list[list[tuple[int, ...]]] = field(default_factory=list)


@register("prompt_lookup")
class PromptLookup:
    """Drafts what followed the longest recent n-gram that the row ends with, looked up in prompt and answer.

    Args:
        longest: n-gram length tried first; shorter ones follow, down to 1.
        branches: how many different occurrences are kept, the latest first.
        max_depth: tokens of a continuation.
    """

    needs = Needs(positions="none")
    draft_ids = None

    def __init__(self, longest: int = 3, branches: int = 2, max_depth: int = 8) -> None:
        if longest < 1 or branches < 1 or max_depth < 1:
            raise ValueError(f"longest, branches and max_depth are at least 1, not {longest}, {branches}, {max_depth}")
        self.longest, self.branches, self.max_depth = longest, branches, max_depth

    @classmethod
    def build(cls, target: Any, **options: Any) -> PromptLookup:
        """A drafter for any target: it looks at tokens only."""
        return cls(**options)

    def start(self, session: Any, input_ids: Tensor, lengths: Tensor) -> LookupState:
        first = [[row[0]] for row in input_ids.tolist()]
        return LookupState(session, len(first), tokens=first)

    def observe(
        self, state: LookupState, features: TargetFeatures | None, next_tokens: Tensor, counts: Tensor
    ) -> Proposal:
        for row, (new, count) in enumerate(zip(next_tokens.tolist(), counts.tolist())):
            state.tokens[row] += new[:count]
        state.found = [self._continuations(tokens) for tokens in state.tokens]
        # Nodes expanded so far, each as the tokens that lead to it; node 0 is the root.
        state.nodes = [[()] for _ in state.tokens]
        return self._level(state, [[()] for _ in state.tokens], next_tokens.device)

    def expand(self, state: LookupState, parents: Tensor, tokens: Tensor, valid: Tensor) -> Proposal:
        paths = []
        for row, (above, new) in enumerate(zip(parents.tolist(), tokens.tolist())):
            known = state.nodes[row]
            paths.append([(*known[parent], token) for parent, token in zip(above, new)])
            known += paths[-1]
        return self._level(state, paths, tokens.device)

    def rewind(self, state: LookupState, lengths: Tensor) -> None:
        # Behind the text's first token stands the one after each observed position.
        state.tokens = [tokens[: 1 + length] for tokens, length in zip(state.tokens, lengths.tolist())]

    def _level(self, state: LookupState, paths: list[list[tuple[int, ...]]], device: torch.device) -> Proposal:
        shape = (len(paths), len(paths[0]), self.branches)
        ids = torch.zeros(shape, dtype=torch.long)
        scores = torch.full(shape, -torch.inf)
        for row, nodes in enumerate(paths):
            for place, path in enumerate(nodes):
                for rank, token in enumerate(self._after(state.found[row], path)):
                    ids[row, place, rank] = token
                    # Later and longer matches first; every step costs a little, so that ties prefer short paths.
                    scores[row, place, rank] = -0.1 - rank
        return Proposal(scores.to(device), ids.to(device))

    @staticmethod
    def _after(found: list[list[int]], path: tuple[int, ...]) -> list[int]:
        depth = len(path)
        following = [c[depth] for c in found if len(c) > depth and tuple(c[:depth]) == path]
        return list(dict.fromkeys(following))

    def _continuations(self, tokens: list[int]) -> list[list[int]]:
        found: list[list[int]] = []
        for size in range(min(self.longest, len(tokens) - 1), 0, -1):
            tail = tokens[-size:]
            for start in range(len(tokens) - size - 1, -1, -1):
                if tokens[start : start + size] == tail:
                    after = tokens[start + size : start + size + self.max_depth]
                    if after not in found:
                        found.append(after)
                if len(found) == self.branches:
                    return found
        return found
