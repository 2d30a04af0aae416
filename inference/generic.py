"""The generic forward: any causal LM that takes a 4D mask, driven through its own modules.

H hidden, V vocabulary.
"""

from __future__ import annotations

from headsmith.heads.cache import LayerShape
from headsmith.heads.target import Target
from headsmith.heads.target.nodes import TreeNodes
from headsmith.heads.target.probe import Drive
from torch import Tensor


class GenericForward(TreeNodes):
    """Runs new nodes through the target's own decoder. Same call as `LeanForward`.

    Args:
        drive: what the probe found: the mask container, the attention, ALiBi.
    Raises: ValueError if the target does not take a tree.
    """

    name = "generic"

    def __init__(self, target: Target, drive: Drive) -> None:
        if drive.mask is None:
            raise ValueError(f"{target.name} is driven by {drive.path}, not by a tree: {drive.reason}")
        super().__init__(target, drive.mask, drive.attention, drive.alibi)
        self.drive = drive

    @property
    def layer_shapes(self) -> list[LayerShape]:
        return list(self.shapes.values())

    def logits(self, feature: Tensor) -> Tensor:
        """[..., H] -> [..., V]."""
        return self.target.logits(feature)
