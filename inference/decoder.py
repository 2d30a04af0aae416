"""SpeculativeDecoder: prefill, then draft -> verify -> commit until every row has ended.

B rows, T prompt tokens, N tree nodes, M newly verified positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
from headsmith.heads.drafter import Drafter, DraftState, TargetFeatures, last_valid
from headsmith.heads.target import Target
from headsmith.heads.tree import DraftTree
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from .builder import AdaptiveBuilder, TreeBuilder
from .certify import Certificate
from .certify import certify as certify_answers
from .engine import NodeOutput, Session, choose_forward
from .fallback import fallback, only_generates, own_generate
from .hosted import hosted_arguments
from .options import DecodingOptions, decoding_options
from .rows import Rows, Steps, right_padded
from .stats import DecodeStats
from .trees import make_tree
from .verify import (
    NonFiniteLogitsError,
    Verified,
    inverse_cdf,
    uniforms_needed,
    verify_greedy,
    verify_lossless,
    verify_typical,
)


@dataclass
class DecodeOutput:
    """What `generate` returns.

    Args:
        sequences: [B, T + new] as `model.generate` returns them: the prompt as given, the answer, padding.
        stats: counts of this call.
        scores: with `output_scores`, one [B, V] a new token: the processed scores; zero where a row had ended.
        logits: with `output_logits`, the same of the raw logits.
        answers: the new tokens of each row, without padding.
        certificate: with `certify`, how the answers compare with plain decoding's; None where `model.generate` decoded.
    """

    sequences: Tensor
    stats: DecodeStats
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    answers: list[list[int]] = field(default_factory=list)
    certificate: Certificate | None = None


class SpeculativeDecoder:
    """Decodes with a drafter, verifying a tree of draft tokens a forward; the output is the target's own.

    Greedy output is token for token that of `model.generate` in fp32; sampled output follows exactly the law of
    `model.generate` with the same arguments.

    Args:
        target: the target.
        drafter: an object of the `Drafter` protocol, or None for plain decoding on the same engine.
        tree: `calibrated` (as large as pays on this machine, which is measured the first time), `chain`, `fixed` or
            `dynamic`, with options after a colon, or a tree builder.
        forward: `auto` takes the lean forward where the target's layout allows it; `lean`, `generic`.
        acceptance: `lossless`, or `typical` (Medusa, arXiv:2401.10774), which CHANGES the output distribution: what it
            emits is plausible to the target, and no longer the target's own. It is named in the stats' tree.
        epsilon: of typical acceptance: a draft token needs more than min(epsilon, delta · exp(-entropy)); 0.09 if None.
        delta: of typical acceptance; 0.3 if None.
    Raises: ValueError for an unknown acceptance, or one that does not go with the tree or with its thresholds.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        tree: str | TreeBuilder = "calibrated",
        forward: Literal["auto", "lean", "generic"] = "auto",
        acceptance: Literal["lossless", "typical"] = "lossless",
        epsilon: float | None = None,
        delta: float | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.builder = make_tree(tree)
        adaptive = drafter is not None and isinstance(self.builder, AdaptiveBuilder)
        self._adaptive: AdaptiveBuilder | None = cast(AdaptiveBuilder, self.builder) if adaptive else None
        self._kind = forward
        self.forward = choose_forward(target, forward)
        # Why nothing is drafted although a drafter is given; empty where it is.
        self.fallback = fallback(target, self.forward, drafter is not None)
        if self.fallback:
            self.drafter, self._adaptive = None, None
        thresholds = {name: value for name, value in (("epsilon", epsilon), ("delta", delta)) if value is not None}
        _check_acceptance(acceptance, thresholds, self.builder)
        self.acceptance, self.thresholds = acceptance, thresholds

    @property
    def tree_name(self) -> str:
        if self.drafter is None:
            return "plain"
        name = str(getattr(self.builder, "name", type(self.builder).__name__))
        return name if self.acceptance == "lossless" else f"{name}, {self.acceptance} acceptance (not lossless)"

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        streamer: Any = None,
        generator: torch.Generator | None = None,
        certify: bool = False,
        **arguments: Any,
    ) -> DecodeOutput:
        """Decode prompts [B, T], padded on either side, with generate()'s own arguments.

        Every row is what the single-row `model.generate` gives without its padding: lengths, penalties and constraints
        count the row's own tokens. A processor of the caller's must be a function of (input_ids, scores), since the
        nodes of a tree are shown to it in any order.

        Args:
            streamer: a transformers streamer (one row only).
            generator: source of every random number; the global one if None.
            certify: decode plainly, too, and have every first difference shown to be a tie (greedy only).
            arguments: see `decoding_options`.
        Raises: ValueError for an argument that is not honoured; NonFiniteLogitsError naming the row;
            CertificationError for a difference that is no tie.
        """
        if only_generates(self.forward):
            return DecodeOutput(*own_generate(self.target, input_ids, attention_mask, streamer, generator, arguments))
        if certify:
            return self._certified(input_ids, attention_mask, streamer, arguments)
        prompts, lengths = right_padded(input_ids, attention_mask)
        options = decoding_options(self.target, prompts, lengths, **arguments)
        if self.acceptance == "typical" and not options.sample:
            raise ValueError("typical acceptance is for sampling; set do_sample=True, or make the decoder lossless")
        rows = Rows(input_ids, prompts, lengths, options, streamer)
        stats = DecodeStats(self.tree_name, rows.batch, getattr(self.builder, "depth", 0) if self.drafter else 0)
        self._check_positions(max(length + limit for length, limit in zip(lengths.tolist(), options.limits)))

        nodes = self.builder.nodes if self.drafter else 1
        needs = self.drafter.needs if self.drafter else None
        session = Session(self.target, rows.batch, prompts.shape[1] + rows.limit + nodes, self.forward, needs)
        if self._adaptive and self.drafter:
            self._adaptive.prepare(session, self.drafter)
        output = session.prefill(prompts, lengths)
        root = DraftTree.root(last_valid(prompts, lengths))
        last = last_valid(output.final, lengths)[:, None]
        first, steps = self._verify(session, root, last, options, rows, generator)
        state = self.drafter.start(session, prompts, lengths) if self.drafter else None
        seen, counts = self._follow(output, prompts, lengths, first.bonus), lengths
        bonus = first.bonus
        rows.push(bonus[:, None], torch.ones_like(lengths), steps)
        while not rows.finished:
            tree = self._draft(state, seen, counts, bonus, rows.active, generator)
            output = session.forward(tree.tokens, tree.depth, tree.ancestors())
            verified, steps = self._verify(session, tree, output.final, options, rows, generator)
            session.commit(verified.path, verified.counts)
            bonus, counts = verified.bonus, verified.counts
            seen = self._accepted(output, tree, verified)
            stats.record(verified.counts, rows.push(seen.next_tokens, counts, steps), rows.active_before)
            if self._adaptive:
                self._adaptive.learn(verified.counts, rows.active_before)
        rows.end()
        return DecodeOutput(rows.sequences(), stats, rows.scores(), rows.logits(), rows.answers)

    def _certified(
        self, input_ids: Tensor, attention_mask: Tensor | None, streamer: Any, arguments: dict[str, Any]
    ) -> DecodeOutput:
        """Decode with the drafter and without it, and compare."""
        prompts, lengths = right_padded(input_ids, attention_mask)
        if decoding_options(self.target, prompts, lengths, **arguments).sample:
            raise ValueError(
                "certify compares with greedy decoding; sampled text has no one answer, use do_sample=False"
            )
        found = self.generate(input_ids, attention_mask, streamer, **arguments)
        plain = SpeculativeDecoder(self.target, None, forward=self._kind).generate(
            input_ids, attention_mask, **arguments
        )
        texts = [row[:length] for row, length in zip(prompts, lengths.tolist())]
        return replace(found, certificate=certify_answers(self.target, texts, found.answers, plain.answers))

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any = None,
        generator: torch.Generator | None = None,
        tokenizer: Any = None,
        stop_strings: Any = None,
        **model_arguments: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Decode inside `model.generate(…, custom_generate=decoder)`: returns what generate() returns.

        transformers hands over prepared processors and criteria, and drops `streamer` and `tokenizer`: bind those
        beforehand, `custom_generate=functools.partial(decoder, streamer=streamer)`. `generator` and `stop_strings` are
        passed on. A given max_length counts the padded prompt, as it does there; a returned dict holds no cache.
        """
        if model is not self.target.model:
            raise ValueError(
                f"this decoder was made for {self.target.name}; call generate on decoder.target.model, or "
                "make a decoder for the model at hand"
            )
        arguments = hosted_arguments(
            model, input_ids, logits_processor, stopping_criteria, generation_config, model_arguments
        )
        if stop_strings is not None:
            arguments["stop_strings"] = stop_strings
        out = self.generate(input_ids, streamer=streamer, generator=generator, tokenizer=tokenizer, **arguments)
        if not generation_config.return_dict_in_generate:
            return out.sequences
        return GenerateDecoderOnlyOutput(sequences=out.sequences, scores=out.scores, logits=out.logits)  # type: ignore[arg-type]

    def _draft(
        self,
        state: DraftState | None,
        seen: _Seen,
        counts: Tensor,
        bonus: Tensor,
        active: Tensor,
        generator: torch.Generator | None,
    ) -> DraftTree:
        if self.drafter is None or state is None or (self._adaptive and not self._adaptive.pays):
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
        rows: Rows,
        generator: torch.Generator | None,
    ) -> tuple[Verified, Steps | None]:
        logits = session.logits(final)
        scores = options.processors(logits, tree, rows.texts)
        if options.sample:
            verified = self._verify_sampled(tree, scores, generator)
        else:
            best = scores.max(-1)
            if not bool(torch.isfinite(best.values).all()):
                raise NonFiniteLogitsError(_non_finite(best.values, tree.valid()))
            verified = verify_greedy(tree, best.indices)
        return verified, rows.steps(logits, scores, verified)

    def _verify_sampled(self, tree: DraftTree, scores: Tensor, generator: torch.Generator | None) -> Verified:
        probabilities = (scores if scores.dtype == torch.float64 else scores.float()).softmax(-1)
        shape = (tree.tokens.shape[0], uniforms_needed(tree))
        uniforms = torch.rand(shape, dtype=torch.float64, device=scores.device, generator=generator)
        if self.acceptance == "lossless":
            return verify_lossless(tree, probabilities, uniforms)
        choices = inverse_cdf(probabilities.flatten(0, 1), uniforms.flatten()).view(tree.tokens.shape)
        return verify_typical(tree, probabilities, choices, **self.thresholds)

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


def _check_acceptance(acceptance: str, thresholds: dict[str, float], builder: TreeBuilder) -> None:
    if acceptance not in ("lossless", "typical"):
        raise ValueError(f"acceptance is 'lossless' or 'typical', not {acceptance!r}")
    if acceptance == "lossless" and thresholds:
        raise ValueError(f"{', '.join(thresholds)} belong to acceptance='typical'; lossless has no threshold")
    wrong = {name: value for name, value in thresholds.items() if not value > 0}
    if wrong:
        raise ValueError(f"the thresholds of typical acceptance are above 0, not {wrong}")
    if acceptance == "typical" and getattr(builder, "sampled", False):
        raise ValueError(
            "typical acceptance takes the drafter's best tokens, and this tree samples its children; use a tree of "
            "fixed children, or acceptance='lossless'"
        )


def _non_finite(values: Tensor, valid: Tensor) -> str:
    row, node = (~torch.isfinite(values)).nonzero()[0].tolist()
    real = "" if bool(valid[row, node]) else " (a padding node)"
    return (
        f"the target's logits are not finite in row {row}, node {node}{real}; try another dtype, or look for a "
        "processor that forbids every token"
    )
