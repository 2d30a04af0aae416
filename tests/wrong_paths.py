"""Wrong answers to "which path does a node stand for": what a test of path-dependent processors must find out."""

from __future__ import annotations

from torch import Tensor


def flat_order(tree, depth: int, rows: Tensor, nodes: Tensor) -> Tensor:
    """The tree's first nodes in its flat order, whoever's children they are."""
    return tree.tokens[rows, 1 : depth + 1]


def committed_prefix(tree, depth: int, rows: Tensor, nodes: Tensor) -> Tensor:
    """The committed text alone: its last token again, where the path should be."""
    return tree.tokens[rows, :1].expand(-1, depth)


WRONG_PATHS = {"flat order": flat_order, "committed prefix": committed_prefix}
