"""Verify forwards as one compiled graph, for accelerators: launching their kernels takes longer than running them.

B rows, N nodes, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from headsmith.heads.cache import RaggedTreeCache, Span
from headsmith.heads.target.features import hooked
from headsmith.heads.target.nodes import run_nodes
from torch import Tensor

from .generic import GenericForward
from .lean import LeanForward
from .paths import PathForward


class CompiledForward:
    """A forward over trees that is traced once for each size, in fixed buffers (`RaggedTreeCache(fixed=True)`).

    Trees are filled up to a power of two nodes, so that few sizes are met. Masks and positions are made outside of the
    graph; inside it nothing asks the device.

    Args:
        forward: what is compiled.
        capture: layers whose inputs are wanted.
        options: of `torch.compile`, beside `fullgraph=True, dynamic=False`; by default CUDA graphs where there is CUDA.
    Raises: ValueError for a target that takes no tree, or whose position biases are made anew for every forward.
    """

    def __init__(
        self,
        forward: LeanForward | GenericForward | PathForward,
        capture: tuple[int, ...],
        options: dict[str, Any] | None = None,
    ) -> None:
        if isinstance(forward, PathForward) or (isinstance(forward, GenericForward) and forward.biased):
            reason = forward.drive.reason if isinstance(forward, PathForward) else "ALiBi is made anew in every forward"
            raise ValueError(f"{forward.target.name} cannot be compiled into one graph: {reason}; leave compile out")
        self.forward, self.capture = forward, capture
        self.name = f"{forward.name}, compiled"
        if options is None:
            options = {"mode": "reduce-overhead"} if forward.target.device.type == "cuda" else {}
        step: Any = forward.__call__
        if isinstance(forward, GenericForward):
            # Hooks that come and go would be another graph each time.
            self._found = hooked(forward.target.layers, capture, self) if capture else {}
            step = self._decode
        self._step = torch.compile(step, fullgraph=True, dynamic=False, **options)

    def __call__(
        self, cache: RaggedTreeCache, tokens: Tensor, depth: Tensor, ancestors: Tensor
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run [B, N] nodes behind the committed tokens: as `run_nodes` with the forward itself."""
        size = tokens.shape[1]
        missing = padded_size(size) - size
        if missing:
            tokens, depth = F.pad(tokens, (0, missing)), F.pad(depth, (0, missing))
            ancestors = F.pad(ancestors, (0, missing, 0, missing))
            # A node that sees nothing at all would be NaN.
            ancestors[:, range(size, size + missing), range(size, size + missing)] = True
        final, found = run_nodes(self._run, cache, tokens, depth, ancestors, capture=self.capture)
        return final[:, :size], {k: value[:, :size] for k, value in found.items()}

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        seen: Tensor,
        slot_positions: Tensor,
        cache: RaggedTreeCache,
        span: Span,
        capture: tuple[int, ...],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        if isinstance(self.forward, LeanForward):
            return self._step(tokens, positions, seen, slot_positions, cache, span, capture)
        mask = self.forward.masked(positions, seen, slot_positions)
        with self.forward.attending(slot_positions):
            return self._step(tokens, mask, positions, cache, span)

    def _decode(
        self, tokens: Tensor, mask: Any, positions: Tensor, cache: RaggedTreeCache, span: Span
    ) -> tuple[Tensor, dict[int, Tensor]]:
        assert isinstance(self.forward, GenericForward)
        final = self.forward.decode(tokens, mask, positions, cache, span)
        return final, dict(self._found)


def padded_size(nodes: int) -> int:
    """Nodes that a tree of so many is filled up to, at least two: a single row takes another kernel."""
    return max(2, 1 << (nodes - 1).bit_length())
