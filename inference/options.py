"""generate()'s own arguments: what is honoured, and what is refused by name.

Built on transformers' GenerationConfig and logits warpers, so that a value means what it means there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headsmith.heads.target import Target
from transformers import LogitsProcessorList
from transformers.generation import logits_process as warpers

HONOURED = {
    "max_length", "max_new_tokens", "eos_token_id", "pad_token_id", "do_sample", "temperature", "top_k", "top_p",
    "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
}  # fmt: skip
# Fields that change nothing of what is emitted here: bookkeeping, caches, and knobs of modes that are refused by
# another field.
INDIFFERENT = {
    "bos_token_id", "decoder_start_token_id", "transformers_version", "_from_model_config", "use_cache",
    "cache_implementation", "cache_config", "max_cache_len", "compile_config", "disable_compile", "low_memory",
    "prefill_chunk_size", "continuous_batching_config", "return_dict_in_generate", "length_penalty", "early_stopping",
    "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight",
}  # fmt: skip


def not_honoured(config: Any) -> dict[str, Any]:
    """Fields of a generation config that ask for something this engine does not do, with their values.

    Every field counts that differs from what leaves generate() as it is, those of later releases included.
    """
    neutral = config._get_default_generation_params() | {"guidance_scale": 1.0, "penalty_alpha": 0.0}
    asked = {name: value for name, value in vars(config).items() if name not in HONOURED | INDIFFERENT}
    return {
        name: value
        for name, value in asked.items()
        if value is not None and value is not False and value != neutral.get(name) and value not in (0, [], {})
    }


@dataclass(frozen=True)
class DecodingOptions:
    """How to decode.

    Args:
        max_new_tokens: None where `max_length` rules.
        max_length: prompt and answer together.
        eos: token ids that end a row.
        pad: fills rows that ended.
        warpers: temperature, top-k, top-p and their kin; None is greedy.
    """

    max_new_tokens: int | None
    max_length: int | None
    eos: tuple[int, ...]
    pad: int
    warpers: LogitsProcessorList | None

    def new_tokens(self, prompt: int) -> int:
        """How many tokens may follow a prompt of this many (padded) tokens."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if self.max_length is not None:
            return max(self.max_length - prompt, 0)
        return 20  # generate()'s own default


def decoding_options(target: Target, **arguments: Any) -> DecodingOptions:
    """Merge arguments into the target's generation config.

    Raises: TypeError for an unknown argument; ValueError for one that this decoder does not honour.
    """
    # generate()'s own merge: what is given, then the model's generation config, then the library's defaults.
    given = arguments.pop("generation_config", None)
    config, unknown = target.model._prepare_generation_config(given, **arguments)
    if unknown:
        raise TypeError(f"generate() got arguments it does not know: {', '.join(sorted(unknown))}")
    for name, value in not_honoured(config).items():
        raise ValueError(f"{name}={value!r} is not supported by speculative decoding here; leave it out")
    eos = config.eos_token_id
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
    pad = config.pad_token_id
    return DecodingOptions(
        max_new_tokens=config.max_new_tokens,
        max_length=config.max_length,
        eos=eos_ids,
        pad=pad if pad is not None else (eos_ids[0] if eos_ids else 0),
        warpers=_warpers(config) if config.do_sample else None,
    )


def _warpers(config: Any) -> LogitsProcessorList:
    """transformers' own warpers, in the order generate() applies them."""
    chosen = LogitsProcessorList()
    if config.temperature is not None and config.temperature != 1.0:
        chosen.append(warpers.TemperatureLogitsWarper(config.temperature))
    if config.top_k:
        chosen.append(warpers.TopKLogitsWarper(config.top_k))
    if config.top_p is not None and config.top_p < 1.0:
        chosen.append(warpers.TopPLogitsWarper(config.top_p))
    if config.min_p is not None:
        chosen.append(warpers.MinPLogitsWarper(config.min_p))
    if config.typical_p is not None and config.typical_p < 1.0:
        chosen.append(warpers.TypicalLogitsWarper(config.typical_p))
    if config.epsilon_cutoff:
        chosen.append(warpers.EpsilonLogitsWarper(config.epsilon_cutoff))
    if config.eta_cutoff:
        chosen.append(warpers.EtaLogitsWarper(config.eta_cutoff))
    return chosen
