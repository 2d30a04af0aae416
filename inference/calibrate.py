"""What a round costs on this machine: T(n) of n verified nodes, and c of drafting them.

Predicted ratio to plain decoding = τ · T(1) / (T(n) + c).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from headsmith.heads.drafter import Drafter, TargetFeatures
from headsmith.heads.target import Target
from headsmith.heads.tree import DraftTree

from .engine import Session
from .trees import TreeBuilder


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of one round at batch 1: T(1), T(n), c."""

    plain: float
    verify: float
    draft: float

    def predicted_ratio(self, tau: float) -> float:
        """Speed against plain decoding that an acceptance length τ should bring."""
        return tau * self.plain / (self.verify + self.draft)


@torch.inference_mode()
def round_costs(
    target: Target,
    drafter: Drafter,
    builder: TreeBuilder,
    context: int = 128,
    repeats: int = 15,
    forward: Any = "auto",
) -> RoundCosts:
    """Measure the parts of a round after `context` tokens of random text; medians, alternating."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(target.num_tokens, (1, context), generator=generator).to(target.device)
    session = Session(target, 1, context + 2 * builder.nodes, forward, drafter.needs)
    lengths = torch.tensor([context], device=target.device)
    output = session.prefill(prompt, lengths)
    state = drafter.start(session, prompt, lengths)
    features = None if drafter.needs.positions == "none" else TargetFeatures(prompt, output.hidden, output.final)
    drafter.observe(state, features, prompt.roll(-1, 1), lengths)
    root, active = prompt[:, -1], torch.ones(1, dtype=torch.bool, device=target.device)

    def verify(tree: DraftTree) -> None:
        logits = session.logits(session.forward(tree.tokens, tree.depth, tree.ancestors()).final)
        logits.max(-1).indices.tolist()

    def draft() -> DraftTree:
        one = None if features is None else _first(features)
        proposal = drafter.observe(state, one, root[:, None], torch.ones_like(lengths))
        return builder.build(drafter, state, proposal, root, active)

    tree = draft()
    full = DraftTree.root(root) if tree.size == 1 else tree
    parts: dict[str, Callable[[], Any]] = {
        "plain": lambda: verify(DraftTree.root(root)),
        "verify": lambda: verify(full),
        "draft": draft,
    }
    times: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(repeats):
        for name, part in parts.items():
            start = time.perf_counter()
            part()
            times[name].append(time.perf_counter() - start)
    return RoundCosts(**{name: statistics.median(seconds[1:]) for name, seconds in times.items()})


def _first(features: TargetFeatures) -> TargetFeatures:
    return TargetFeatures(
        features.input_ids[:, :1],
        None if features.hidden is None else features.hidden[:, :1],
        None if features.final is None else features.final[:, :1],
    )
