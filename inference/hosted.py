"""A decoder as guest of `model.generate(…, custom_generate=decoder)`: from what is handed over to a call of our own.

B rows, T prompt tokens (padded).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from .options import refuse_unsupported

PASSED_ON = ("attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache", "past_key_values")


def hosted_arguments(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    model_arguments: dict[str, Any],
) -> dict[str, Any]:
    """Arguments of `SpeculativeDecoder.generate` for what generate() prepared for [B, T] prompts.

    generate() has made its processors for the padded batch. Those that its config alone accounts for are made anew for
    each row without padding; the caller's own are kept.

    Raises: ValueError for a config or a model argument that is not honoured.
    """
    refuse_unsupported(generation_config)
    mask = model_arguments.get("attention_mask")
    _check_model_arguments(model_arguments, mask, input_ids)
    own = model._get_logits_processor(
        generation_config=generation_config,
        input_ids_seq_length=input_ids.shape[1],
        encoder_input_ids=input_ids,
        logits_processor=LogitsProcessorList(),
        device=input_ids.device,
        model_kwargs={"attention_mask": mask},
    )
    given, constraint = [], None
    for processor in logits_processor:
        if type(processor) is PrefixConstrainedLogitsProcessor:
            constraint = processor._prefix_allowed_tokens_fn
        elif not any(_same(processor, made) for made in own):
            given.append(processor)

    config = copy.copy(generation_config)
    # A clock that runs already is kept as the criterion it is.
    config.max_time = None
    own_criteria = model._get_stopping_criteria(config, StoppingCriteriaList())
    config.max_new_tokens, config.max_length = config.max_length - input_ids.shape[1], None
    if config.min_new_tokens is not None:
        config.min_length = None
    return {
        "attention_mask": mask,
        "generation_config": config,
        "logits_processor": given,
        "prefix_allowed_tokens_fn": constraint,
        "stopping_criteria": [c for c in stopping_criteria if not any(_same(c, made) for made in own_criteria)],
    }


def _same(first: Any, second: Any) -> bool:
    """Whether two processors or criteria are of one type and one state."""
    if type(first) is not type(second) or vars(first).keys() != vars(second).keys():
        return False
    pairs = ((value, vars(second)[name]) for name, value in vars(first).items())
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else type(a) is type(b) and bool(a == b)
        for a, b in pairs
    )


def _check_model_arguments(arguments: dict[str, Any], mask: Tensor | None, input_ids: Tensor) -> None:
    unknown = [name for name, value in arguments.items() if value is not None and name not in PASSED_ON]
    if unknown:
        raise ValueError(f"{unknown[0]} is not supported by speculative decoding here; leave it out")
    for name in ("cache", "past_key_values"):
        cache = arguments.get(name)
        if cache is not None and cache.get_seq_length() > 0:
            raise ValueError(
                f"{name} holds {cache.get_seq_length()} tokens; the decoder keeps a cache of its own: give the whole "
                "prompt and no cache"
            )
    positions = arguments.get("position_ids")
    if positions is not None:
        counted = torch.ones_like(input_ids) if mask is None else mask.long()
        usual = (counted.cumsum(-1) - 1).expand_as(positions)
        if not torch.equal(positions[counted.bool()], usual[counted.bool()]):
            raise ValueError("position_ids other than the usual ones are not supported here; leave them out")
