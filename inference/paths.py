"""The forward of targets that take no tree: root paths as batch rows, or one token at a time.

B rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from headsmith.heads.target import Target
from headsmith.heads.target.locate import UnsupportedTargetError
from headsmith.heads.target.paths import PathCaches
from headsmith.heads.target.probe import Drive
from torch import Tensor


class PathForward:
    """Opens caches that run root paths. A session asks these, not the forward, to run nodes.

    Args: drive: what the probe found.
    """

    name = "paths"

    def __init__(self, target: Target, drive: Drive) -> None:
        self.target, self.drive = target, drive

    def open(self, rows: int) -> PathCaches:
        """Empty caches of so many rows.

        Raises: UnsupportedTargetError if only `model.generate` drives the target.
        """
        if self.drive.path == "generate":
            raise UnsupportedTargetError(
                f"{self.target.name} can only be driven by its own generate(): {self.drive.reason}; "
                "SpeculativeDecoder hands over to that"
            )
        return PathCaches(self.target, rows)

    def logits(self, feature: Tensor) -> Tensor:
        """[..., H] -> [..., V]."""
        return self.target.logits(feature)
