"""The one key/value cache, for targets and drafters alike: every row at its own length, a draft tree at its end.

b rows of a span, N new nodes, A nodes drafted earlier in this round, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 64  # the buffers hold a multiple of this many slots
AHEAD = 1024  # slots held in advance of what is used, at least a quarter of it and never above the capacity
# A forward looks at a multiple of this many slots: bf16 kernels on CPU round differently at other lengths, and the
# same node would then not come out bit for bit the same beside 1 and beside 8 others.
LOOK = 32


@dataclass(frozen=True)
class LayerShape:
    """Heads and widths of one layer's keys and values (they differ in multi-head latent attention)."""

    heads: int
    key_dim: int
    value_dim: int


@dataclass
class Span:
    """Where one forward writes: which rows, in which slots.

    Args:
        rows: the rows that take part, as a slice so that buffers are views.
        index: [b, 1] their numbers within that slice.
        slots: [b, N] slot of each new node.
        start: the first slot if it is the same for all rows (a plain copy then does), else None.
        used: how many slots of the buffers are looked at.
        before: A, nodes that stand between the committed tokens and the new ones.
    """

    rows: slice
    index: Tensor
    slots: Tensor
    start: int | None
    used: int
    before: int


class RaggedTreeCache:
    """Keys and values of `batch` rows; row b holds `lengths[b]` committed tokens, then the nodes of its tree.

    A forward calls `begin`, then `update` once a layer; `commit` keeps an accepted path and drops the rest. Layers of
    one shape share one buffer, so that committing costs two copies, not two a layer.

    Args:
        capacity: slots a row is expected to need. Memory is taken in blocks as rows grow, not beyond this before more
            is really needed.
        fixed: look at all slots in every forward and write by index, so that shapes and addresses stay and the device
            is not asked for lengths; slots then double when they run out.
    """

    def __init__(
        self,
        layers: list[LayerShape],
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
        fixed: bool = False,
    ) -> None:
        self.layers = layers
        self.batch = batch
        self.capacity = _up(capacity, BLOCK)
        self.fixed = fixed
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self._longest = 0  # no row has more committed tokens
        self._place: list[tuple[int, int]] = []
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        shapes = list(dict.fromkeys(layers))
        for shape in shapes:
            size = (layers.count(shape), batch, shape.heads, 0)
            self._keys.append(torch.zeros(*size, shape.key_dim, dtype=dtype, device=device))
            self._values.append(torch.zeros(*size, shape.value_dim, dtype=dtype, device=device))
        taken = [0] * len(shapes)
        for layer in layers:
            group = shapes.index(layer)
            self._place.append((group, taken[group]))
            taken[group] += 1

    @property
    def slots(self) -> int:
        return self._keys[0].shape[3] if self._keys else 0

    @property
    def bytes(self) -> int:
        """Memory held by the buffers."""
        return sum(t.numel() * t.element_size() for t in (*self._keys, *self._values))

    def begin(self, rows: slice, nodes: int, before: int = 0) -> Span:
        """Plan the writing of `nodes` new nodes a row after the committed tokens and `before` drafted ones."""
        lengths = self.lengths[rows]
        slots = (lengths + before)[:, None] + torch.arange(nodes, device=lengths.device)
        if self.fixed:
            self._make_room(before + nodes)
            return Span(rows, _numbers(lengths), slots, None, self.slots, before)
        values = lengths.tolist()
        first = values[0] + before if len(set(values)) == 1 else None
        used = _up(max(values) + before + nodes, LOOK)
        self._grow(used)
        return Span(rows, _numbers(lengths), slots, first, used, before)

    def update(self, layer: int, keys: Tensor, values: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Write [b, heads, N, D] keys and values; return everything the rows hold, [b, heads, span.used, D]."""
        group, index = self._place[layer]
        stored = self._keys[group][index, span.rows], self._values[group][index, span.rows]
        for buffer, new in zip(stored, (keys, values)):
            if span.start is not None:
                buffer.narrow(2, span.start, new.shape[2]).copy_(new)
            else:
                # Not scatter_: on CPU it copies the whole buffer.
                buffer.transpose(1, 2)[span.index, span.slots] = new.transpose(1, 2)
        return stored[0][:, :, : span.used], stored[1][:, :, : span.used]

    def mask(self, span: Span, ancestors: Tensor | None) -> Tensor:
        """[b, N, used] bool: what each new node attends to.

        Args: ancestors: [b, N, A + N] over the nodes of the round, itself included; None for a chain (then A = 0).
        """
        lengths = self.lengths[span.rows]
        slot = torch.arange(span.used, device=lengths.device)
        if ancestors is None:
            return slot <= span.slots[:, :, None]
        mask = (slot < lengths[:, None])[:, None, :].repeat(1, span.slots.shape[1], 1)
        nodes = ancestors.shape[2]
        where = lengths[:, None] + torch.arange(nodes, device=lengths.device)
        return mask.scatter_(2, where[:, None, :].expand(-1, mask.shape[1], -1), ancestors)

    def positions(self, span: Span, depth: Tensor) -> Tensor:
        """[b, used] logical position of every slot, given the [b, A + N] depth of the round's nodes."""
        lengths = self.lengths[span.rows]
        table = torch.arange(span.used, device=lengths.device).repeat(lengths.shape[0], 1)
        nodes = torch.arange(depth.shape[1], device=lengths.device)
        return table.scatter_(1, lengths[:, None] + nodes, lengths[:, None] + depth)

    def commit(self, path: Tensor, counts: Tensor, rows: slice = slice(None)) -> None:
        """Keep the nodes `path` [b, M] (indices into the round's nodes, the first `counts` [b] real) as committed."""
        lengths = self.lengths[rows]
        steps = torch.arange(path.shape[1], device=path.device)
        moved = (path != steps) & (steps < counts[:, None])
        self._longest += path.shape[1]
        if self.fixed or bool(moved.any()):
            source = lengths[:, None] + torch.where(steps < counts[:, None], path, steps)
            target = lengths[:, None] + steps
            index = _numbers(lengths)
            for buffer in (*self._keys, *self._values):
                view = buffer[:, rows].transpose(2, 3)
                view[:, index, target] = view[:, index, source]
        self.lengths[rows] = lengths + counts

    def reset(self, rows: slice) -> None:
        """Empty these rows for other sequences."""
        self.lengths[rows] = 0

    def rewind(self, lengths: Tensor) -> Tensor:
        """Forget all but the first `lengths` [B] committed tokens; return how many each row holds then."""
        self.lengths = torch.minimum(self.lengths, lengths)
        return self.lengths

    def move(self, source: int, target: int) -> None:
        """Copy the committed tokens of row `source` over row `target`."""
        length = int(self.lengths[source])
        for buffer in (*self._keys, *self._values):
            buffer[:, target, :, :length] = buffer[:, source, :, :length]
        self.lengths[target] = length

    def _make_room(self, nodes: int) -> None:
        """Have slots for that many nodes behind the longest row; the device is asked only where it may be too few."""
        if self._longest + nodes <= self.slots:
            return
        self._longest = int(self.lengths.max())
        if (used := self._longest + nodes) > self.slots:
            wanted = max(used, min(used + AHEAD, self.capacity))
            self._hold(1 << (wanted - 1).bit_length())

    def _grow(self, used: int) -> None:
        if used > self.slots:
            ahead = used + max(AHEAD, used // 4)
            self._hold(_up(min(ahead, self.capacity) if used <= self.capacity else used * 5 // 4, BLOCK))

    def _hold(self, slots: int) -> None:
        """Larger buffers with the same contents."""

        def larger(buffer: Tensor) -> Tensor:
            # Zeros, not garbage: a masked slot still takes part in 0 · value, and 0 · NaN is NaN.
            grown = buffer.new_zeros(*buffer.shape[:3], slots, buffer.shape[4])
            grown[:, :, :, : buffer.shape[3]] = buffer
            return grown

        self._keys = [larger(buffer) for buffer in self._keys]
        self._values = [larger(buffer) for buffer in self._values]


def _up(number: int, block: int) -> int:
    return -(-number // block) * block


def _numbers(lengths: Tensor) -> Tensor:
    """[b, 1] 0 to b - 1, to index rows beside their slots."""
    return torch.arange(lengths.shape[0], device=lengths.device)[:, None]
