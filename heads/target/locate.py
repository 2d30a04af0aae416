"""Find the parts of a causal LM by structure, never by architecture name."""

from __future__ import annotations

from typing import Any, cast

from torch import nn


class UnsupportedTargetError(ValueError):
    """A model whose parts cannot be found, or which cannot be driven as a target."""


def text_config(model: nn.Module) -> Any:
    """The configuration of the text part (the whole one for a text-only model)."""
    return cast(Any, model).config.get_text_config(decoder=True)


def find_decoder(model: nn.Module) -> nn.Module:
    """The module that turns token ids into hidden states, without the language-model head."""
    from transformers import PreTrainedModel

    decoder = cast(Any, model).get_decoder()
    # Some give themselves, and one whose head is called "decoder" gives that.
    if decoder is not model and isinstance(decoder, PreTrainedModel):
        return decoder
    for child in model.children():
        if isinstance(child, PreTrainedModel):
            return child
    raise UnsupportedTargetError(f"{type(model).__name__} has no decoder module of its own; name a causal LM")


def find_layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    """The list of decoder layers: the ModuleList with one entry a hidden layer."""
    found = [m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not found:
        raise UnsupportedTargetError(
            f"{type(decoder).__name__} has no ModuleList of {count} layers, the count its configuration gives"
        )
    return found[0]


def child_holding(model: nn.Module, part: nn.Module) -> str:
    """Name of the direct child of `model` that is, or holds, `part`."""
    for name, child in model.named_children():
        if any(module is part for module in child.modules()):
            return name
    raise UnsupportedTargetError(f"{type(part).__name__} is not inside {type(model).__name__}")
