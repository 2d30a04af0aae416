"""Counts of a decode: how much each target forward brought."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


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
    """

    tree: str
    rows: int
    depth: int = 0
    forwards: int = 0
    row_forwards: int = 0
    accepted: int = 0
    committed: int = 0
    accepted_at: list[int] = field(default_factory=list)

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
        longest = max(len(self.accepted_at), len(other.accepted_at))
        pairs = [(s.accepted_at + [0] * longest)[:longest] for s in (self, other)]
        self.accepted_at = [a + b for a, b in zip(*pairs)]
