"""Samples in, padded batches with target features out: online each time, or kept in memory.

A plan of batches is a pure function of (samples, seed, epoch), the same on every rank, so a run can go on
from any place in it, and the tokens of a step are known on all ranks before it is run.

B rows, T tokens, C captured layers, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import psutil
import torch
from headsmith.heads.drafter import Needs, TargetFeatures
from headsmith.heads.target import Target
from headsmith.training.conversations import Sample
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

_GROUP_TOKENS = 2048  # padded tokens of samples whose features are computed together
_BUCKET = 64  # batches' worth of samples that are sorted by length together

FeatureSource = Callable[["Batch"], TargetFeatures]


class FeatureMemoryError(RuntimeError):
    """The features do not fit into memory; the message says how much they need and there is."""


@dataclass(frozen=True)
class Batch:
    """One rank's micro-batch.

    Args:
        rows: indices of the samples that are padded together.
        supervised: positions that the first level learns from.
        tokens: tokens of text, padding not counted.
        filler: it stands in for a batch so that all ranks have as many; nothing of it is learned.
    """

    rows: tuple[int, ...]
    supervised: int
    tokens: int
    filler: bool = False


@dataclass(frozen=True)
class Step:
    """What one optimizer step learns from.

    Args:
        epoch, index: its place in the plan.
        share: of the epoch that is done once it has been taken.
        batches: this rank's micro-batches.
        supervised, tokens: over all ranks and micro-batches.
    """

    epoch: int
    index: int
    share: float
    batches: tuple[Batch, ...]
    supervised: int
    tokens: int


def cut_by_length(lengths: np.ndarray, tokens: int) -> Iterator[np.ndarray]:
    """Indices of [n] lengths in groups of like length, each of at most `tokens` padded tokens or of one sample."""
    order = lengths.argsort(kind="stable")
    cuts = [0]
    for end, length in enumerate(lengths[order].tolist()):
        if end > cuts[-1] and (end + 1 - cuts[-1]) * length > tokens:
            cuts.append(end)
    for start, end in pairwise([*cuts, len(order)]):
        yield order[start:end]


class Batches:
    """Length-bucketed batches, shuffled by (seed, epoch) and dealt out to the ranks.

    Every sample is seen once an epoch. Filler batches complete the last step, so that every rank has the same
    number of micro-batches and every step the same number of them (uneven ranks would wait for ever).

    Args:
        samples: at least one.
        batch_tokens: padded tokens of a batch at most; a sample longer than that is a batch of its own.
        accumulation: micro-batches a step on each rank.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        batch_tokens: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        accumulation: int = 1,
    ) -> None:
        self.lengths = np.array([len(sample) for sample in samples])
        # The first level predicts from t the token t + 2, so what the first two tokens are does not count.
        self.supervised = np.array([int(sample.loss_mask[2:].sum()) for sample in samples])
        self.batch_tokens = batch_tokens
        self.seed = seed
        self.rank = rank
        self.world = world
        self.accumulation = accumulation

    def plan(self, epoch: int) -> list[Batch]:
        """All ranks' batches of an epoch; round i gives rank r the batch i * world + r."""
        generator = np.random.default_rng([self.seed, epoch])
        order = generator.permutation(len(self.lengths))
        bucket = max(1, int(_BUCKET * self.batch_tokens / self.lengths.mean()))
        batches = [
            self._batch(rows)
            for start in range(0, len(order), bucket)
            for rows in self._cut(order[start : start + bucket])
        ]
        shuffled = [batches[index] for index in generator.permutation(len(batches))]
        missing = -len(shuffled) % (self.world * self.accumulation)
        shortest = int(self.lengths.argmin())
        return shuffled + [Batch((shortest,), 0, 0, filler=True)] * missing

    def steps(self, epoch: int, start: int = 0) -> Iterator[Step]:
        """The optimizer steps of an epoch from index `start` on."""
        plan = self.plan(epoch)
        size = self.world * self.accumulation
        total = len(plan) // size
        for index in range(start, total):
            batches = plan[index * size : (index + 1) * size]
            yield Step(
                epoch,
                index,
                (index + 1) / total,
                tuple(batches[self.rank :: self.world]),
                sum(batch.supervised for batch in batches),
                sum(batch.tokens for batch in batches),
            )

    def _cut(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        """Sort the rows of a bucket by length and cut them where the padded batch would grow too large."""
        for part in cut_by_length(self.lengths[rows], self.batch_tokens):
            yield rows[part]

    def _batch(self, rows: np.ndarray) -> Batch:
        chosen = tuple(rows.tolist())
        return Batch(chosen, int(self.supervised[rows].sum()), int(self.lengths[rows].sum()))


def collate(samples: Sequence[Sample], batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Right-padded input_ids [B, T] and loss_mask [B, T]; a filler's mask is all False."""
    chosen = [samples[row] for row in batch.rows]
    shape = (len(chosen), max(len(sample) for sample in chosen))
    ids, mask = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=bool)
    for row, sample in enumerate(chosen):
        ids[row, : len(sample)] = sample.input_ids
        if not batch.filler:
            mask[row, : len(sample)] = sample.loss_mask
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)


class OnlineFeatures:
    """Runs the target over each batch when it is asked for."""

    def __init__(self, target: Target, samples: Sequence[Sample], needs: Needs) -> None:
        self.target = target
        self.samples = samples
        self.needs = needs

    def __call__(self, batch: Batch) -> TargetFeatures:
        ids, mask = collate(self.samples, batch, self.target.device)
        return self.target.features(ids, self.needs, mask, with_top=True)


@dataclass(frozen=True)
class _Kept:
    """Features of one sample: [T, C, H] or None, [T, H], [T]."""

    hidden: Tensor | None
    final: Tensor
    top: Tensor


class MemoryFeatures:
    """Runs the target over each sample once and keeps the features in RAM in the target's dtype.

    Samples of like length are run together, always the same ones: twice as quick as one by one, and a sample's
    features still do not depend on the batch that it is first seen in.

    Args:
        copies: processes of this machine, each of which keeps its own.
    Raises: FeatureMemoryError if all samples' features need more than the memory that is free.
    """

    def __init__(self, target: Target, samples: Sequence[Sample], needs: Needs, copies: int = 1) -> None:
        self.target = target
        self.samples = samples
        self.needs = needs
        self.bytes = sample_feature_bytes(samples, needs, target) * copies
        self._kept: list[_Kept | None] = [None] * len(samples)
        self._groups = _groups([len(sample) for sample in samples])
        free = psutil.virtual_memory().available
        if self.bytes > free:
            raise FeatureMemoryError(
                f"target features of {len(samples)} samples need {self.bytes / 1e9:.2f} GB of memory "
                f"({copies} process(es)), {free / 1e9:.2f} GB are free; set train.features=online, "
                "or train on fewer or shorter samples"
            )

    def __call__(self, batch: Batch) -> TargetFeatures:
        device = self.target.device
        ids, mask = collate(self.samples, batch, device)
        rows = [self._row(row) for row in batch.rows]
        hidden = [row.hidden for row in rows if row.hidden is not None]
        return TargetFeatures(
            input_ids=ids,
            hidden=_padded(hidden, device) if hidden else None,
            final=_padded([row.final for row in rows], device),
            loss_mask=mask,
            position_ids=torch.arange(ids.shape[1], device=device).expand_as(ids),
            top=_padded([row.top for row in rows], device),
        )

    def _row(self, index: int) -> _Kept:
        if self._kept[index] is None:
            self._run(self._groups[index])
        kept = self._kept[index]
        assert kept is not None
        return kept

    def _run(self, group: tuple[int, ...]) -> None:
        ids, mask = collate(self.samples, Batch(group, 0, 0), self.target.device)
        found = self.target.features(ids, self.needs, mask, with_top=True)
        assert found.final is not None and found.top is not None
        for row, index in enumerate(group):
            length = len(self.samples[index])
            # Copies: a slice would keep the whole padded batch alive.
            hidden = None if found.hidden is None else found.hidden[row, :length].cpu().clone()
            self._kept[index] = _Kept(hidden, found.final[row, :length].cpu().clone(), found.top[row, :length].cpu())


def _groups(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """For every sample the group it is run in: neighbours by length, of at most _GROUP_TOKENS padded tokens."""
    groups: list[tuple[int, ...]] = [()] * len(lengths)
    for part in cut_by_length(np.array(lengths), _GROUP_TOKENS):
        group = tuple(part.tolist())
        for member in group:
            groups[member] = group
    return groups


def _padded(rows: list[Tensor], device: torch.device) -> Tensor:
    return pad_sequence(rows, batch_first=True).to(device)


def feature_bytes(tokens: int, layers: int, hidden: int, itemsize: int = 2) -> int:
    """Bytes of the features of so many tokens: C captured layers and the final one, H wide, and the top token."""
    return tokens * ((layers + 1) * hidden * itemsize + 8)


def sample_feature_bytes(samples: Sequence[Sample], needs: Needs, target: Target) -> int:
    """Bytes of the features of all samples in the target's dtype."""
    tokens = sum(len(sample) for sample in samples)
    return feature_bytes(tokens, len(needs.layers), target.hidden_size, target.dtype.itemsize)


def make_features(kind: str, target: Target, samples: Sequence[Sample], needs: Needs, copies: int = 1) -> FeatureSource:
    """The source that `train.features` names: online or memory."""
    if kind == "memory":
        return MemoryFeatures(target, samples, needs, copies)
    return OnlineFeatures(target, samples, needs)
