"""What a verify forward costs as contexts, batches and trees grow, beside what a law of four constants expects.

seconds = fixed + bytes / bandwidth + products with weights / their rate + attention / its rate

B rows, n nodes a row, S tokens of context a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from headsmith.heads.cache import LayerShape
from headsmith.heads.drafter import Drafter
from headsmith.heads.target import Target
from torch import nn

from .costs import DEPTH, LOW, REPEATS, Round, level_costs, timed, token_bytes
from .paths import PathForward

CONTEXTS = (256, 1024, 4096)
BATCHES = (1, 2, 4, 8)
SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Work:
    """What one forward has to do.

    Args:
        bytes: read: the weights once, keys and values of every row once, whatever n.
        products: floating-point operations with weights.
        attention: floating-point operations of scores and weighted sums over the context.
    """

    bytes: int
    products: int
    attention: int


@dataclass(frozen=True)
class Sizes:
    """What the work of a target's forwards follows from.

    Args:
        parameters: weights that every node is multiplied with; all experts where there are several.
        weight_bytes: what they take.
        token_bytes: keys and values of one token of context, over all layers.
        token_operations: attention of one node to one token, over all layers: 4 · heads · width each.
    """

    parameters: int
    weight_bytes: int
    token_bytes: int
    token_operations: int

    @classmethod
    def of(cls, target: Target, layers: list[LayerShape]) -> Sizes:
        # Embeddings are looked up, not multiplied with; a head that is tied to them is.
        looked_up = {id(part.weight) for part in target.decoder.modules() if isinstance(part, nn.Embedding)}
        weights = [weight for weight in target.decoder.parameters() if id(weight) not in looked_up]
        weights.append(target.head_weight())
        heads = target.config.num_attention_heads
        return cls(
            sum(w.numel() for w in weights),
            sum(w.numel() * w.element_size() for w in weights),
            token_bytes(layers, target.dtype),
            sum(2 * heads * (layer.key_dim + layer.value_dim) for layer in layers),
        )

    def work(self, context: int, batch: int, nodes: int) -> Work:
        """Of a forward over B trees of n nodes behind S tokens each."""
        return Work(
            self.weight_bytes + self.token_bytes * batch * context,
            2 * self.parameters * batch * nodes,
            self.token_operations * batch * nodes * context,
        )


@dataclass(frozen=True)
class Law:
    """Seconds as a sum of parts that grow each with its own kind of work.

    Args:
        fixed: seconds of any forward.
        byte, product, attention: seconds of one byte, and of one operation of either kind.
    """

    fixed: float
    byte: float
    product: float
    attention: float

    def seconds(self, work: Work) -> float:
        return float(np.dot(_columns(work), (self.fixed, self.byte, self.product, self.attention)))

    def __str__(self) -> str:
        def rate(seconds: float, unit: str) -> str:
            return f"{1e-9 / seconds:.3g} {unit}" if seconds else f"no limit seen in {unit}"

        return (
            f"{1e3 * self.fixed:.1f} ms a forward; bytes at {rate(self.byte, 'GB/s')}; products with weights at "
            f"{rate(self.product, 'GFLOP/s')}; attention at {rate(self.attention, 'GFLOP/s')}"
        )


@dataclass(frozen=True)
class Line:
    """One combination: the seconds measured, and those that the law expects."""

    context: int
    batch: int
    nodes: int
    measured: float
    expected: float

    @property
    def ratio(self) -> float:
        return self.measured / self.expected


@dataclass(frozen=True)
class Drafting:
    """Seconds of the drafter's first level, with what it takes in before, and of every further one."""

    context: int
    batch: int
    observe: float
    expand: float


@dataclass(frozen=True)
class Table:
    """All of it.

    Args: skipped: combinations (context, batch, nodes) for which the target has too few positions.
    """

    sizes: Sizes
    law: Law
    lines: list[Line]
    drafting: list[Drafting]
    skipped: list[tuple[int, int, int]]

    def errors(self) -> tuple[float, float]:
        """Median and largest |expected / measured - 1|."""
        errors = [abs(line.expected / line.measured - 1) for line in self.lines]
        return float(np.median(errors)), max(errors)


def measure_table(
    target: Target,
    drafter: Drafter | None,
    forward: Any,
    contexts: Sequence[int] = CONTEXTS,
    batches: Sequence[int] = BATCHES,
    sizes: Sequence[int] = SIZES,
    repeats: int = REPEATS,
) -> Table:
    """Time every combination, those of one batch size taking turns, and fit the law to them.

    Raises: ValueError for a target that verifies no tree in one forward, or whose positions end before all contexts do.
    """
    if isinstance(forward, PathForward):
        raise ValueError(f"{target.name} verifies no tree in one forward ({forward.drive.reason}); name another target")
    limit = target.max_positions
    asked = list(itertools.product(contexts, batches, sizes))
    fitting = [one for one in asked if limit is None or one[0] + one[2] <= limit]
    if not fitting:
        raise ValueError(
            f"{target.name} has {limit} positions, too few for a context of {min(contexts)} and {min(sizes)} nodes; "
            "name shorter contexts"
        )
    times: dict[tuple[int, int, int], float] = {}
    drafting: list[Drafting] = []
    for batch in batches:
        found, drafts = _measure_batch(target, drafter, forward, [one for one in fitting if one[1] == batch], repeats)
        times |= found
        drafting += drafts
    shape = Sizes.of(target, forward.layer_shapes)
    works = [shape.work(*one) for one in fitting]
    law = fit_law(works, [times[one] for one in fitting])
    lines = [Line(*one, times[one], law.seconds(work)) for one, work in zip(fitting, works)]
    return Table(shape, law, lines, drafting, [one for one in asked if one not in times])


@torch.inference_mode()
def _measure_batch(
    target: Target, drafter: Drafter | None, forward: Any, combinations: list[tuple[int, int, int]], repeats: int
) -> tuple[dict[tuple[int, int, int], float], list[Drafting]]:
    """Seconds of combinations (context, batch, nodes) of one batch size, and of drafting in each of their contexts."""
    batch, most = combinations[0][1], max(nodes for _, _, nodes in combinations)
    contexts = sorted({context for context, _, _ in combinations})
    reach = getattr(drafter, "max_positions", None) or max(contexts) + DEPTH
    drafting = {c: drafter if c + DEPTH <= reach else None for c in contexts}
    rounds = {c: Round(target, drafting[c], batch, forward, c, most) for c in contexts}
    parts: dict[Any, Callable[[], Any]] = {}
    for one in combinations:
        setting = rounds[one[0]]
        parts[one] = partial(setting.verify, setting.bush(one[2]))
    for context, setting in rounds.items():
        if setting.drafter is not None:
            parts |= {(context, name): part for name, part in setting.drafts().items()}
    times = timed(parts, repeats, LOW)
    drafts = [Drafting(c, batch, *level_costs(times, c, d)) for c, d in drafting.items() if d is not None]
    return {one: times[one] for one in combinations}, drafts


def fit_law(works: Sequence[Work], seconds: Sequence[float]) -> Law:
    """The constants, none below zero, with the least sum of squared relative errors."""
    columns = np.array([_columns(work) for work in works]) / np.asarray(seconds)[:, None]
    scale = np.linalg.norm(columns, axis=0).clip(min=np.finfo(float).tiny)
    return Law(*(non_negative_fit(columns / scale) / scale).tolist())


def non_negative_fit(columns: np.ndarray) -> np.ndarray:
    """[K] weights >= 0 of [M, K] columns whose sum comes closest to one everywhere.

    Some of them are zero and the others the plain least-squares fit; with so few all choices can be tried.
    """
    rows, count = columns.shape
    best, least = np.zeros(count), float(rows)
    for chosen in itertools.chain.from_iterable(itertools.combinations(range(count), k) for k in range(1, count + 1)):
        part = columns[:, chosen]
        found = np.linalg.lstsq(part, np.ones(rows), rcond=None)[0]
        error = float(np.square(part @ found - 1).sum())
        if (found >= 0).all() and error < least:
            best, least = np.zeros(count), error
            best[list(chosen)] = found
    return best


def _columns(work: Work) -> tuple[float, float, float, float]:
    return 1.0, float(work.bytes), float(work.products), float(work.attention)


def report(table: Table) -> list[str]:
    """The lines that people read."""
    out = ["context  batch  nodes  measured ms  expected ms  measured / expected"]
    for line in table.lines:
        times = f"{1e3 * line.measured:11.1f}  {1e3 * line.expected:11.1f}  {line.ratio:19.2f}"
        out.append(f"{line.context:7}  {line.batch:5}  {line.nodes:5}  {times}")
    for context, batch, nodes in table.skipped:
        out.append(f"{context:7}  {batch:5}  {nodes:5}  skipped: beyond the target's positions")
    if table.drafting:
        out.append("context  batch  first level ms  further level ms")
    for draft in table.drafting:
        times = f"{1e3 * draft.observe:14.1f}  {1e3 * draft.expand:16.1f}"
        out.append(f"{draft.context:7}  {draft.batch:5}  {times}")
    median, worst = table.errors()
    out.append(f"law: {table.law}")
    out.append(f"error of the law: median {100 * median:.1f} %, worst {100 * worst:.1f} %")
    return out
