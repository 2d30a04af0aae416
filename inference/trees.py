"""Tree builders by name."""

from __future__ import annotations

from typing import Any

from .builder import TreeBuilder
from .calibrated_tree import CalibratedTree
from .dynamic_tree import DynamicTree
from .fixed_tree import DEFAULT_PATHS, FixedTree, chain

__all__ = ["TREES", "CalibratedTree", "DynamicTree", "FixedTree", "TreeBuilder", "chain", "make_tree"]


def _fixed(paths: Any = DEFAULT_PATHS, sampled: bool = False) -> FixedTree:
    return FixedTree(tuple(tuple(path) for path in paths), sampled=sampled)


TREES = {"chain": chain, "fixed": _fixed, "dynamic": DynamicTree, "calibrated": CalibratedTree}


def make_tree(tree: str | TreeBuilder) -> TreeBuilder:
    """A builder from its name, with options after a colon: `chain`, `chain:depth=3`, `dynamic:total=8,depth=5,top_k=3`.

    Raises: ValueError for an unknown name or option.
    """
    if not isinstance(tree, str):
        return tree
    name, _, rest = tree.partition(":")
    if name not in TREES:
        raise ValueError(f"unknown tree {name!r}; known are {', '.join(TREES)}")
    options = {}
    for item in filter(None, rest.split(",")):
        key, sign, value = item.partition("=")
        if not sign or not (value.isdigit() or value in ("true", "false")):
            raise ValueError(f"tree option {item!r} should read name=number, as in 'dynamic:total=8,depth=5'")
        options[key] = int(value) if value.isdigit() else value == "true"
    try:
        return TREES[name](**options)  # type: ignore[operator]
    except TypeError as error:
        raise ValueError(f"tree {tree!r}: {error}") from None
