"""The generic forward: any causal LM that takes a 4D mask, driven through its own modules.

b rows, N nodes, S slots, C captured layers, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from headsmith.heads.cache import LayerShape, RaggedTreeCache, Span
from headsmith.heads.target import Target
from headsmith.heads.target.compat import CACHE_KEYWORD
from headsmith.heads.target.features import captured
from headsmith.heads.target.masks import mask_container
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class GenericForward:
    """Runs new nodes through the target's own decoder. Same call as `LeanForward`."""

    name = "generic"

    def __init__(self, target: Target) -> None:
        self.target = target
        self.dtype = target.dtype
        self.shapes = _layer_shapes(target)

    @property
    def layer_shapes(self) -> list[LayerShape]:
        return list(self.shapes.values())

    def logits(self, feature: Tensor) -> Tensor:
        return self.target.logits(feature)

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        seen: Tensor,
        slot_positions: Tensor,
        cache: RaggedTreeCache,
        span: Span,
        capture: tuple[int, ...],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Feature after the final norm [b, N, H], and the inputs of the captured layers."""
        mask = mask_container(self.target.config, seen, positions, slot_positions, self.dtype)
        index = {layer: i for i, layer in enumerate(self.shapes)}
        layers: list[Any] = [_SpanLayer(cache, index.get(k), span) for k in range(self.target.num_layers)]
        arguments: dict[str, Any] = {CACHE_KEYWORD: Cache(layers=layers)}
        with captured(self.target.layers, capture) as found:
            output = self.target.decoder(
                input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=True, **arguments
            )
        return output.last_hidden_state, found


class _SpanLayer(CacheLayerMixin):
    """One layer of a transformers cache that reads and writes the ragged tree cache."""

    is_sliding = False

    def __init__(self, cache: RaggedTreeCache, index: int | None, span: Span) -> None:
        super().__init__()
        self.cache, self.index, self.span = cache, index, span
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.index is None:
            raise RuntimeError("a layer asks for keys and values that it did not have when the target was loaded")
        return self.cache.update(self.index, key_states, value_states, self.span)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.span.used, 0

    def get_seq_length(self) -> int:
        return self.span.used - self.span.slots.shape[1]

    def get_max_length(self) -> int:
        return -1


class _Recorder(CacheLayerMixin):
    """Notes the shape of what a layer caches."""

    is_sliding = False

    def __init__(self, layer: int, found: dict[int, LayerShape]) -> None:
        super().__init__()
        self.layer, self.found = layer, found
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.found[self.layer] = LayerShape(key_states.shape[1], key_states.shape[3], value_states.shape[3])
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


@torch.no_grad()
def _layer_shapes(target: Target) -> dict[int, LayerShape]:
    """Which layers cache keys and values, and how wide: seen in one forward of one token."""
    found: dict[int, LayerShape] = {}
    layers: list[Any] = [_Recorder(k, found) for k in range(target.num_layers)]
    token = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    target.decoder(input_ids=token, use_cache=True, **{CACHE_KEYWORD: Cache(layers=layers)})
    return found
