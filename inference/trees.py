"""Tree builders by name."""

from __future__ import annotations

from typing import Any

from headsmith.heads.drafter import Drafter

from .builder import TreeBuilder
from .calibrated_tree import CalibratedTree
from .dynamic_tree import DynamicTree
from .fixed_tree import DEFAULT_PATHS, FixedTree, chain
from .tree_search import best_fixed_tree

__all__ = ["TREES", "CalibratedTree", "DynamicTree", "FixedTree", "TreeBuilder", "chain", "make_tree"]


def _fixed(paths: Any = DEFAULT_PATHS, sampled: bool = False) -> FixedTree:
    return FixedTree(tuple(tuple(path) for path in paths), sampled=sampled)


def _best(drafter: Drafter | None = None, nodes: int = 32) -> FixedTree:
    ranks = getattr(drafter, "ranks", None)  # not of the protocol: only trained heads have a record
    if ranks is None:
        whose = "there is no drafter" if drafter is None else f"this drafter ({type(drafter).__name__}) has none"
        raise ValueError(
            f"the tree 'best' is made from the ranks recorded when heads were trained, and {whose}: expected "
            "teacher_forced.top_k in evaluation.json of the training run, beside its heads/; name the run's output "
            "folder as the heads, or take another tree, such as 'calibrated'"
        )
    return best_fixed_tree(ranks, nodes)


TREES = {"chain": chain, "fixed": _fixed, "dynamic": DynamicTree, "calibrated": CalibratedTree, "best": _best}


def make_tree(tree: str | TreeBuilder, drafter: Drafter | None = None) -> TreeBuilder:
    """A builder from its name, with options after a colon: `chain`, `chain:depth=3`, `dynamic:total=8,depth=5,top_k=3`.

    Args: drafter: whose recorded ranks `best:nodes=8`, the best fixed tree, is made from.
    Raises: ValueError for an unknown name or option, or a drafter without ranks where they are needed.
    """
    if not isinstance(tree, str):
        return tree
    name, _, rest = tree.partition(":")
    if name not in TREES:
        raise ValueError(f"unknown tree {name!r}; known are {', '.join(TREES)}")
    options: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, sign, value = item.partition("=")
        if not sign or not (value.isdigit() or value in ("true", "false")):
            raise ValueError(f"tree option {item!r} should read name=number, as in 'dynamic:total=8,depth=5'")
        options[key] = int(value) if value.isdigit() else value == "true"
    if name == "best":
        options["drafter"] = drafter
    try:
        return TREES[name](**options)  # type: ignore[operator]
    except TypeError as error:
        raise ValueError(f"tree {tree!r}: {error}") from None
