"""SpeculativeDecoder: what users call; `rounds` does the work.

B rows, T prompt tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
from headsmith.heads.drafter import Drafter
from headsmith.heads.target import Target
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from .acceptance import Acceptance
from .builder import AdaptiveBuilder, TreeBuilder
from .certify import Certificate
from .certify import certify as certify_answers
from .compiled import CompiledForward, padded_size
from .engine import Forward, Session, choose_forward
from .fallback import fallback, only_generates, own_generate
from .hosted import hosted_arguments
from .options import decoding_options
from .past import Past
from .rounds import Rounds
from .rows import Rows, right_padded
from .stats import DecodeStats
from .trees import make_tree


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
        compile: run verify forwards as one graph of `torch.compile` for each of few tree sizes, in fixed buffers;
            options of `torch.compile`, or True for CUDA graphs on a GPU. The first rounds of a size then take long.
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
        compile: bool | dict[str, Any] = False,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.builder = make_tree(tree, drafter)
        adaptive = drafter is not None and isinstance(self.builder, AdaptiveBuilder)
        self._adaptive: AdaptiveBuilder | None = cast(AdaptiveBuilder, self.builder) if adaptive else None
        self._kind = forward
        self.forward = choose_forward(target, forward)
        # Why nothing is drafted although a drafter is given; empty where it is.
        self.fallback = fallback(target, self.forward, drafter is not None)
        if self.fallback:
            self.drafter, self._adaptive = None, None
        thresholds = {name: value for name, value in (("epsilon", epsilon), ("delta", delta)) if value is not None}
        # What runs the trees: the forward, or that compiled.
        self.driver: Forward | CompiledForward = self.forward
        if compile:
            options = compile if isinstance(compile, dict) else None
            self.driver = CompiledForward(self.forward, self.drafter.needs.layers if self.drafter else (), options)
        self._sessions: dict[int, Session] = {}  # of compiled forwards, by rows: their buffers stay where they are
        self.acceptance = Acceptance(acceptance, thresholds)
        self.acceptance.check(self.builder)

    @property
    def tree_name(self) -> str:
        if self.drafter is None:
            return "plain"
        name = str(getattr(self.builder, "name", type(self.builder).__name__))
        rule = self.acceptance.rule
        return name if rule == "lossless" else f"{name}, {rule} acceptance (not lossless)"

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        streamer: Any = None,
        generator: torch.Generator | None = None,
        certify: bool = False,
        past: Past | None = None,
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
            past: the same object in successive calls keeps the caches: of a prompt that goes on where the last text
                ended only the new tokens are run.
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
        if self.acceptance.rule == "typical" and not options.sample:
            raise ValueError("typical acceptance is for sampling; set do_sample=True, or make the decoder lossless")
        rows = Rows(input_ids, prompts, lengths, options, streamer)
        stats = DecodeStats(self.tree_name, rows.batch, getattr(self.builder, "depth", 0) if self.drafter else 0)
        self._check_positions(max(length + limit for length, limit in zip(lengths.tolist(), options.limits)))

        session = self._session(rows.batch, prompts.shape[1] + rows.limit, shared=past is None)
        past = past if past is not None else Past()
        session = past.resume(session, self.drafter, prompts, lengths)
        if self._adaptive and self.drafter:
            self._adaptive.prepare(session, self.drafter)
        rounds = Rounds(
            session, self.drafter, self.builder, self._adaptive, self.acceptance, rows, options, stats, generator
        )
        rounds.run(prompts, lengths, past)
        return DecodeOutput(rows.sequences(), stats, rows.scores(), rows.logits(), rows.answers)

    def _session(self, rows: int, tokens: int, shared: bool) -> Session:
        """An empty session for so many tokens a row.

        Args: shared: whether it is for this call only, so that the next may have the same.
        """
        # A row may end inside a round, which is committed whole, and has its nodes behind that until the others end.
        behind = padded_size(self.builder.nodes) + self.builder.depth if self.drafter else 2
        needs = self.drafter.needs if self.drafter else None
        made = Session(self.target, rows, tokens + behind, self.driver, needs)
        if self.driver is self.forward or not shared:
            return made
        session = self._sessions.setdefault(rows, made)
        session.reset(made.capacity)
        return session

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

    def _check_positions(self, needed: int) -> None:
        limit = self.target.max_positions
        if limit is not None and needed > limit:
            raise ValueError(
                f"prompt and new tokens need {needed} positions, {self.target.name} has {limit}; "
                "shorten the prompt or lower max_new_tokens"
            )
