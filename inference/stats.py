"""Counts and times of a decode: how much each target forward brought, and where the time went."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from torch import Tensor

# Of a call: the prompt; of its rounds: the drafter, the target's forward up to its logits, the choice of tokens and the
# cache's commit, and all that is left.
PARTS = ("prefill", "draft", "verify", "accept", "rest")


class Laps:
    """A stopwatch: each lap is booked on a part, so that no time between the first and the last goes missing.

    Args: total: seconds by part, added to.
    """

    def __init__(self, total: dict[str, float]) -> None:
        self.total = total
        self.round: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, part: str) -> None:
        """What passed since the last call went into `part`."""
        now = time.perf_counter()
        self.total[part] += now - self._last
        self.round[part] = self.round.get(part, 0.0) + now - self._last
        self._last = now

    def new_round(self) -> None:
        self.round = {}


@dataclass
class DecodeStats:
    """Counts over the verify forwards after the prefill.

    Args:
        tree: name of the tree, `plain` without a drafter.
        rows: rows decoded.
        depth: levels of the tree.
        forwards: verify forwards, each over all rows.
        row_forwards: verify forwards summed over the rows that were still active in them.
        accepted: draft tokens accepted, summed over rows.
        committed: tokens committed after the prefill's own, summed over rows and cut at each row's end.
        accepted_at: how often at least 1, 2, … draft tokens were accepted in a row's forward.
        seconds: wall-clock time by part (`PARTS`). On an accelerator a part only queues its work; who first reads a
            result waits for it, which is `accept`.
        prefilled: prompt tokens that were run, padding left out; fewer than given where a past held the others.
        cache_bytes: the most memory that keys and values of the target took.
    """

    tree: str
    rows: int
    depth: int = 0
    forwards: int = 0
    row_forwards: int = 0
    accepted: int = 0
    committed: int = 0
    accepted_at: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    prefilled: int = 0
    cache_bytes: int = 0

    def __post_init__(self) -> None:
        self.accepted_at = self.accepted_at or [0] * self.depth

    @property
    def acceptance_length(self) -> float:
        """τ: accepted draft tokens + 1, the mean over target forwards; nan before the first."""
        return (self.accepted + self.row_forwards) / self.row_forwards if self.row_forwards else float("nan")

    def record(self, counts: Tensor, taken: list[int], active: Tensor) -> None:
        """Add one verify forward: path lengths [B] (node 0 included) and the tokens each row took."""
        self.forwards += 1
        for count, took, was_active in zip(counts.tolist(), taken, active.tolist()):
            if not was_active:
                continue
            self.row_forwards += 1
            self.accepted += count - 1
            self.committed += took
            for level in range(count - 1):
                self.accepted_at[level] += 1

    def merge(self, other: DecodeStats) -> None:
        """Add the counts of another decode of the same tree."""
        self.rows += other.rows
        self.forwards += other.forwards
        self.row_forwards += other.row_forwards
        self.accepted += other.accepted
        self.committed += other.committed
        self.prefilled += other.prefilled
        self.cache_bytes = max(self.cache_bytes, other.cache_bytes)
        self.seconds = {part: self.seconds[part] + other.seconds[part] for part in PARTS}
        longest = max(len(self.accepted_at), len(other.accepted_at))
        pairs = [(s.accepted_at + [0] * longest)[:longest] for s in (self, other)]
        self.accepted_at = [a + b for a, b in zip(*pairs)]
