"""Tree nodes through the target's own decoder: its modules, our mask and cache.

b rows, N nodes, S slots, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from ..cache import LayerShape, RaggedTreeCache, Span
from . import alibi
from .compat import CACHE_KEYWORD
from .features import captured
from .locate import UnsupportedTargetError
from .masks import MaskKind, mask_container
from .target import Target

# Cache layers of transformers with one key and one value a token, or nothing of their own.
_SLOTTED = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}


class TreeNodes:
    """Runs new nodes through a target whose attention takes a 4D mask.

    Args:
        mask: the container that its `attention_mask` wants.
        attention: the attention implementation to use meanwhile; the model's own setting is left as it is.
        biased: whether ALiBi is built from logical positions.
    Raises: UnsupportedTargetError if a layer caches something that has no slot a node.
    """

    def __init__(self, target: Target, mask: MaskKind, attention: str, biased: bool = False) -> None:
        self.target = target
        self.mask, self.attention, self.biased = mask, attention, biased
        _require_slots(target)
        self.shapes = _layer_shapes(target)
        self._by_row = biased and alibi.one_row_at_a_time(target.decoder)

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
        """Feature after the final norm [b, N, H], and the inputs of the captured layers.

        Args:
            tokens: [b, N].  positions: [b, N] logical.  seen: [b, N, S] bool.  slot_positions: [b, S] logical.
        """
        if self._by_row and len(tokens) > 1:
            done = []
            for row in range(len(tokens)):
                part = slice(row, row + 1)
                inputs = (tokens[part], positions[part], seen[part], slot_positions[part])
                done.append(self(*inputs, cache, _row_of(span, row), capture))
            return torch.cat([final for final, _ in done]), {k: torch.cat([f[k] for _, f in done]) for k in done[0][1]}
        mask = self.masked(positions, seen, slot_positions)
        with self.attending(slot_positions), captured_if(self.target, capture) as found:
            final = self.decode(tokens, mask, positions, cache, span)
        return final, found

    def masked(self, positions: Tensor, seen: Tensor, slot_positions: Tensor) -> Any:
        """What the decoder's `attention_mask` wants."""
        return mask_container(self.target.config, self.mask, seen, positions, slot_positions, self.target.dtype)

    @contextmanager
    def attending(self, slot_positions: Tensor) -> Iterator[None]:
        """Within the block the target attends as the probe found that it must."""
        bias: AbstractContextManager[None] = nullcontext()
        if self.biased:
            bias = alibi.logical_positions(self.target.decoder, slot_positions)
        with bias, attention(self.target.config, self.attention):
            yield

    def decode(self, tokens: Tensor, mask: Any, positions: Tensor, cache: RaggedTreeCache, span: Span) -> Tensor:
        """The decoder and nothing else, which can be traced as one graph: feature after the final norm [b, N, H]."""
        index = {layer: i for i, layer in enumerate(self.shapes)}
        layers: list[Any] = [_SpanLayer(cache, index.get(k), span) for k in range(self.target.num_layers)]
        arguments: dict[str, Any] = {CACHE_KEYWORD: Cache(layers=layers)}
        output = self.target.decoder(
            input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=True, **arguments
        )
        return output.last_hidden_state


def run_nodes(
    forward: Any,
    cache: RaggedTreeCache,
    tokens: Tensor,
    depth: Tensor,
    ancestors: Tensor | None,
    rows: slice = slice(None),
    capture: tuple[int, ...] = (),
    limit: int | None = None,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Run [b, N] nodes of `rows` behind their committed tokens through `forward` (called as `TreeNodes` is).

    Args:
        depth: [b, A + N] of the A nodes that were run before in this round, and of the new ones.
        ancestors: [b, N, A + N] bool, itself included; None for a chain (then A = 0).
        limit: positions that the model has; None: any number.
    """
    before = depth.shape[1] - tokens.shape[1]
    span = cache.begin(rows, tokens.shape[1], before)
    positions = cache.lengths[rows][:, None] + depth[:, before:]
    if limit is not None:
        # A tree may stand beyond the end of the last answer that fits: nobody reads those nodes, but a table of learned
        # positions has no row for them.
        positions = positions.clamp(max=limit - 1)
    seen, slots = cache.mask(span, ancestors), cache.positions(span, depth)
    return forward(tokens, positions, seen, slots, cache, span, capture)


@contextmanager
def attention(config: Any, wanted: str) -> Iterator[None]:
    """Within the block a model of this configuration attends with another implementation."""
    before = config._attn_implementation
    if wanted == before:
        yield
        return
    config._attn_implementation = wanted
    try:
        yield
    finally:
        config._attn_implementation = before


@contextmanager
def captured_if(target: Target, capture: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    """`captured`, without looking for the layers of a target of which none is wanted."""
    if not capture:
        yield {}
        return
    with captured(target.layers, capture) as found:
        yield found


def _row_of(span: Span, row: int) -> Span:
    first = (span.rows.start or 0) + row
    return replace(
        span,
        rows=slice(first, first + 1),
        index=span.index[:1],
        slots=span.slots[row : row + 1],
        start=int(span.slots[row, 0]),
    )


def _require_slots(target: Target) -> None:
    for layer in DynamicCache(config=target.config).layers:
        if hasattr(layer, "conv_states"):
            raise UnsupportedTargetError("recurrent or convolutional layers keep a state, which has no slots to mask")
        if type(layer).__name__ not in _SLOTTED:
            raise UnsupportedTargetError(f"a layer caches more than keys and values ({type(layer).__name__})")


class _Layer(CacheLayerMixin):
    """What transformers asks of every cache layer, whoever holds the keys and values."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def get_max_length(self) -> int:
        return -1


class _SpanLayer(_Layer):
    """One layer of a transformers cache that reads and writes the ragged tree cache."""

    def __init__(self, cache: RaggedTreeCache, index: int | None, span: Span) -> None:
        super().__init__()
        self.cache, self.index, self.span = cache, index, span

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.index is None:
            raise RuntimeError("a layer asks for keys and values that it did not have when the target was loaded")
        return self.cache.update(self.index, key_states, value_states, self.span)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.span.used, 0

    def get_seq_length(self) -> int:
        return self.span.used - self.span.slots.shape[1]


class _Recorder(_Layer):
    """Notes the shape of what a layer caches."""

    def __init__(self, layer: int, found: dict[int, LayerShape]) -> None:
        super().__init__()
        self.layer, self.found = layer, found

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.found[self.layer] = LayerShape(key_states.shape[1], key_states.shape[3], value_states.shape[3])
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0


@torch.no_grad()
def _layer_shapes(target: Target) -> dict[int, LayerShape]:
    """Which layers cache keys and values, and how wide: seen in one forward of one token."""
    found: dict[int, LayerShape] = {}
    layers: list[Any] = [_Recorder(k, found) for k in range(target.num_layers)]
    token = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    target.decoder(input_ids=token, use_cache=True, **{CACHE_KEYWORD: Cache(layers=layers)})
    return found
