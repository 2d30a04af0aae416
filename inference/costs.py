"""What decoding costs on this machine, measured once: the one cost model of trees, decoder and benchmark.

Predicted ratio to plain decoding = τ · T(1) / (T(n) + c): T(n) verifies n nodes, c drafts them. Both grow with the
context, so they are measured behind a short and behind a long one.

B rows, T tokens, C captured layers, H hidden.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from headsmith.heads.cache import LayerShape
from headsmith.heads.drafter import Drafter, TargetFeatures
from headsmith.heads.target import Target
from headsmith.heads.target.embedded import cache_folder
from headsmith.heads.target.paths import PathCaches
from headsmith.heads.tree import DraftTree

from .builder import TreeBuilder
from .compiled import CompiledForward
from .dynamic_tree import DynamicTree
from .engine import CHUNK, Session
from .paths import PathForward

log = logging.getLogger("headsmith")

NEAR, FAR = 192, 2048  # tokens before the nodes
SIZES = (1, 2, 4, 8, 12, 16, 24, 32)  # nodes a row whose verification is timed behind the short text,
FAR_SIZES = (1, 8, 16, 32)  # and behind the long one
ROOM = 2**30  # bytes of keys and values that measuring may take
DEPTH = 4  # levels drafted to see what one more costs
REPEATS = 12
LOW = 0.25  # quantile: what else a machine does only ever adds time


@dataclass(frozen=True)
class CostModel:
    """Seconds of the parts of a round, for a batch of this size.

    Args:
        nodes, verify: T(n) at these n; between them a straight line.
        observe: the drafter takes in what was verified and proposes the first level.
        expand: one more level.
        context: tokens of a row before the nodes.
        growth: seconds that every further token of context adds to each part; None: it adds nothing.
    """

    nodes: tuple[int, ...]
    verify: tuple[float, ...]
    observe: float
    expand: float
    context: float = 0
    growth: CostModel | None = None

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

    def at(self, context: float) -> CostModel:
        """The costs behind so many tokens, on a straight line; behind fewer than were measured they are the same."""
        more = context - self.context
        if self.growth is None or more <= 0:
            return self
        return replace(
            self,
            verify=tuple(seconds + more * added for seconds, added in zip(self.verify, self.growth.verify)),
            observe=self.observe + more * self.growth.observe,
            expand=self.expand + more * self.growth.expand,
            context=context,
        )

    def with_growth(self, far: CostModel) -> CostModel:
        """These costs, growing so that they are those of `far` at its context, which is a longer one."""
        tokens = far.context - self.context
        before = np.interp(far.nodes, self.nodes, self.verify)
        # A longer context never takes less time: a dip is noise.
        added = (np.array(far.verify) - before).clip(min=0) / tokens
        verify = tuple(np.interp(self.nodes, far.nodes, added).tolist())
        observe, expand = max(far.observe - self.observe, 0.0), max(far.expand - self.expand, 0.0)
        return replace(self, growth=CostModel(self.nodes, verify, observe / tokens, expand / tokens))


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
        return _restored(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError):  # absent, or of another release: measured anew
        return None


def _restored(found: dict[str, Any]) -> CostModel:
    growth = None if found["growth"] is None else _restored(found["growth"])
    nodes, verify = tuple(found["nodes"]), tuple(found["verify"])
    return CostModel(nodes, verify, found["observe"], found["expand"], found["context"], growth)


@torch.inference_mode()
def measure_costs(target: Target, drafter: Drafter, batch: int, forward: Any, repeats: int = REPEATS) -> CostModel:
    """Time every part of a round behind random texts, a short and a long one, the parts taking turns.

    Low quantiles: a T(1) that is too long would make speculation seem to pay where it does not.
    """
    contexts = measured_contexts(target, drafter, batch, forward)
    sizes = dict(zip(contexts, (SIZES, FAR_SIZES)))
    parts: dict[Any, Callable[[], Any]] = {}
    for context in contexts:
        setting = Round(target, drafter, batch, forward, context, max(SIZES))
        parts |= {(context, n): partial(setting.verify, setting.bush(n)) for n in sizes[context]}
        parts |= {(context, name): part for name, part in setting.drafts().items()}
    times = timed(parts, repeats, LOW)
    found = []
    for context in contexts:
        verify = tuple(times[context, size] for size in sizes[context])
        found.append(CostModel(sizes[context], verify, *level_costs(times, context, drafter), context))
    return found[0].with_growth(found[1]) if len(found) > 1 else found[0]


def measured_contexts(target: Target, drafter: Drafter, batch: int, forward: Any) -> tuple[int, ...]:
    """Tokens of the texts behind which rounds are timed: a short one, and a long one where it tells more.

    A compiled forward looks at all of its slots, whatever the context, and caches that hold no tree have a cost of
    their own kind; both are timed behind the short text only.
    """
    limits = (target.max_positions, getattr(drafter, "max_positions", None))
    reach = min((limit for limit in limits if limit), default=2 * FAR)
    near = min(NEAR, reach // 2)
    if isinstance(forward, PathForward | CompiledForward):
        return (near,)
    row = max(token_bytes(forward.layer_shapes, target.dtype), 1) * batch
    far = min(FAR, reach - 2 * max(SIZES), ROOM // row)
    return (near, far) if far >= 2 * near else (near,)


def token_bytes(layers: list[LayerShape], dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one token."""
    return sum(layer.heads * (layer.key_dim + layer.value_dim) for layer in layers) * dtype.itemsize


def level_costs(times: dict[Any, float], context: int, drafter: Drafter) -> tuple[float, float]:
    """Seconds of the first level and of a further one, from the timed `Round.drafts` behind that context."""
    one, deepest = times[context, "first level"], times[context, "all levels"]
    return one, max(deepest - one, 0.0) / max(min(DEPTH, drafter.max_depth) - 1, 1)


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
    near = measured_contexts(target, drafter, 1, forward)[0]
    setting = Round(target, drafter, 1, forward, near, max(SIZES))
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


class Round:
    """A round that can be repeated: rows behind a context of random text, and nothing that is committed.

    Args:
        drafter: None where nothing is drafted.
        context: tokens a row holds.
        nodes: most nodes a row that are verified.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None, batch: int, forward: Any, context: int, nodes: int
    ) -> None:
        # Of its own: measuring must not move the generator that samples answers.
        generator = torch.Generator(target.device).manual_seed(0)
        self._random = partial(torch.randn, generator=generator, device=target.device, dtype=target.dtype)
        shape, device = (batch, context), target.device
        self.tokens = torch.randint(target.num_tokens, shape, generator=generator, device=device)
        self.lengths = torch.full((batch,), context, device=device)
        self.active = torch.ones(batch, dtype=torch.bool, device=device)
        self.session = Session(target, batch, context + 2 * nodes, forward, drafter.needs if drafter else None)
        self._fill()
        self.drafter = drafter
        if drafter is not None:
            self._observe(drafter)

    def _fill(self) -> None:
        """Hold keys and values as if the text had been run: what they are makes no difference to the time."""
        cache = self.session.cache
        if isinstance(cache, PathCaches):  # holds states too, which only the target makes
            self.session.prefill(self.tokens, self.lengths)
            return
        batch, context = self.tokens.shape
        span = cache.begin(slice(None), context)
        for layer, shape in enumerate(cache.layers):
            keys = self._random(batch, shape.heads, context, shape.key_dim)
            values = self._random(batch, shape.heads, context, shape.value_dim)
            cache.update(layer, keys, values, span)
        cache.commit(torch.arange(context, device=self.tokens.device).expand(batch, -1), self.lengths)

    def _observe(self, drafter: Drafter) -> None:
        """Let the drafter take in random features of the text."""
        needs, (batch, context) = drafter.needs, self.tokens.shape
        chunk, width = min(CHUNK, context), self.session.target.hidden_size
        hidden = self._random(batch, chunk, len(needs.layers), width) if needs.layers else None
        features = TargetFeatures(self.tokens[:, :chunk], hidden, self._random(batch, chunk, width))
        self.features = None if needs.positions == "none" else features
        self.state = drafter.start(self.session, self.tokens, self.lengths)
        for following in self.tokens.roll(-1, 1).split(chunk, 1):
            seen = None if self.features is None else _first(self.features, following.shape[1])
            drafter.observe(self.state, seen, following, torch.full_like(self.lengths, following.shape[1]))

    def verify(self, tree: DraftTree) -> None:
        """A forward over the tree, up to the target's choices on the host."""
        output = self.session.forward(tree.tokens, tree.depth, tree.ancestors())
        self.session.logits(output.final).max(-1).indices.tolist()

    def bush(self, size: int) -> DraftTree:
        """A binary tree of `size` nodes."""
        steps = torch.arange(size, device=self.tokens.device)
        parents = ((steps - 1) // 2).expand(len(self.tokens), size)
        depth = (steps + 1).log2().long().expand(len(self.tokens), size)
        nodes = self.tokens[:, steps % self.tokens.shape[1]]
        return DraftTree(nodes, parents, depth, torch.full_like(self.lengths, size))

    def draft(self, builder: TreeBuilder) -> DraftTree:
        """Take in one position and draft."""
        assert self.drafter is not None, "a round without a drafter drafts nothing"
        features = None if self.features is None else _first(self.features, 1)
        one = torch.ones_like(self.lengths)
        proposal = self.drafter.observe(self.state, features, self.tokens[:, :1], one)
        return builder.build(self.drafter, self.state, proposal, self.tokens[:, 0], self.active)

    def drafts(self) -> dict[str, Callable[[], Any]]:
        """Drafting one level, and so many that what a further one costs shows."""
        assert self.drafter is not None, "a round without a drafter drafts nothing"
        levels = {"first level": 1, "all levels": min(DEPTH, self.drafter.max_depth)}
        return {name: partial(self.draft, DynamicTree(64, depth, 4)) for name, depth in levels.items()}


def _first(features: TargetFeatures, count: int) -> TargetFeatures:
    """The first positions of [B, T] features."""
    return TargetFeatures(
        features.input_ids[:, :count],
        None if features.hidden is None else features.hidden[:, :count],
        None if features.final is None else features.final[:, :count],
    )
