"""Rows of a target whose cache cannot hold a tree: every root path of the tree is a batch row of its own.

Recurrent states and convolutions have no slots to mask, so a path runs on a copy of the row's cache, and what is
accepted is run again on the untouched one. b rows, N nodes, P paths of a row, D nodes of its longest path, H hidden.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from .compat import CACHE_KEYWORD
from .nodes import captured_if
from .target import Target


@dataclass
class _Round:
    """The last forward of one row: its nodes' tokens, its paths, and the copy of the cache that ran them."""

    tokens: Tensor
    paths: list[list[int]]
    cache: Any


class PathCaches:
    """Transformers' own caches, one a row and each at its own length. Stands where `RaggedTreeCache` does."""

    def __init__(self, target: Target, batch: int) -> None:
        self.target = target
        self.batch = batch
        self.capacity = 0  # transformers' caches grow with every token
        self.lengths = torch.zeros(batch, dtype=torch.long, device=target.device)
        self._caches: list[Any] = [self._empty() for _ in range(batch)]
        self._rounds: dict[int, _Round] = {}
        self._takes_positions = "position_ids" in inspect.signature(target.decoder.forward).parameters

    def extend(
        self, input_ids: Tensor, lengths: Tensor, rows: slice, capture: tuple[int, ...]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run and commit right-padded texts [b, T] behind what the rows hold; return as `forward`."""
        done = []
        for row, text, length in zip(self._numbers(rows), input_ids, lengths.tolist()):
            done.append(self._run(text[None, :length], int(self.lengths[row]), self._caches[row], capture))
        self.lengths[rows] += lengths
        return _stacked([(f[0], {k: v[0] for k, v in c.items()}) for f, c in done], input_ids.shape[1])

    def forward(
        self, tokens: Tensor, ancestors: Tensor | None, rows: slice, capture: tuple[int, ...]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run [b, N] nodes after the committed tokens: final feature [b, N, H], inputs of the captured layers.

        Args: ancestors: [b, N, N] bool, itself included; None for a chain.
        """
        done = []
        for place, row in enumerate(self._numbers(rows)):
            above = None if ancestors is None else ancestors[place]
            done.append(self._paths(row, tokens[place], above, capture))
        return _stacked(done, tokens.shape[1])

    def commit(self, path: Tensor, counts: Tensor, rows: slice = slice(None)) -> None:
        """Keep the nodes `path` [b, M], the first `counts` [b] of them real.

        A path accepted whole keeps the cache that it ran on; any other is run again on the untouched one.
        """
        for row, nodes, count in zip(self._numbers(rows), path.tolist(), counts.tolist()):
            last = self._rounds.pop(row, None)
            if count == 0 or last is None:
                continue
            kept = nodes[:count]
            if kept in last.paths and count == max(map(len, last.paths)):
                last.cache.reorder_cache(torch.tensor([last.paths.index(kept)], device=path.device))
                self._caches[row] = last.cache
            else:
                self._run(last.tokens[kept][None], int(self.lengths[row]), self._caches[row], ())
        self.lengths[rows] += counts

    def reset(self, rows: slice) -> None:
        """Empty these rows for other sequences."""
        for row in self._numbers(rows):
            self._caches[row] = self._empty()
        self.lengths[rows] = 0

    def rewind(self, lengths: Tensor) -> Tensor:
        """Keep rows of at most `lengths` [B] tokens, empty the others; return how many each row holds then."""
        for row in (self.lengths > lengths).nonzero()[:, 0].tolist():
            self.reset(slice(row, row + 1))
        return self.lengths

    @property
    def bytes(self) -> int:
        """Memory held by keys, values and states."""
        tensors = (t for cache in self._caches for layer in cache.layers for t in vars(layer).values())
        return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))

    def move(self, source: int, target: int) -> None:
        """Hand the cache of row `source` to row `target`."""
        self._caches[target], self._caches[source] = self._caches[source], self._empty()
        self.lengths[target] = self.lengths[source]

    def _paths(
        self, row: int, tokens: Tensor, ancestors: Tensor | None, capture: tuple[int, ...]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        paths = root_paths(ancestors) if ancestors is not None else [list(range(len(tokens)))]
        longest = max(map(len, paths))
        # A short path is filled up with its own last node, behind everything that is read.
        index = torch.tensor([path + path[-1:] * (longest - len(path)) for path in paths], device=tokens.device)
        cache = copy.deepcopy(self._caches[row])
        if len(paths) > 1:
            cache.reorder_cache(torch.zeros(len(paths), dtype=torch.long, device=tokens.device))
        final, found = self._run(tokens[index], int(self.lengths[row]), cache, capture)
        self._rounds[row] = _Round(tokens, paths, cache)
        place = {node: (p, depth) for p, path in enumerate(paths) for depth, node in enumerate(path)}
        # Nodes that hang on nothing are padding; what stands there is never read.
        where = [place.get(node, (0, 0)) for node in range(len(tokens))]
        which, depth = torch.tensor(where, device=tokens.device).unbind(1)
        return final[which, depth], {k: value[which, depth] for k, value in found.items()}

    def _run(
        self, tokens: Tensor, start: int, cache: Any, capture: tuple[int, ...]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        arguments: dict[str, Any] = {CACHE_KEYWORD: cache}
        if self._takes_positions:
            arguments["position_ids"] = torch.arange(start, start + tokens.shape[1], device=tokens.device).expand_as(
                tokens
            )
        with captured_if(self.target, capture) as found:
            output = self.target.decoder(input_ids=tokens, use_cache=True, **arguments)
        return output.last_hidden_state, found

    def _empty(self) -> Any:
        return DynamicCache(config=self.target.config)

    def _numbers(self, rows: slice) -> range:
        return range(self.batch)[rows]


def root_paths(ancestors: Tensor) -> list[list[int]]:
    """The path from node 0 to every leaf of one tree, given its [N, N] mask of ancestors-or-self."""
    below = ancestors.sum(0)
    paths = [ancestors[leaf].nonzero()[:, 0].tolist() for leaf in (below == 1).nonzero()[:, 0].tolist()]
    return [path for path in paths if path[0] == 0]


def _stacked(rows: list[tuple[Tensor, dict[int, Tensor]]], length: int) -> tuple[Tensor, dict[int, Tensor]]:
    """Pad what each row gave, [T, H], to one length and stack it."""

    def padded(values: list[Tensor]) -> Tensor:
        out = values[0].new_zeros(len(values), length, values[0].shape[-1])
        for place, value in enumerate(values):
            out[place, : len(value)] = value
        return out

    return padded([final for final, _ in rows]), {k: padded([found[k] for _, found in rows]) for k in rows[0][1]}
