"""The generic forward: any causal LM that takes a 4D mask, driven through its own modules.

b rows, N nodes, S slots, C captured layers, H hidden.
"""

from __future__ import annotations

from headsmith.heads.cache import LayerShape, RaggedTreeCache, Span
from headsmith.heads.target import Target
from headsmith.heads.target.nodes import TreeNodes
from headsmith.heads.target.probe import Drive
from torch import Tensor


class GenericForward:
    """Runs new nodes through the target's own decoder. Same call as `LeanForward`.

    Args:
        drive: what the probe found: the mask container, the attention, ALiBi.
    Raises: ValueError if the target does not take a tree.
    """

    name = "generic"

    def __init__(self, target: Target, drive: Drive) -> None:
        if drive.mask is None:
            raise ValueError(f"{target.name} is driven by {drive.path}, not by a tree: {drive.reason}")
        self.target, self.drive = target, drive
        self._nodes = TreeNodes(target, drive.mask, drive.attention, drive.alibi)

    @property
    def layer_shapes(self) -> list[LayerShape]:
        return list(self._nodes.shapes.values())

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
        return self._nodes(tokens, positions, seen, slot_positions, cache, span, capture)
