"""SpeculativeDecoder: prefill, then draft -> verify -> commit until every row has ended.

B rows, T prompt tokens, N tree nodes, M newly verified positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from headsmith.heads.drafter import Drafter, DraftState, TargetFeatures, last_valid
from headsmith.heads.target import Target
from headsmith.heads.tree import DraftTree
from torch import Tensor

from .engine import NodeOutput, Session, choose_forward
from .options import DecodingOptions, decoding_options
from .rows import Rows, right_padded
from .stats import DecodeStats
from .trees import TreeBuilder, make_tree
from .verify import NonFiniteLogitsError, Verified, uniforms_needed, verify_greedy, verify_lossless


@dataclass
class DecodeOutput:
    """What `generate` returns.

    Args:
        sequences: [B, T + new] as `model.generate` returns them: the prompt as given, the answer, padding.
        stats: counts of this call.
    """

    sequences: Tensor
    stats: DecodeStats


class SpeculativeDecoder:
    """Decodes with a drafter, verifying a tree of draft tokens a forward; the output is the target's own.

    Greedy output is token for token that of `model.generate` in fp32; sampled output follows exactly the law of
    `model.generate` with the same arguments.

    Args:
        target: the target.
        drafter: an object of the `Drafter` protocol, or None for plain decoding on the same engine.
        tree: `chain`, `fixed` or `dynamic`, with options after a colon, or a tree builder.
        forward: `auto` takes the lean forward where the target's layout allows it; `lean`, `generic`.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        tree: str | TreeBuilder = "dynamic",
        forward: Literal["auto", "lean", "generic"] = "auto",
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.builder = make_tree(tree)
        self.forward = choose_forward(target, forward)

    @property
    def tree_name(self) -> str:
        return "plain" if self.drafter is None else str(getattr(self.builder, "name", type(self.builder).__name__))

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        streamer: Any = None,
        generator: torch.Generator | None = None,
        **arguments: Any,
    ) -> DecodeOutput:
        """Decode prompts [B, T], padded on either side, with generate()'s own arguments.

        Args:
            streamer: a transformers streamer (one row only).
            generator: source of every random number; the global one if None.
        Raises: ValueError for an argument that is not honoured; NonFiniteLogitsError naming the row.
        """
        options = decoding_options(self.target, **arguments)
        prompts, lengths = right_padded(input_ids, attention_mask)
        rows = Rows(input_ids, lengths, options, streamer)
        stats = DecodeStats(self.tree_name, rows.batch, getattr(self.builder, "depth", 0) if self.drafter else 0)
        if rows.limit == 0:
            return DecodeOutput(rows.sequences(), stats)
        self._check_positions(int(lengths.max()) + rows.limit)

        nodes = self.builder.nodes if self.drafter else 1
        needs = self.drafter.needs if self.drafter else None
        session = Session(self.target, rows.batch, prompts.shape[1] + rows.limit + nodes, self.forward, needs)
        output = session.prefill(prompts, lengths)
        root = DraftTree.root(last_valid(prompts, lengths))
        first = self._verify(session, root, last_valid(output.final, lengths)[:, None], options, generator)
        state = self.drafter.start(session, prompts, lengths) if self.drafter else None
        seen, counts = self._follow(output, prompts, lengths, first.bonus), lengths
        bonus = first.bonus
        rows.push(bonus[:, None], torch.ones_like(lengths))
        while not rows.finished:
            tree = self._draft(state, seen, counts, bonus, rows.active, generator)
            output = session.forward(tree.tokens, tree.depth, tree.ancestors())
            verified = self._verify(session, tree, output.final, options, generator)
            session.commit(verified.path, verified.counts)
            bonus, counts = verified.bonus, verified.counts
            seen = self._accepted(output, tree, verified)
            stats.record(verified.counts, rows.push(seen.next_tokens, counts), rows.active_before)
        rows.end()
        return DecodeOutput(rows.sequences(), stats)

    def _draft(
        self,
        state: DraftState | None,
        seen: _Seen,
        counts: Tensor,
        bonus: Tensor,
        active: Tensor,
        generator: torch.Generator | None,
    ) -> DraftTree:
        if self.drafter is None or state is None:
            return DraftTree.root(bonus, active.long())
        counts = torch.where(active, counts, 0)
        features = None if self.drafter.needs.positions == "none" else seen.features
        proposal = self.drafter.observe(state, features, seen.next_tokens, counts)
        return self.builder.build(self.drafter, state, proposal, bonus, active, generator)

    def _verify(
        self,
        session: Session,
        tree: DraftTree,
        final: Tensor,
        options: DecodingOptions,
        generator: torch.Generator | None,
    ) -> Verified:
        logits = session.logits(final)
        if options.warpers is None:
            best = logits.max(-1)
            if not bool(torch.isfinite(best.values).all()):
                raise NonFiniteLogitsError(_non_finite(best.values, tree.valid()))
            return verify_greedy(tree, best.indices)
        flat = logits.flatten(0, 1)
        flat = flat if flat.dtype == torch.float64 else flat.float()
        # Warpers look at the scores alone, so the token ids that the call wants may be anything.
        probabilities = options.warpers(cast(Any, None), flat).softmax(-1).view(logits.shape)
        shape = (tree.tokens.shape[0], uniforms_needed(tree))
        uniforms = torch.rand(shape, dtype=torch.float64, device=logits.device, generator=generator)
        return verify_lossless(tree, probabilities, uniforms)

    def _follow(self, output: NodeOutput, prompts: Tensor, lengths: Tensor, first: Tensor) -> _Seen:
        """The whole prompt with the token after each of its positions."""
        following = torch.cat((prompts[:, 1:], prompts[:, :1]), 1)
        following = following.scatter(1, (lengths - 1)[:, None], first[:, None])
        return _Seen(TargetFeatures(prompts, output.hidden, output.final), following)

    def _accepted(self, output: NodeOutput, tree: DraftTree, verified: Verified) -> _Seen:
        """The accepted path [B, M] with the token after each of its nodes."""
        longest = max(int(verified.counts.max()), 1)
        path = verified.path[:, :longest]
        rows = torch.arange(path.shape[0], device=path.device)[:, None]
        tokens = tree.tokens.gather(1, path)
        last = (verified.counts - 1).clamp(min=0)
        following = torch.cat((tokens[:, 1:], tokens[:, :1]), 1).scatter(1, last[:, None], verified.bonus[:, None])
        hidden = None if output.hidden is None else output.hidden[rows, path]
        return _Seen(TargetFeatures(tokens, hidden, output.final[rows, path]), following)

    def _check_positions(self, needed: int) -> None:
        limit = self.target.max_positions
        if limit is not None and needed > limit:
            raise ValueError(
                f"prompt and new tokens need {needed} positions, {self.target.name} has {limit}; "
                "shorten the prompt or lower max_new_tokens"
            )


@dataclass
class _Seen:
    """Newly verified positions: the target's features [B, M] and the token that follows each."""

    features: TargetFeatures
    next_tokens: Tensor


def _non_finite(values: Tensor, valid: Tensor) -> str:
    row, node = (~torch.isfinite(values)).nonzero()[0].tolist()
    real = "" if bool(valid[row, node]) else " (a padding node)"
    return f"the target's logits are not finite in row {row}, node {node}{real}; try another dtype"
