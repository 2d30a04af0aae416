"""ALiBi over a draft tree: the bias follows the logical position of a key, not the slot that it stands in.

b rows, S slots, A attention heads.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_BUILDER = re.compile(r"build_\w*alibi_tensor")


def find_builder(decoder: nn.Module) -> tuple[Any, str] | None:
    """Where the decoder looks its ALiBi builder up, and under which name: on itself, else in its module's globals."""
    for owner in (decoder, sys.modules[type(decoder).__module__]):
        names = [name for name in dir(owner) if _BUILDER.fullmatch(name)]
        if names:
            return owner, names[0]
    return None


def one_row_at_a_time(decoder: nn.Module) -> bool:
    """Whether the builder makes one bias for all rows, so that rows at different lengths need a forward each."""
    found = find_builder(decoder)
    return found is not None and "attention_mask" not in inspect.signature(getattr(*found)).parameters


@contextmanager
def logical_positions(decoder: nn.Module, keys: Tensor) -> Iterator[None]:
    """Within the block the decoder's ALiBi builder answers for slots at the logical positions `keys` [b, S].

    The bias itself comes from the family's own builder (slopes and rounding differ between families), asked once
    for the positions 0 to S - 1 and then gathered.
    Raises: ValueError if the decoder has no builder.
    """
    found = find_builder(decoder)
    if found is None:
        raise ValueError(f"{type(decoder).__name__} has no builder of ALiBi biases; probe it without them")
    owner, name = found
    original = getattr(owner, name)
    build = _shared(original, keys) if one_row_at_a_time(decoder) else _by_row(original, keys)
    own = name in vars(owner)
    setattr(owner, name, build)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def _by_row(original: Callable[..., Tensor], keys: Tensor) -> Callable[..., Tensor]:
    """A builder that takes a mask: [b · A, 1, S]."""

    def build(attention_mask: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        whole = torch.ones(1, keys.shape[1], dtype=torch.long, device=keys.device)
        table = original(whole, *args, **kwargs)[:, 0]
        return table[:, keys].transpose(0, 1).flatten(0, 1)[:, None]

    return build


def _shared(original: Callable[..., Tensor], keys: Tensor) -> Callable[..., Tensor]:
    """A builder that takes a length: [A, 1, S], for the one row that `keys` has."""

    def build(num_heads: int, sequence_length: int, *args: Any, **kwargs: Any) -> Tensor:
        return original(num_heads, keys.shape[1], *args, **kwargs)[..., keys[0]]

    return build
