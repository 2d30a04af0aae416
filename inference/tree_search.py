"""The best fixed tree for recorded ranks (Medusa, arXiv:2401.10774; Sequoia, arXiv:2402.12374, prices it).

J levels, K ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from .costs import CostModel
from .fixed_tree import FixedTree


def best_paths(top_k: Sequence[Sequence[float]], count: int) -> list[tuple[tuple[int, ...], float]]:
    """The `count` paths of child ranks most likely to be accepted, best first, each with that probability.

    A path is as likely as the product of its ranks' hits at their levels, so a node never beats its parent or its
    better sibling, and the best nodes always form a tree.

    Args: top_k: [J][K] how often the target's token is among the drafter's best 1..K at each level, given that the
        levels above were right (`top_k` of a run's evaluation.json).
    Raises: ValueError if a level's figures fall.
    """
    hits = [[after - before for before, after in zip([0.0, *level], level)] for level in top_k]
    if any(hit < 0 for level in hits for hit in level):
        raise ValueError(f"top_k counts hits among the best 1..K, so each level must rise; found {list(top_k)}")
    # A rank may have been hit more often than a better one by chance; it still may not stand before it.
    ranked = [sorted(level, reverse=True) for level in hits]
    waiting: list[tuple[float, tuple[int, ...]]] = [(-ranked[0][0], (0,))]
    chosen: list[tuple[tuple[int, ...], float]] = []
    while waiting and len(chosen) < count:
        worth, path = heapq.heappop(waiting)
        if worth == 0:
            break
        chosen.append((path, -worth))
        level, rank = len(path) - 1, path[-1]
        if rank + 1 < len(ranked[level]):
            heapq.heappush(waiting, (worth / ranked[level][rank] * ranked[level][rank + 1], (*path[:-1], rank + 1)))
        if level + 1 < len(ranked):
            heapq.heappush(waiting, (worth * ranked[level + 1][0], (*path, 0)))
    return chosen


def best_fixed_tree(top_k: Sequence[Sequence[float]], nodes: int = 32, costs: CostModel | None = None) -> FixedTree:
    """The fixed tree of at most `nodes` nodes (node 0 included) that accepts most.

    Args: costs: with them, the tree of most expected tokens a second, however small.
    Raises: ValueError for fewer than 2 nodes, or if no tree beats plain decoding.
    """
    if nodes < 2:
        raise ValueError(f"a tree that drafts has at least 2 nodes, node 0 included, not {nodes}; give more of them")
    paths = best_paths(top_k, nodes - 1)
    size = len(paths)
    if costs is not None:
        size = max(range(len(paths) + 1), key=lambda n: expected_rate(paths[:n], costs))
    if size == 0:
        raise ValueError("no draft tree is faster than plain decoding with these ranks and costs; decode plainly")
    return FixedTree(tuple(path for path, _ in paths[:size]))


def expected_rate(paths: Sequence[tuple[tuple[int, ...], float]], costs: CostModel) -> float:
    """Tokens a second that a fixed tree of these paths should bring; without any, those of plain decoding."""
    if not paths:
        return 1 / costs.plain
    drafting = costs.drafting(max(len(path) for path, _ in paths) - 1)
    return (1 + sum(worth for _, worth in paths)) / (float(costs.verify_times(len(paths) + 1)[-1]) + drafting)
