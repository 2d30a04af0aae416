"""Exact laws of short emitted sequences, and the chi-square tests that hold samples against them.

V vocabulary, L tokens a sequence, R runs. A law is [V**L] over sequences, the first token most significant.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from scipy import stats
from torch import Tensor


def processed(logits: Tensor, temperature: float = 1.0, top_p: float = 1.0) -> Tensor:
    """[..., V] probabilities after temperature, then top-p: the fewest likeliest tokens that hold `top_p`."""
    probs = torch.softmax(logits.double() / temperature, -1)
    ordered, tokens = probs.sort(dim=-1, descending=True)
    kept = ordered * (ordered.cumsum(-1) - ordered < top_p)
    probs = torch.zeros_like(probs).scatter(-1, tokens, kept)
    return probs / probs.sum(-1, keepdim=True)


def joint_law(conditionals: Sequence[Tensor]) -> Tensor:
    """The law of L tokens from p(x1) [V], p(x2 | x1) [V, V], p(x3 | x1, x2) [V, V, V], …"""
    law = conditionals[0]
    for conditional in conditionals[1:]:
        law = law[..., None] * conditional
    return law.flatten()


def count_sequences(tokens: Tensor, vocabulary: int) -> Tensor:
    """[V**L] how often each sequence occurs among [R, L] tokens."""
    place = vocabulary ** torch.arange(tokens.shape[1] - 1, -1, -1)
    return torch.bincount((tokens * place).sum(1), minlength=vocabulary ** tokens.shape[1])


def chi_square_p_value(counts: Tensor, law: Tensor) -> float:
    """How well the counts fit the law; 0 if a sequence occurred that the law forbids."""
    runs = int(counts.sum())
    if bool(((law == 0) & (counts > 0)).any()):
        return 0.0
    pool = _pools(law * runs)
    observed, expected = _pooled(counts.double(), pool), _pooled(law * runs, pool)
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return float(stats.chi2.sf(statistic, len(expected) - 1))


def chi_square_power(law: Tensor, biased: Tensor, runs: int, significance: float) -> float:
    """With what probability `runs` samples of the biased law get a p-value below `significance` under `law`.

    By the noncentral chi-square distribution, or, where the biased law does what the law forbids, by the
    probability that this happens at all.
    """
    forbidden = float(biased[law == 0].sum())
    if forbidden > 0:
        return 1 - (1 - forbidden) ** runs
    pool = _pools(law * runs)
    expected, shifted = _pooled(law * runs, pool), _pooled(biased * runs, pool)
    freedom = len(expected) - 1
    distance = float(((shifted - expected) ** 2 / expected).sum())
    return float(stats.ncx2.sf(stats.chi2.isf(significance, freedom), freedom, distance))


def _pools(expected: Tensor, least: float = 5.0) -> Tensor:
    """Number the pools of cells: rare cells together until each pool expects `least`; -1 if impossible."""
    pool = torch.full(expected.shape, -1)
    number, filled = 0, 0.0
    for cell in expected.argsort().tolist():
        if expected[cell] == 0:
            continue
        pool[cell] = number
        filled += float(expected[cell])
        if filled >= least:
            number, filled = number + 1, 0.0
    if 0 < filled < least and number > 0:
        pool[pool == number] = number - 1
    return pool


def _pooled(values: Tensor, pool: Tensor) -> Tensor:
    possible = pool >= 0
    return torch.zeros(int(pool.max()) + 1, dtype=values.dtype).index_add_(0, pool[possible], values[possible])
