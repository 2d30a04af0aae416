"""Averaged weights: what is evaluated and saved in the end, where a recipe asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class EMA:
    """Exponential moving average of a module's trainable parameters, in fp32.

    Early averages would be stuck at the random start, so the decay warms up: min(decay, (1 + t) / (10 + t)).

    Args:
        module: the drafter.
        decay: None keeps no average: `applied` then shows the weights as they are.
    """

    def __init__(self, module: nn.Module, decay: float | None) -> None:
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.decay = decay
        self.step = 0
        self.average: list[Tensor] = []
        if decay is not None:
            self.average = [parameter.detach().float().clone() for parameter in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after an optimizer step."""
        if self.decay is None:
            return
        decay = min(self.decay, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(self.average, [parameter.detach() for parameter in self.parameters], 1 - decay)
        self.step += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the module holds the averaged weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for parameter, average in zip(self.parameters, self.average):
            parameter.data, average.data = average.data, parameter.data

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        for average, saved in zip(self.average, state["average"], strict=True):
            average.copy_(saved)
