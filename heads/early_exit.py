"""The target's own first layers as its drafter, which exit early through its final norm and head. Nothing is trained.

arXiv:2309.08168 skips layers of an unchanged target, arXiv:2404.16710 exits after the first ones, arXiv:2404.18911 puts
a small trained adapter behind them. Here the first layers draft as they are, in a cache of their own: the verify pass
runs them again. It pays where a target was trained to exit early.

T tokens, H hidden, E layers kept.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from .draft_model import DraftModel
from .drafter import register
from .target import Target
from .target.locate import UnsupportedTargetError

TOLERANCE = 0.01  # of the standard deviation: the same weights on the same tokens


@register("early_exit")
class EarlyExit(DraftModel):
    """A draft model made of the target's first layers; see `DraftModel` for what it does."""

    @classmethod
    def build(cls, target: Target, layers: int | None = None, max_depth: int = 8) -> EarlyExit:  # type: ignore[override]
        """A drafter of the first `layers` layers, a third of them if None.

        Raises: ValueError if that is not fewer than the target has; UnsupportedTargetError if it cannot be cut.
        """
        if layers is None:
            layers = max(1, target.num_layers // 3)
        return cls(target, first_layers(target, layers), max_depth)


def first_layers(target: Target, count: int) -> Target:
    """The target's first `count` layers with its embedding, final norm and head, as a target of its own.

    The modules are new, their weights the target's; what runs is checked against the target's own layers.

    Raises: ValueError for a number of layers that it does not have; UnsupportedTargetError, by name, if other layers
        run, or they compute something else.
    """
    depth = target.num_layers
    if not 0 < count < depth:
        raise ValueError(f"layers is {count}, expected 1 to {depth - 1}, as {target.name} has {depth}")
    try:
        made = Target(_cut(target, count), target.tokenizer)
        reason = _difference(target, made, count)
    except Exception as error:  # modelling code of any kind may need all of its layers in any way
        reason = f"{type(error).__name__}: {error}"
    if reason:
        raise UnsupportedTargetError(
            f"{target.name} cannot be cut to its first {count} layers: {reason}; take the drafter draft_model, or heads"
        )
    return made


def _cut(target: Target, count: int) -> Any:
    """The model again, module by module, with fewer layers and the same weights."""
    config = copy.deepcopy(target.config)
    for name, value in vars(target.config).items():
        if isinstance(value, list | tuple) and len(value) == target.num_layers:
            setattr(config, name, value[:count])
    config.num_hidden_layers = count
    # What is in the memo is not copied but replaced by what stands there: weights by themselves, everywhere the
    # configuration by the shorter one.
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*target.model.parameters(), *target.model.buffers())}
    memo[id(target.config)] = config
    memo[id(target.layers)] = nn.ModuleList(copy.deepcopy(layer, memo) for layer in target.layers[:count])
    return copy.deepcopy(target.model, memo)


@torch.no_grad()
def _difference(target: Target, made: Target, count: int) -> str:
    """What the first layers do otherwise on their own than within the target; empty if nothing."""
    tokens = torch.arange(12, device=target.device)[None] % target.num_tokens
    kinds = {type(layer) for layer in target.layers}
    found = _layer_outputs(made, kinds, tokens)
    if len(found) != count:
        return f"{len(found)} layers run"
    expected = _layer_outputs(target, kinds, tokens)
    if len(expected) != target.num_layers:
        return f"the target itself runs {len(expected)} of its {target.num_layers} layers"
    error = (found[-1] - expected[count - 1]).float().square().mean().sqrt() / expected[count - 1].float().std()
    return "" if error < TOLERANCE else f"their output is off by {float(error):.2g} standard deviations"


def _layer_outputs(target: Target, kinds: set[type], tokens: Tensor) -> list[Tensor]:
    """What each decoder layer that runs on [1, T] tokens gives, [1, T, H], wherever the decoder holds it."""
    outputs: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    handles = [m.register_forward_hook(keep) for m in target.decoder.modules() if type(m) in kinds]
    try:
        target.decoder(input_ids=tokens, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return outputs
