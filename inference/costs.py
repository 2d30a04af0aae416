"""What decoding costs on this machine, measured once: the one cost model of trees, decoder and benchmark.

Predicted ratio to plain decoding = τ · T(1) / (T(n) + c): T(n) verifies n nodes, c drafts them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from headsmith.heads.drafter import Drafter, TargetFeatures
from headsmith.heads.target import Target
from headsmith.heads.target.embedded import cache_folder
from headsmith.heads.tree import DraftTree

from .builder import TreeBuilder
from .dynamic_tree import DynamicTree
from .engine import Session

log = logging.getLogger("headsmith")

SIZES = (1, 2, 4, 8, 12, 16, 24, 32)  # nodes a row whose verification is timed
CONTEXT = 192  # tokens before them
DEPTH = 4  # levels drafted to see what one more costs
REPEATS = 12


@dataclass(frozen=True)
class CostModel:
    """Seconds of the parts of a round, for a batch of this size.

    Args:
        nodes, verify: T(n) at these n; between them a straight line.
        observe: the drafter takes in what was verified and proposes the first level.
        expand: one more level.
    """

    nodes: tuple[int, ...]
    verify: tuple[float, ...]
    observe: float
    expand: float

    @property
    def plain(self) -> float:
        """T(1): a step of plain decoding."""
        return self.verify[0]

    def drafting(self, passes: int) -> float:
        """c: the first level, and so many further ones."""
        return self.observe + passes * self.expand

    def verify_times(self, most: int) -> np.ndarray:
        """[most] T(1) to T(most)."""
        wanted = np.arange(1, most + 1)
        slope = (self.verify[-1] - self.verify[0]) / (self.nodes[-1] - self.nodes[0])
        beyond = np.maximum(wanted - self.nodes[-1], 0) * slope
        # More nodes never take less time: a dip is noise.
        return np.interp(wanted, self.nodes, np.maximum.accumulate(self.verify)) + beyond


def cost_model(target: Target, drafter: Drafter, batch: int, forward: Any) -> CostModel:
    """The costs of this machine, target and drafter: from the cache, measured where nothing is known yet."""
    path = _place(target, drafter, batch, forward.name)
    known: dict[Path, CostModel] = target.__dict__.setdefault("_costs", {})
    if path not in known:
        known[path] = _read(path) or calibrate(target, drafter, batch, forward)
    return known[path]


def calibrate(target: Target, drafter: Drafter, batch: int, forward: Any) -> CostModel:
    """Measure, and keep the result for later runs on this machine."""
    costs = measure_costs(target, drafter, batch, forward)
    path = _place(target, drafter, batch, forward.name)
    target.__dict__.setdefault("_costs", {})[path] = costs
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(asdict(costs)))
        scratch.replace(path)
    except OSError as error:  # a read-only home costs a few seconds a run, not the run
        log.warning("the measured costs are not kept (%s): %s", path, error)
    return costs


def _place(target: Target, drafter: Drafter, batch: int, forward: str) -> Path:
    """The file of one machine, target, drafter and batch size."""
    device = target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    machine = [platform.node(), str(device), name, torch.get_num_threads(), torch.__version__]
    pair = [
        target.fingerprint,
        str(target.dtype),
        forward,
        type(drafter).__name__,
        repr(getattr(drafter, "config", "")),
    ]
    digest = hashlib.sha256(json.dumps([*machine, *pair, batch]).encode()).hexdigest()[:20]
    return cache_folder() / "costs" / f"{digest}.json"


def _read(path: Path) -> CostModel | None:
    try:
        found = json.loads(path.read_text())
        return CostModel(tuple(found["nodes"]), tuple(found["verify"]), found["observe"], found["expand"])
    except (OSError, ValueError, KeyError, TypeError):  # absent, or of another release: measured anew
        return None


@torch.inference_mode()
def measure_costs(target: Target, drafter: Drafter, batch: int, forward: Any, repeats: int = REPEATS) -> CostModel:
    """Time every part of a round on random text, the parts taking turns.

    Lower quartiles: what else the machine does only ever adds time, and a T(1) that is too long would make speculation
    seem to pay where it does not.
    """
    setting = _Round(target, drafter, batch, forward)
    bushes = {size: setting.bush(size) for size in SIZES}
    parts: dict[Any, Callable[[], Any]] = {n: partial(setting.verify, tree) for n, tree in bushes.items()}
    depth = min(DEPTH, drafter.max_depth)
    for levels in {1, depth}:
        parts[f"depth {levels}"] = partial(setting.draft, DynamicTree(64, levels, 4))
    times = timed(parts, repeats, 0.25)
    one = times["depth 1"]
    expand = max(times[f"depth {depth}"] - one, 0.0) / max(depth - 1, 1)
    return CostModel(SIZES, tuple(times[size] for size in SIZES), one, expand)


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of one round: T(1), T(n), c."""

    plain: float
    verify: float
    draft: float

    def predicted_ratio(self, tau: float) -> float:
        """Speed against plain decoding that an acceptance length τ should bring."""
        return tau * self.plain / (self.verify + self.draft)


@torch.inference_mode()
def round_costs(
    target: Target, drafter: Drafter, builder: TreeBuilder, forward: Any, repeats: int = REPEATS
) -> RoundCosts:
    """Time the rounds of a tree whose size is always the same, at batch 1."""
    setting = _Round(target, drafter, 1, forward)
    root = setting.bush(1)
    tree = setting.draft(builder)
    parts: dict[str, Callable[[], Any]] = {
        "plain": partial(setting.verify, root),
        "verify": partial(setting.verify, tree),
        "draft": partial(setting.draft, builder),
    }
    return RoundCosts(**timed(parts, repeats))


def timed(parts: dict[Any, Callable[[], Any]], repeats: int, quantile: float = 0.5) -> dict[Any, float]:
    """Seconds of each part, the median or another quantile; they take turns, and the first turn only warms up."""
    seconds: dict[Any, list[float]] = {name: [] for name in parts}
    for turn in range(repeats + 1):
        for name, part in parts.items():
            start = time.perf_counter()
            part()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: float(np.quantile(found, quantile)) for name, found in seconds.items()}


class _Round:
    """A round that can be repeated: rows with a context of random text, and nothing that is committed."""

    def __init__(self, target: Target, drafter: Drafter, batch: int, forward: Any) -> None:
        self.drafter = drafter
        context = min(CONTEXT, (target.max_positions or CONTEXT) // 2)
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(target.num_tokens, (batch, context), generator=generator).to(target.device)
        self.lengths = torch.full((batch,), context, device=target.device)
        self.active = torch.ones(batch, dtype=torch.bool, device=target.device)
        self.session = Session(target, batch, context + 2 * max(SIZES), forward, drafter.needs)
        output = self.session.prefill(self.tokens, self.lengths)
        self.state = drafter.start(self.session, self.tokens, self.lengths)
        self.features = None
        if drafter.needs.positions != "none":
            self.features = TargetFeatures(self.tokens, output.hidden, output.final)
        drafter.observe(self.state, self.features, self.tokens.roll(-1, 1), self.lengths)

    def verify(self, tree: DraftTree) -> None:
        """A forward over the tree, up to the target's choices on the host."""
        output = self.session.forward(tree.tokens, tree.depth, tree.ancestors())
        self.session.logits(output.final).max(-1).indices.tolist()

    def bush(self, size: int) -> DraftTree:
        """A binary tree of `size` nodes."""
        steps = torch.arange(size, device=self.tokens.device)
        parents = ((steps - 1) // 2).expand(len(self.tokens), size)
        depth = (steps + 1).log2().long().expand(len(self.tokens), size)
        nodes = self.tokens[:, :1].expand(-1, size)
        return DraftTree(nodes, parents, depth, torch.full_like(self.lengths, size))

    def draft(self, builder: TreeBuilder) -> DraftTree:
        """Take in one position and draft."""
        features = None if self.features is None else _first(self.features)
        one = torch.ones_like(self.lengths)
        proposal = self.drafter.observe(self.state, features, self.tokens[:, :1], one)
        return builder.build(self.drafter, self.state, proposal, self.tokens[:, 0], self.active)


def _first(features: TargetFeatures) -> TargetFeatures:
    return TargetFeatures(
        features.input_ids[:, :1],
        None if features.hidden is None else features.hidden[:, :1],
        None if features.final is None else features.final[:, :1],
    )
