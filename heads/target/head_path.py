"""From a feature to logits through the model's own head: soft caps, scales and multipliers included.

... leading axes, H hidden, V vocabulary (or R chosen rows of it).
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..layers import Linear
from .locate import child_holding, find_decoder


class _Output(BaseModelOutputWithPast):
    """A decoder's output of any family: fields that only some have (router logits, cross attentions) are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)
        return None


class _Stub(nn.Module):
    """Stands in for the child that is, or holds, the decoder, and hands its input on as the last hidden state."""

    def __init__(self, replaced: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        # Not as children: the stub owns none of the weights.
        object.__setattr__(self, "_parts", (replaced, decoder))

    def __getattr__(self, name: str) -> Any:
        """What the replaced child has (multipliers of the logits), and itself for the decoder inside it."""
        replaced, decoder = self.__dict__["_parts"]
        found = getattr(replaced, name)
        return self if isinstance(found, nn.Module) and any(part is decoder for part in found.modules()) else found

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _Output:
        return _Output(last_hidden_state=cast(Any, inputs_embeds))


class HeadPath:
    """Logits of features, by the model's own forward with its decoder taken out.

    Args:
        model: a causal LM; it is not changed.
        rows: [R] token ids whose logits are wanted, or None for the whole vocabulary.
    """

    def __init__(self, model: nn.Module, rows: Tensor | None = None) -> None:
        # A shallow copy shares every parameter; only its table of children is its own.
        clone = copy.copy(model)
        clone._modules = dict(model._modules)
        decoder = find_decoder(model)
        holder = child_holding(model, decoder)
        clone._modules[holder] = _Stub(model.get_submodule(holder), decoder)
        if rows is not None:
            head = cast(Any, model).get_output_embeddings()
            clone._modules[child_holding(model, head)] = _reduced(head, rows)
        self._clone = clone

    def __call__(self, feature: Tensor) -> Tensor:
        lead = feature.shape[:-1]
        flat = feature.reshape(1, -1, feature.shape[-1])
        logits = self._clone(inputs_embeds=flat, use_cache=False).logits
        return logits.view(*lead, logits.shape[-1])


def _reduced(head: nn.Module, rows: Tensor) -> Linear:
    weight = cast(Tensor, head.weight)
    bias = cast("Tensor | None", getattr(head, "bias", None))
    small = Linear(weight.shape[1], len(rows), bias=bias is not None, device="meta")
    small.weight = nn.Parameter(weight.detach()[rows.to(weight.device)].clone(), requires_grad=False)
    if bias is not None:
        small.bias = nn.Parameter(bias.detach()[rows.to(bias.device)].clone(), requires_grad=False)
    with torch.inference_mode(False):
        return small.eval()
