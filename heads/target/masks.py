"""The mask containers that transformers' models take untouched: one additive 4D tensor, or one a layer type.

b rows, N new nodes, S slots looked at.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from .locate import UnsupportedTargetError

MaskKind = Literal["one tensor", "per layer type"]
# Layer types whose modules take no attention mask.
UNMASKED = {"linear_attention", "conv", "moe", "mlp"}


def mask_kinds(config: Any) -> tuple[MaskKind, ...]:
    """The containers that a model of this text configuration may want, the likelier first."""
    return ("per layer type", "one tensor") if getattr(config, "layer_types", None) else ("one tensor",)


def mask_container(
    config: Any, kind: MaskKind, seen: Tensor, queries: Tensor, keys: Tensor, dtype: torch.dtype
) -> Tensor | dict[str, Tensor | None]:
    """Build what the model's `attention_mask` argument wants.

    Args:
        config: the text configuration of the model.
        kind: which container.
        seen: [b, N, S] bool, committed slots and ancestors.
        queries: [b, N] logical positions of the nodes.
        keys: [b, S] logical positions of the slots: windows are measured in these, not in slots.
        dtype: of the activations; the mask is additive, which every attention implementation understands.
    Raises: UnsupportedTargetError for a layer type whose mask is not known here.
    """
    if kind == "per layer type":
        types = dict.fromkeys(config.layer_types)
        return {name: _of_type(name, config, seen, queries, keys, dtype) for name in types}
    if window := getattr(config, "sliding_window", None):
        seen = seen & _within(queries, keys, window)
    elif chunk := getattr(config, "attention_chunk_size", None):
        seen = seen & _same_chunk(queries, keys, chunk)
    return additive(seen, dtype)


def _of_type(name: str, config: Any, seen: Tensor, queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor | None:
    if name in UNMASKED:
        return None
    if name == "sliding_attention":
        seen = seen & _within(queries, keys, config.sliding_window)
    elif name == "chunked_attention":
        seen = seen & _same_chunk(queries, keys, config.attention_chunk_size)
    elif name != "full_attention":
        raise UnsupportedTargetError(f"layers of type {name!r} keep more than keys and values")
    return additive(seen, dtype)


def _within(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    return queries[:, :, None] - keys[:, None, :] < window


def _same_chunk(queries: Tensor, keys: Tensor, size: int) -> Tensor:
    return queries[:, :, None] // size == keys[:, None, :] // size


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """[b, N, S] bool -> [b, 1, N, S] with 0 where seen and the lowest finite number elsewhere."""
    mask = torch.full(seen.shape, torch.finfo(dtype).min, dtype=dtype, device=seen.device)
    return mask.masked_fill_(seen, 0.0)[:, None]
