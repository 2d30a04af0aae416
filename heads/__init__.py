"""What attaches to a frozen target: the target's adapter, drafters, trees, caches, checkpoints."""

from . import eagle3, medusa, prompt_lookup  # each enters itself into the registry
from .checkpoint import CheckpointError, build_drafter, load_drafter
from .drafter import DRAFTERS
from .target import Target

__all__ = [
    "DRAFTERS",
    "CheckpointError",
    "Target",
    "build_drafter",
    "eagle3",
    "load_drafter",
    "medusa",
    "prompt_lookup",
]
