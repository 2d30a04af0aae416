"""The mask containers that transformers' models take untouched: one additive 4D tensor, or one a layer type.

b rows, N new nodes, S slots looked at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Layer types whose modules take no attention mask.
UNMASKED = {"linear_attention", "conv", "mamba", "recurrent"}


def mask_container(
    config: Any, seen: Tensor, queries: Tensor, keys: Tensor, dtype: torch.dtype
) -> Tensor | dict[str, Tensor | None]:
    """Build what the model's `attention_mask` argument wants.

    Args:
        config: the text configuration of the model.
        seen: [b, N, S] bool, committed slots and ancestors.
        queries: [b, N] logical positions of the nodes.
        keys: [b, S] logical positions of the slots: windows are measured in these, not in slots.
        dtype: of the activations; the mask is additive, which every attention implementation understands.
    """
    types = getattr(config, "layer_types", None)
    if types:
        return {kind: _of_type(kind, config, seen, queries, keys, dtype) for kind in dict.fromkeys(types)}
    window = getattr(config, "sliding_window", None)
    if window:
        seen = seen & _within(queries, keys, window)
    return additive(seen, dtype)


def _of_type(kind: str, config: Any, seen: Tensor, queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor | None:
    if kind in UNMASKED:
        return None
    if kind == "sliding_attention":
        seen = seen & _within(queries, keys, config.sliding_window)
    elif kind == "chunked_attention":
        size = config.attention_chunk_size
        seen = seen & (queries[:, :, None] // size == keys[:, None, :] // size)
    return additive(seen, dtype)


def _within(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    return queries[:, :, None] - keys[:, None, :] < window


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """[b, N, S] bool -> [b, 1, N, S] with 0 where seen and the lowest finite number elsewhere."""
    mask = torch.full(seen.shape, torch.finfo(dtype).min, dtype=dtype, device=seen.device)
    return mask.masked_fill_(seen, 0.0)[:, None]
