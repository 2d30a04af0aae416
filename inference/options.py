"""generate()'s own arguments: what is honoured, and what is refused by name.

Processors and criteria are made by transformers itself, a row at a time, so that a value means what it means there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from headsmith.heads.target import Target
from torch import Tensor
from transformers import LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation import EosTokenCriteria

from .sampling import NodeProcessors

# What plain sampling from warped logits honours: all that a loop over the engine without processors can promise.
WARPED = {
    "max_length", "max_new_tokens", "eos_token_id", "pad_token_id", "do_sample", "temperature", "top_k", "top_p",
    "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
}  # fmt: skip
HONOURED = WARPED | {
    "min_length", "min_new_tokens", "max_time", "stop_strings", "top_h", "repetition_penalty", "sequence_bias",
    "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
    "renormalize_logits", "remove_invalid_values", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens",
    "begin_suppress_tokens", "exponential_decay_length_penalty", "output_scores", "output_logits",
}  # fmt: skip
# Fields that change nothing of what is emitted here: bookkeeping, caches, and knobs of modes that are refused by
# another field.
INDIFFERENT = {
    "bos_token_id", "decoder_start_token_id", "transformers_version", "use_cache",
    "cache_implementation", "cache_config", "max_cache_len", "compile_config", "disable_compile", "low_memory",
    "prefill_chunk_size", "continuous_batching_config", "return_dict_in_generate", "length_penalty", "early_stopping",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight",
}  # fmt: skip
# Arguments of generate() that are no fields of its config, and ask for another way of decoding.
OTHER_MODES = (
    "assistant_model", "assistant_tokenizer", "negative_prompt_ids", "negative_prompt_attention_mask",
    "custom_generate", "synced_gpus", "inputs_embeds", "past_key_values", "cache",
)  # fmt: skip


def not_honoured(config: Any, honoured: set[str] = WARPED) -> dict[str, Any]:
    """Fields of a generation config that ask for something beyond the `honoured` ones, with their values.

    Every field counts that differs from what leaves generate() as it is, those of later releases included.
    """
    neutral = config._get_default_generation_params() | {"guidance_scale": 1.0, "penalty_alpha": 0.0}
    asked = {
        name: value
        for name, value in vars(config).items()
        if name not in honoured | INDIFFERENT and not name.startswith("_")
    }
    return {
        name: value
        for name, value in asked.items()
        if value is not None and value is not False and value != neutral.get(name) and value not in (0, [], {})
    }


def refuse_unsupported(config: Any) -> None:
    """Raise ValueError naming the first field that speculative decoding does not honour."""
    for name, value in not_honoured(config, HONOURED).items():
        raise ValueError(
            f"{name}={value!r} is not supported by speculative decoding here; leave it out, or call model.generate "
            "without the decoder"
        )


@dataclass(frozen=True)
class DecodingOptions:
    """How to decode a batch of B rows, each as the single-row generate() would.

    Args:
        sample: draw tokens; else take the best.
        limits: B numbers: how many tokens each row may say.
        eos: token ids that end a row.
        pad: fills rows that ended.
        processors: of the logits.
        criteria: what else ends a row, asked after each token.
        scores: keep the processed scores of every committed token.
        logits: keep the raw logits of every committed token.
    """

    sample: bool
    limits: tuple[int, ...]
    eos: frozenset[int]
    pad: int
    processors: NodeProcessors
    criteria: StoppingCriteriaList
    scores: bool
    logits: bool


def decoding_options(
    target: Target,
    prompts: Tensor,
    lengths: Tensor,
    generation_config: Any = None,
    logits_processor: Sequence[Any] | None = None,
    stopping_criteria: Sequence[Any] | None = None,
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
    tokenizer: Any = None,
    **arguments: Any,
) -> DecodingOptions:
    """Merge arguments into the target's generation config, and prepare what generate() prepares.

    Args:
        prompts: [B, T] padded on the right.
        lengths: [B] their tokens.
        prefix_allowed_tokens_fn: is called with the number of its row.
        tokenizer: for `stop_strings`; the target's own if None.
    Raises: TypeError for an unknown argument; ValueError for one that this decoder does not honour.
    """
    for name in OTHER_MODES:
        if arguments.pop(name, None) is not None:
            raise ValueError(f"{name} is not supported by speculative decoding here; call model.generate with it")
    usual = target.model.generation_config
    sources = (arguments, vars(generation_config or usual), vars(usual))
    defaults = {name: all(source.get(name) is None for source in sources) for name in ("max_length", "min_length")}
    # generate()'s own merge: what is given, then the model's generation config, then the library's defaults.
    config, unknown = target.model._prepare_generation_config(generation_config, **arguments)
    refuse_unsupported(config)
    if unknown:
        raise TypeError(f"generate() got arguments it does not know: {', '.join(sorted(unknown))}")
    target.model._prepare_special_tokens(config, True, device=prompts.device, batch_size=1)
    configs = [_row_config(target.model, config, length, defaults) for length in lengths.tolist()]

    given = StoppingCriteriaList(stopping_criteria or [])
    criteria = target.model._get_stopping_criteria(configs[0], given, tokenizer or target.tokenizer)
    limits = [row.max_length - length for row, length in zip(configs, lengths.tolist())]
    limits, eos, others = _split(criteria, given, limits, lengths.tolist())
    lists = _row_processors(target.model, configs, prompts, lengths, logits_processor or [], prefix_allowed_tokens_fn)
    return DecodingOptions(
        sample=bool(config.do_sample),
        limits=tuple(limits),
        eos=frozenset(eos),
        pad=0 if config._pad_token_tensor is None else int(config._pad_token_tensor),
        processors=NodeProcessors(lists, logits_processor or [], bool(config.do_sample), eos),
        criteria=others,
        scores=bool(config.output_scores),
        logits=bool(config.output_logits),
    )


def _row_config(model: Any, config: Any, length: int, defaults: dict[str, bool]) -> Any:
    """The config with its lengths resolved for a prompt of so many tokens, as single-row generate() does."""
    row = model._prepare_generated_length(
        generation_config=copy.copy(config),
        has_default_max_length=defaults["max_length"],
        has_default_min_length=defaults["min_length"],
        model_input_name="input_ids",
        input_ids_length=length,
        inputs_tensor=None,
    )
    model._validate_generated_length(row, length, defaults["max_length"])
    return row


def _split(
    criteria: StoppingCriteriaList, given: StoppingCriteriaList, limits: list[int], lengths: list[int]
) -> tuple[list[int], list[int], StoppingCriteriaList]:
    """Rows' limits, EOS ids, and the criteria that have to be asked.

    Length and EOS are known in advance for every row: as numbers they cost nothing a token, and the engine can make
    room. A criterion that the caller gave replaces generate()'s own of its type, and so does its length.
    """
    eos: list[int] = []
    others = StoppingCriteriaList()
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            if any(criterion is own for own in given):
                # generate() asks after a token: one is always said.
                limits = [max(criterion.max_length - length, 1) for length in lengths]
        elif type(criterion) is EosTokenCriteria:
            eos += criterion.eos_token_id.tolist()
        else:
            others.append(criterion)
    return limits, eos, others


def _row_processors(
    model: Any,
    configs: Sequence[Any],
    prompts: Tensor,
    lengths: Tensor,
    given: Sequence[Any],
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None,
) -> list[LogitsProcessorList]:
    """Each row's processors, from generate()'s own maker; rows of one prompt share them."""
    made: dict[Any, LogitsProcessorList] = {}
    lists = []
    for row, (config, length) in enumerate(zip(configs, lengths.tolist())):
        prompt = prompts[row, :length]
        key = (tuple(prompt.tolist()), None if prefix_allowed_tokens_fn is None else row)
        if key not in made:
            constraint = prefix_allowed_tokens_fn and partial(_for_row, prefix_allowed_tokens_fn, row)
            made[key] = model._get_logits_processor(
                generation_config=config,
                input_ids_seq_length=length,
                encoder_input_ids=prompt[None],
                prefix_allowed_tokens_fn=constraint,
                logits_processor=LogitsProcessorList(given),
                device=prompts.device,
                model_kwargs={},
            )
        lists.append(made[key])
    return lists


def _for_row(function: Callable[[int, Tensor], list[int]], row: int, _number: int, ids: Tensor) -> list[int]:
    """A constraint as batched generate() calls it, whatever the place of a node in the call at hand."""
    return function(row, ids)
