"""The protocol that every drafter follows, trained or not, and the registry of those that headsmith knows.

B rows, T tokens, M newly verified positions, W expanded nodes, C captured layers, H hidden, V vocabulary,
V_d draft vocabulary, J draft levels (heads, or unrolled steps).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True)
class Needs:
    """What a drafter wants to see of the target.

    Args:
        layers: indices k into transformers' `hidden_states`: k < num_layers is the input of layer k.
        final: whether the feature after the target's final norm is used.
        positions: `all` newly verified positions, only the `last`, or `none` (tokens suffice).
    """

    layers: tuple[int, ...] = ()
    final: bool = False
    positions: Literal["all", "last", "none"] = "all"


@dataclass
class TargetFeatures:
    """What the target computed over a batch; only what the drafter needs is kept, the rest is None.

    Args:
        input_ids: [B, T].
        hidden: [B, T, C, H] inputs of the captured layers.
        final: [B, T, H] hidden state after the final norm.
        loss_mask: [B, T] bool: tokens that the target wrote, and which are learned. Training only.
        position_ids: [B, T].
        top: [B, T] the target's own most likely next token over its whole vocabulary, where a learned token follows.
            Training only.
    """

    input_ids: Tensor
    hidden: Tensor | None = None
    final: Tensor | None = None
    loss_mask: Tensor | None = None
    position_ids: Tensor | None = None
    top: Tensor | None = None


class Teacher(Protocol):
    """Frozen functions of the target, differentiable in their input and outside any wrapped module."""

    def logits(self, feature: Tensor) -> Tensor:
        """[..., H] feature after the final norm -> [..., V_d] logits of the draft vocabulary."""

    def embed(self, ids: Tensor) -> Tensor:
        """[...] token ids -> [..., H] input embeddings."""


@dataclass
class HeadLoss:
    """Loss and hits as sums and counts, level by level, so that they are normalised once over all ranks.

    Args:
        loss: [J] sums over supervised positions, connected to the graph even where there are none.
        weight: [J] weight of each level in the total.
        count: [J] positions summed over.
        hits: [J, K] how often the target's most likely token was among the drafter's best 1..K.
        joint: [J] positions where every level up to this one had the target's most likely token first.
    """

    loss: Tensor
    weight: Tensor
    count: Tensor
    hits: Tensor
    joint: Tensor

    def total(self, supervised: Tensor | float) -> Tensor:
        """The scalar to minimise: weighted sums over the number of supervised tokens of the whole step."""
        return (self.loss * self.weight).sum() / supervised


@dataclass
class Proposal:
    """One level of continuations: for each of W nodes, scored tokens.

    Args:
        scores: [B, W, V_d] log-probabilities in the draft vocabulary, or [B, W, k] beside explicit ids;
            -inf means no continuation.
        ids: [B, W, k] token ids of the target's vocabulary, None where scores cover the draft vocabulary.
    """

    scores: Tensor
    ids: Tensor | None = None


@dataclass
class DraftState:
    """What a drafter remembers of the rows it serves. Drafters subclass it."""

    session: Any
    batch: int


@runtime_checkable
class Drafter(Protocol):
    """An object that proposes continuations; a trained one is an `nn.Module` with `forward`.

    `needs`, `max_depth` (levels it can draft) and `draft_ids` ([V_d] token ids, None where V_d = V) are constants. One
    that also has `max_positions` is not asked where a draft could stand at that position or behind it: such a row goes
    on plainly.
    """

    needs: Needs
    max_depth: int
    draft_ids: Tensor | None

    def start(self, session: Any, input_ids: Tensor, lengths: Tensor) -> DraftState:
        """Open a state for right-padded prompts [B, T] of the given lengths.

        `session` gives the target (`session.target`) and its capacity in tokens (`session.capacity`).
        """

    def observe(
        self, state: DraftState, features: TargetFeatures | None, next_tokens: Tensor, counts: Tensor
    ) -> Proposal:
        """Take in what the target has just verified, forget what was only drafted, propose the first level.

        Args:
            features: the target's true features of M positions a row (the prompt the first time, then the accepted
                path), or None if `needs.positions` is "none".
            next_tokens: [B, M] the token that follows each of those positions.
            counts: [B] how many of the M are real; a row with 0 is ignored and its proposal is never read.
        Returns: a proposal with W = 1: what may follow the last of the next tokens.
        """

    def expand(self, state: DraftState, parents: Tensor, tokens: Tensor, valid: Tensor) -> Proposal:
        """Draft one more level below W nodes.

        Args:
            parents: [B, W] the node each one hangs below, counted over the nodes expanded since `observe`, in call
                order from 1; 0 is the root, the last of `next_tokens`.
            tokens: [B, W] token of each node.
            valid: [B, W] which of them are real.
        """


@runtime_checkable
class RewindableDrafter(Drafter, Protocol):
    """A drafter whose state can be cut back; others begin anew when a text is gone on with."""

    def rewind(self, state: DraftState, lengths: Tensor) -> None:
        """Forget all but the first `lengths` [B] observed positions of every row, each at least 1."""


DRAFTERS: dict[str, type] = {}


def register(name: str) -> Callable[[type], type]:
    """Class decorator that enters a drafter into the registry under the name recipes and folders use."""

    def enter(cls: type) -> type:
        if name in DRAFTERS:
            raise ValueError(f"a drafter named {name!r} is registered already: {DRAFTERS[name].__qualname__}")
        cls.method = name  # type: ignore[attr-defined]
        DRAFTERS[name] = cls
        return cls

    return enter


def last_valid(values: Tensor, counts: Tensor) -> Tensor:
    """Pick from [B, M, ...] each row's entry at counts - 1 (entry 0 where the count is 0)."""
    index = (counts - 1).clamp(min=0)
    return values[torch.arange(values.shape[0], device=values.device), index]
