"""The engine: one session of rows that plain decoding, speculative decoding and self-generation all run on.

B rows of the session, b rows of one forward, N nodes, A nodes run before in the same round, C captured layers,
H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from headsmith.heads.cache import RaggedTreeCache
from headsmith.heads.drafter import Needs
from headsmith.heads.target import Target
from headsmith.heads.target.features import stack
from headsmith.heads.target.nodes import run_nodes
from headsmith.heads.target.paths import PathCaches
from headsmith.heads.target.probe import probe
from torch import Tensor

from .compiled import CompiledForward
from .generic import GenericForward
from .lean import LeanForward, try_lean
from .paths import PathForward

Forward = GenericForward | LeanForward | PathForward
CHUNK = 512  # tokens of a prompt that are run at once


@dataclass
class NodeOutput:
    """What the target computed for new nodes.

    Args:
        final: [b, N, H] feature after the final norm.
        hidden: [b, N, C, H] inputs of the captured layers, None where none are.
    """

    final: Tensor
    hidden: Tensor | None


def choose_forward(target: Target, kind: Literal["auto", "lean", "generic"] = "auto") -> Forward:
    """The lean forward where the target's layout allows it, else the one that the probe finds; made once a target.

    Raises: ValueError if `lean` is asked for and the target is not of the common layout.
    """
    if kind not in ("auto", "lean", "generic"):
        raise ValueError(f"forward is 'auto', 'lean' or 'generic', not {kind!r}")
    made: dict[str, Any] = target.__dict__.setdefault("_forwards", {})
    if kind != "generic" and "lean" not in made:
        made["lean"] = try_lean(target)
    if kind != "generic" and made["lean"][0] is not None:
        return made["lean"][0]
    if kind == "lean":
        raise ValueError(f"{target.name} cannot use the lean forward: {made['lean'][1]}")
    if "generic" not in made:
        drive = probe(target)
        made["generic"] = GenericForward(target, drive) if drive.path == "tree" else PathForward(target, drive)
    return made["generic"]


class Session:
    """Rows of one target with their caches; every row at its own length.

    Args:
        rows: how many sequences are held at once.
        capacity: tokens a row is expected to reach; the cache grows beyond it when needed.
        forward: `auto`, `lean`, `generic`, or a forward already made; a compiled one runs trees, not prompts.
        needs: what the drafter wants captured.
    """

    def __init__(
        self,
        target: Target,
        rows: int,
        capacity: int,
        forward: Literal["auto", "lean", "generic"] | Forward | CompiledForward = "auto",
        needs: Needs | None = None,
    ) -> None:
        self.target = target
        self.driver = choose_forward(target, forward) if isinstance(forward, str) else forward
        self.compiled = self.driver if isinstance(self.driver, CompiledForward) else None
        self.runner: Forward = self.driver.forward if isinstance(self.driver, CompiledForward) else self.driver
        self.capacity = capacity
        self.capture = needs.layers if needs else ()
        self.cache: RaggedTreeCache | PathCaches
        if isinstance(self.runner, PathForward):
            self.cache = self.runner.open(rows)
        else:
            shapes, fixed = self.runner.layer_shapes, self.compiled is not None
            self.cache = RaggedTreeCache(shapes, rows, capacity, target.dtype, target.device, fixed)
        self.forwards = 0

    def sibling(self, target: Target) -> Session:
        """An empty session of as many rows and tokens for another target, such as a draft model."""
        return Session(target, self.cache.batch, self.capacity)

    @property
    def lengths(self) -> Tensor:
        """[B] committed tokens of every row."""
        return self.cache.lengths

    def forward(
        self,
        tokens: Tensor,
        depth: Tensor | None = None,
        ancestors: Tensor | None = None,
        rows: slice = slice(None),
    ) -> NodeOutput:
        """Run [b, N] new nodes after the committed tokens of `rows`; nothing is committed.

        They stand behind the A nodes of earlier forwards since the last commit (levels of one draft; caches of paths
        and compiled forwards take whole trees only, A = 0).

        Args:
            depth: [b, A + N] distance from the first node; None for a chain, as a prompt is.
            ancestors: [b, N, A + N] bool, itself included; None for a chain (then A = 0).
        """
        self.forwards += 1
        if isinstance(self.cache, PathCaches):
            return self._output(*self.cache.forward(tokens, ancestors, rows, self.capture))
        if self.compiled is not None and depth is not None and ancestors is not None:
            return self._output(*self.compiled(self.cache, tokens, depth, ancestors))
        if tokens.numel() > 1:
            return self._output(*self._tree(self.cache, tokens, depth, ancestors, rows))
        # One row takes another kernel than several, with other rounding (and on CPU a slower one).
        final, found = self._tree(self.cache, *_doubled(tokens, depth, ancestors), rows)
        return self._output(final[:, :1], {k: value[:, :1] for k, value in found.items()})

    def _tree(
        self, cache: RaggedTreeCache, tokens: Tensor, depth: Tensor | None, ancestors: Tensor | None, rows: slice
    ) -> tuple[Tensor, dict[int, Tensor]]:
        if depth is None:
            depth = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        return run_nodes(self.runner, cache, tokens, depth, ancestors, rows, self.capture, self.target.max_positions)

    def _output(self, final: Tensor, found: dict[int, Tensor]) -> NodeOutput:
        return NodeOutput(final, stack(found, self.capture, final) if self.capture else None)

    def logits(self, final: Tensor) -> Tensor:
        """[..., H] -> [..., V]; a single feature is doubled for the same reason as a single token."""
        if final.numel() == final.shape[-1]:
            flat = self.runner.logits(final.reshape(1, -1).expand(2, -1))
            return flat[0].view(*final.shape[:-1], -1)
        return self.runner.logits(final)

    def commit(self, path: Tensor, counts: Tensor, rows: slice = slice(None)) -> None:
        """Keep the nodes of an accepted path, `path` [b, M] with the first `counts` [b] real."""
        self.cache.commit(path, counts, rows)

    def prefill(self, input_ids: Tensor, lengths: Tensor, rows: slice = slice(None)) -> NodeOutput:
        """Run right-padded prompts [b, T] into empty rows and commit their first `lengths` [b] tokens."""
        self.cache.reset(rows)
        return self.extend(input_ids, lengths, rows)

    def extend(self, input_ids: Tensor, lengths: Tensor, rows: slice = slice(None)) -> NodeOutput:
        """Run right-padded texts [b, T] behind what `rows` hold and commit their first `lengths` [b] tokens.

        At most CHUNK tokens at once: a mask grows as the square of that.
        """
        if isinstance(self.cache, PathCaches):
            self.forwards += 1
            return self._output(*self.cache.extend(input_ids, lengths, rows, self.capture))
        parts = []
        for start in range(0, input_ids.shape[1], CHUNK):
            tokens = input_ids[:, start : start + CHUNK]
            parts.append(self.forward(tokens, rows=rows))
            path = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
            self.commit(path, (lengths - start).clamp(0, tokens.shape[1]), rows)
        return _joined(parts)

    def reset(self, capacity: int) -> None:
        """Empty all rows for texts of so many tokens."""
        self.cache.reset(slice(None))
        self.capacity = self.cache.capacity = capacity

    def rewind(self, lengths: Tensor) -> Tensor:
        """Forget all but the first `lengths` [B] committed tokens of every row; return how many each holds then.

        It may be fewer: a recurrent state cannot be cut, so such a row is emptied unless it is kept whole.
        """
        if isinstance(self.runner, PathForward) and self.runner.drive.path == "plain":
            lengths = torch.zeros_like(lengths)  # goes on token by token only, which no prompt is run by
        return self.cache.rewind(lengths)


def _doubled(
    tokens: Tensor, depth: Tensor | None, ancestors: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The one node [1, 1], and behind it another like it, which it does not see."""
    if depth is not None:
        depth = torch.cat((depth, depth[:, -1:]), 1)
    if ancestors is not None:
        ancestors = F.pad(ancestors, (0, 1, 0, 1))
        ancestors[:, -1, -1] = True  # a node that sees nothing at all would be NaN
    return tokens.expand(1, 2), depth, ancestors


def _joined(parts: list[NodeOutput]) -> NodeOutput:
    if len(parts) == 1:
        return parts[0]
    hidden = [part.hidden for part in parts if part.hidden is not None]
    return NodeOutput(torch.cat([part.final for part in parts], 1), torch.cat(hidden, 1) if hidden else None)
