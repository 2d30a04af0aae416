"""The frozen target: loading, features, head path, masks."""

from .embedded import ALIAS, embedded_target, write_embedded_target
from .loading import load_tokenizer
from .target import FrozenTeacher, Target

__all__ = ["ALIAS", "FrozenTeacher", "Target", "embedded_target", "load_tokenizer", "write_embedded_target"]
