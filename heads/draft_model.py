"""A smaller causal LM of the same tokenizer as the drafter: speculative sampling as it was first described.

arXiv:2211.17192 and arXiv:2302.01318, whose draft is a chain; here it is whatever tree the builder asks for.

B rows, M newly verified positions, W expanded nodes, E nodes expanded so far, V_d draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .checkpoint import describe_target
from .drafter import DraftState, Needs, Proposal, TargetFeatures, last_valid, register
from .target import Target
from .target.loading import load_model, load_tokenizer
from .target.locate import UnsupportedTargetError
from .target.probe import probe
from .target.tokenizers import require_same_tokenizer
from .tree import ancestor_mask
from .vocabulary import draft_vocabulary


@dataclass
class DraftModelState(DraftState):
    """What the draft model has read of every row, and what it drafted since.

    Args:
        own: its session. Every token that the rows are committed to is cached there, the last one too, which the
            target has still to verify from: the target's cache is one token shorter.
        parents: [B, E] of the expanded nodes, each an index among them; -1 below the last committed token.
    """

    own: Any = None
    parents: Any = None


@register("draft_model")
class DraftModel:
    """Drafts with a causal LM of its own, on the project's own engine, each level behind those before.

    Args:
        target: the target that is drafted for.
        model: the draft model. It keeps its own dtype.
        max_depth: levels it may draft.
    Raises: ValueError if it has fewer tokens than the target, or is on another device; UnsupportedTargetError if it
        takes no tree.
    """

    needs = Needs(positions="none")

    def __init__(self, target: Target, model: Target, max_depth: int = 8) -> None:
        if max_depth < 1:
            raise ValueError(f"max_depth is at least 1, not {max_depth}")
        _require_fit(target, model)
        self.model, self.max_depth = model, max_depth
        self.max_positions = model.max_positions
        self.num_tokens = target.num_tokens
        # Two heads of one tokenizer may be filled up with different numbers of rows, and those are never drafted.
        ids = draft_vocabulary(target, None)
        self.draft_ids = None if ids is None else ids.to(target.device)

    @classmethod
    def build(
        cls, target: Target, model: str | Target, max_depth: int = 8, trust_remote_code: bool = False
    ) -> DraftModel:
        """A drafter from a hub name, a folder, or a model that is loaded already.

        Raises: ValueError for another tokenizer, and as the class does; what loading raises for a name.
        """
        tokenizer = None
        if isinstance(model, Target):
            tokenizer = model.tokenizer
        elif target.tokenizer is not None:
            tokenizer = load_tokenizer(model, trust_remote_code)
        if tokenizer is not None and target.tokenizer is not None:
            name = model.name if isinstance(model, Target) else model
            require_same_tokenizer(f"the draft model {name}", tokenizer, target, "take the drafter early_exit")
        if not isinstance(model, Target):
            loaded = load_model(model, target.dtype, trust_remote_code=trust_remote_code)
            model = Target(loaded.to(target.device), tokenizer)
        return cls(target, model, max_depth)

    @property
    def config(self) -> dict[str, Any]:
        """What tells this drafter from others: measured costs are kept by it."""
        return describe_target(self.model) | {"max_depth": self.max_depth}

    def start(self, session: Any, input_ids: Tensor, lengths: Tensor) -> DraftModelState:
        state = DraftModelState(session, len(input_ids), own=session.sibling(self.model))
        # What is observed are tokens that follow another; the first of a text does not.
        self._read(state, input_ids[:, :1], torch.ones_like(lengths))
        return state

    def observe(
        self, state: DraftModelState, features: TargetFeatures | None, next_tokens: Tensor, counts: Tensor
    ) -> Proposal:
        final = self._read(state, next_tokens, counts)
        return self._propose(state, last_valid(final, counts)[:, None])

    def expand(self, state: DraftModelState, parents: Tensor, tokens: Tensor, valid: Tensor) -> Proposal:
        state.parents = torch.cat((state.parents, parents - 1), 1)
        ancestors = ancestor_mask(state.parents)
        # The last committed token is cached: the first level is at depth 0 behind it.
        depth = ancestors.sum(2) - 1
        output = state.own.forward(self._known(tokens), depth, ancestors[:, -tokens.shape[1] :])
        return self._propose(state, output.final)

    def rewind(self, state: DraftModelState, lengths: Tensor) -> None:
        # In front of the first observed token stands the text's first.
        state.own.rewind(1 + lengths)

    def _read(self, state: DraftModelState, tokens: Tensor, counts: Tensor) -> Tensor:
        """Commit the first `counts` [B] of [B, M] tokens behind those read before; their features [B, M, H].

        Nodes that were only drafted stand behind the committed tokens and are written over.
        """
        state.parents = tokens.new_zeros(len(tokens), 0)
        return state.own.extend(self._known(tokens), counts).final

    def _known(self, tokens: Tensor) -> Tensor:
        # The target may emit a row of its head that fills it up, and which the draft model's head has not.
        return tokens.clamp(max=self.model.vocab_size - 1)

    def _propose(self, state: DraftModelState, final: Tensor) -> Proposal:
        logits = state.own.logits(final)[..., : self.num_tokens]
        return Proposal(logits.float().log_softmax(-1))


def _require_fit(target: Target, model: Target) -> None:
    if model.vocab_size < target.num_tokens:
        raise ValueError(
            f"the draft model {model.name} has {model.vocab_size} rows in its head, {target.name} has "
            f"{target.num_tokens} tokens; name a model of the same tokenizer"
        )
    if model.device != target.device:
        raise ValueError(
            f"the draft model {model.name} is on {model.device}, {target.name} on {target.device}; move one of them"
        )
    drive = probe(model)
    if drive.path != "tree":
        raise UnsupportedTargetError(
            f"{model.name} cannot draft: its cache is driven by {drive.path}, expected one that holds a tree "
            f"({drive.reason}); name a model all of whose layers keep keys and values"
        )
