"""What shapes draft trees: the protocols of tree builders.

B rows.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from headsmith.heads.drafter import Drafter, DraftState, Proposal
from headsmith.heads.tree import DraftTree
from torch import Tensor

from .engine import Session


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


@runtime_checkable
class AdaptiveBuilder(TreeBuilder, Protocol):
    """A builder that follows how decoding goes. While it does not `pay`, the decoder asks for no draft at all."""

    pays: bool

    def prepare(self, session: Session, drafter: Drafter) -> None:
        """Before a call, with its session."""

    def learn(self, counts: Tensor, active: Tensor, seconds: dict[str, float]) -> None:
        """After a round: path lengths [B] (node 0 included), which rows took part, and its time by part (`PARTS`)."""
