"""What attaches to a frozen target: the target's adapter, drafters, trees, caches, checkpoints."""

from . import draft_model, eagle, eagle3, early_exit, hydra, medusa, prompt_lookup  # each registers itself
from .checkpoint import CheckpointError, build_drafter, load_drafter
from .drafter import DRAFTERS
from .target import Target

__all__ = [
    "DRAFTERS",
    "CheckpointError",
    "Target",
    "build_drafter",
    "draft_model",
    "eagle",
    "eagle3",
    "early_exit",
    "hydra",
    "load_drafter",
    "medusa",
    "prompt_lookup",
]
