"""Capture what chosen layers take in, during any forward of the target.

B rows, T tokens, C captured layers, H hidden.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def captured(layers: nn.ModuleList, wanted: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Within the block, every forward leaves the input of layer k under key k of the yielded dict.

    Hooks rather than `output_hidden_states`: they work in every architecture and keep only what is wanted.
    Index len(layers) (the feature after the final norm) is not a layer's input; take it from the output.
    """
    found: dict[int, Tensor] = {}
    handles = _hook(layers, wanted, found)
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def hooked(layers: nn.ModuleList, wanted: Sequence[int], owner: Any) -> dict[int, Tensor]:
    """As `captured`, for as long as `owner` lives."""
    found: dict[int, Tensor] = {}
    for handle in _hook(layers, wanted, found):
        weakref.finalize(owner, handle.remove)
    return found


def _hook(layers: nn.ModuleList, wanted: Sequence[int], found: dict[int, Tensor]) -> list[Any]:
    def keep(index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found[index] = args[0] if args else kwargs["hidden_states"]

        return hook

    return [layers[k].register_forward_pre_hook(keep(k), with_kwargs=True) for k in wanted if k < len(layers)]


def stack(found: dict[int, Tensor], wanted: Sequence[int], final: Tensor) -> Tensor:
    """[B, T, C, H] of the wanted layers in their order; index num_layers means the final feature."""
    return torch.stack([found.get(k, final) for k in wanted], dim=2)
