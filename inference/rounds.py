"""One call of the decoder: the prompt, then draft -> verify -> commit until every row has ended.

B rows, T prompt tokens, N tree nodes, M newly verified positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from headsmith.heads.drafter import Drafter, DraftState, TargetFeatures, last_valid
from headsmith.heads.tree import DraftTree
from torch import Tensor

from .acceptance import Acceptance
from .builder import AdaptiveBuilder, TreeBuilder
from .engine import NodeOutput, Session
from .options import DecodingOptions
from .past import Past
from .rows import Rows, Steps
from .stats import DecodeStats, Laps
from .verify import Verified


@dataclass
class Seen:
    """Newly verified positions: the target's features [B, M], the token after each, and how many are real [B]."""

    features: TargetFeatures
    next_tokens: Tensor
    counts: Tensor


class Rounds:
    """The state of one call.

    Args:
        drafter: None decodes plainly.
        adaptive: the builder again, if it follows how decoding goes.
        acceptance: the rule that chooses tokens.
    """

    def __init__(
        self,
        session: Session,
        drafter: Drafter | None,
        builder: TreeBuilder,
        adaptive: AdaptiveBuilder | None,
        acceptance: Acceptance,
        rows: Rows,
        options: DecodingOptions,
        stats: DecodeStats,
        generator: torch.Generator | None,
    ) -> None:
        self.session, self.drafter, self.builder, self.adaptive = session, drafter, builder, adaptive
        self.acceptance, self.rows, self.options, self.stats = acceptance, rows, options, stats
        self.generator = generator
        self.laps = Laps(stats.seconds)
        self.state: DraftState | None = None
        self.observed = session.lengths.clone()
        # Positions up to which the drafter can draft; a row beyond goes on plainly.
        self.reach = getattr(drafter, "max_positions", None)

    def run(self, prompts: Tensor, lengths: Tensor, past: Past) -> None:
        """Decode right-padded prompts [B, T] of these lengths, of which `past` may hold the beginning."""
        self._prefill(prompts, lengths, past)
        while not self.rows.finished:
            self._round()
        self.rows.end()
        self.stats.cache_bytes = self.session.cache.bytes
        texts = [row[:n] + answer for row, n, answer in zip(prompts.tolist(), lengths.tolist(), self.rows.answers)]
        past.keep(self.state, texts, self.observed)

    def _prefill(self, prompts: Tensor, lengths: Tensor, past: Past) -> None:
        kept = self.session.lengths.clone()
        rest, counts = _without(prompts, lengths, kept)
        output = self.session.extend(rest, counts)
        last = last_valid(output.final, counts)[:, None]
        logits = self.session.logits(last)
        first, steps = self._choose(DraftTree.root(last_valid(rest, counts)), logits)
        if self.drafter is not None:
            self.state = past.state or self.drafter.start(self.session, prompts, lengths)
        following = torch.cat((rest[:, 1:], rest[:, :1]), 1).scatter(1, (counts - 1)[:, None], first.bonus[:, None])
        self.seen = Seen(TargetFeatures(rest, output.hidden, output.final), following, counts)
        self.bonus = first.bonus
        self.rows.push(first.bonus[:, None], torch.ones_like(lengths), steps)
        self.stats.prefilled = int(counts.sum())
        self.laps.end("prefill")

    def _round(self) -> None:
        self.laps.new_round()
        tree = self._draft()
        self.laps.end("draft")
        output = self.session.forward(tree.tokens, tree.depth, tree.ancestors())
        logits = self.session.logits(output.final)
        self.laps.end("verify")
        verified, steps = self._choose(tree, logits)
        self.session.commit(verified.path, verified.counts)
        self.laps.end("accept")
        self.bonus = verified.bonus
        self.seen = _accepted(output, tree, verified)
        taken = self.rows.push(self.seen.next_tokens, verified.counts, steps)
        self.stats.record(verified.counts, taken, self.rows.active_before)
        self.laps.end("rest")
        if self.adaptive:
            self.adaptive.learn(verified.counts, self.rows.active_before, self.laps.round)

    def _draft(self) -> DraftTree:
        active = self.rows.active
        if self.drafter is None or self.state is None or (self.adaptive and not self.adaptive.pays):
            return DraftTree.root(self.bonus, active.long())
        drafting = active
        if self.reach is not None:
            drafting = active & (self.session.lengths + self.builder.depth <= self.reach)
            if not bool(drafting.any()):
                return DraftTree.root(self.bonus, active.long())
        counts = torch.where(drafting, self.seen.counts, 0)
        features = None if self.drafter.needs.positions == "none" else self.seen.features
        proposal = self.drafter.observe(self.state, features, self.seen.next_tokens, counts)
        self.observed = self.observed + counts
        tree = self.builder.build(self.drafter, self.state, proposal, self.bonus, drafting, self.generator)
        if self.reach is not None:
            tree.counts = torch.where(active & ~drafting, 1, tree.counts)
        return tree

    def _choose(self, tree: DraftTree, logits: Tensor) -> tuple[Verified, Steps | None]:
        """What the target keeps of a tree, given its [B, N, V] logits."""
        scores = self.options.processors(logits, tree, self.rows.texts)
        verified = self.acceptance(tree, scores, self.options.sample, self.generator)
        return verified, self.rows.steps(logits, scores, verified)


def _without(prompts: Tensor, lengths: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Right-padded prompts [B, T] without their first `kept` [B] tokens, and what is left of their lengths."""
    counts = lengths - kept
    index = kept[:, None] + torch.arange(int(counts.max()), device=prompts.device)
    return prompts.gather(1, index.clamp(max=prompts.shape[1] - 1)), counts


def _accepted(output: NodeOutput, tree: DraftTree, verified: Verified) -> Seen:
    """The accepted path [B, M] with the token after each of its nodes."""
    longest = max(int(verified.counts.max()), 1)
    path = verified.path[:, :longest]
    rows = torch.arange(path.shape[0], device=path.device)[:, None]
    tokens = tree.tokens.gather(1, path)
    last = (verified.counts - 1).clamp(min=0)
    following = torch.cat((tokens[:, 1:], tokens[:, :1]), 1).scatter(1, last[:, None], verified.bonus[:, None])
    hidden = None if output.hidden is None else output.hidden[rows, path]
    return Seen(TargetFeatures(tokens, hidden, output.final[rows, path]), following, verified.counts)
