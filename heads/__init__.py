"""What attaches to a frozen target: the target's adapter, drafters, trees, caches, checkpoints."""

from .target import Target

__all__ = ["Target"]
