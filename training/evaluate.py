"""What trained heads are worth on held-out conversations: teacher-forced, and really decoded.

Teacher-forced figures compare the drafter with the target at every position of a given text. Decoded ones
come from decoding, and are what a user sees.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from headsmith.heads.drafter import Drafter, Teacher
from headsmith.heads.target import Target
from headsmith.inference import SpeculativeDecoder
from headsmith.training.conversations import Sample
from headsmith.training.features import Batches, FeatureSource
from headsmith.training.tracking import Window
from rich.console import Console
from rich.table import Table


@torch.no_grad()
def teacher_forced(
    drafter: Any, batches: Batches, features: FeatureSource, teacher: Teacher, accelerator: Accelerator
) -> dict[str, Any]:
    """Go through held-out text once, ranks sharing the work; the figures are valid on the main process.

    Returns: those of `Window.means`, and `top_k` [J][K].
    """
    window = Window(accelerator)
    drafter.eval()
    for step in batches.steps(epoch=0):
        for batch in step.batches:
            with accelerator.autocast():
                window.add(drafter(features(batch), teacher))
    drafter.train()
    window.collect()
    return {**window.means(), "top_k": window.top_k()}


def held_out_prompts(samples: Sequence[Sample], count: int) -> list[torch.Tensor]:
    """Prompts [T] of the first `count` conversations, up to where the target's first answer begins.

    The loss mask marks answers, so this is the text with the generation prompt, as the target saw it.
    """
    first: dict[str, torch.Tensor] = {}
    for sample in samples:
        start = int(sample.loss_mask.argmax())
        if sample.row_id not in first and start > 0:
            first[sample.row_id] = torch.from_numpy(sample.input_ids[:start].astype("int64"))
    return list(first.values())[:count]


def decoded(
    target: Target, drafter: Drafter, prompts: Sequence[torch.Tensor], tree: str, new_tokens: int
) -> dict[str, Any]:
    """Decode each prompt greedily with the drafter, one at a time.

    Returns: acceptance length, target forwards, tokens, how often at least 1, 2, ... drafts were accepted;
    empty if there was nothing to decode.
    """
    decoder = SpeculativeDecoder(target, drafter, tree=tree)
    limit = target.max_positions
    usable = [prompt for prompt in prompts if limit is None or len(prompt) + new_tokens <= limit]
    stats = None
    start = time.monotonic()
    for prompt in usable:
        ids = prompt[None].to(target.device)
        found = decoder.generate(ids, max_new_tokens=new_tokens, do_sample=False).stats
        if stats is None:
            stats = found
        else:
            stats.merge(found)
    if stats is None or stats.row_forwards == 0:
        return {}
    return {
        "prompts": len(usable),
        "tree": stats.tree,
        "acceptance_length": round(stats.acceptance_length, 4),
        "forwards": stats.row_forwards,
        "tokens": stats.committed,
        "accepted_at_depth": [round(count / stats.row_forwards, 4) for count in stats.accepted_at],
        "seconds": round(time.monotonic() - start, 2),
    }


def report(path: Path, console: Console, forced: dict[str, Any], real: dict[str, Any]) -> None:
    """Write both to `path` as JSON and print them as tables."""
    path.write_text(json.dumps({"teacher_forced": forced, "decoded": real}, indent=2) + "\n", encoding="utf-8")
    if forced:
        table = Table(title="held-out text, teacher-forced")
        for heading in ("level", "loss", "top-1", "top-3", "top-10", "conditional acceptance"):
            table.add_column(heading, justify="right")
        for level, ranks in enumerate(forced["top_k"]):
            picked = [ranks[min(k, len(ranks)) - 1] for k in (1, 3, 10)]
            values = [forced["loss"][level], *picked, forced["conditional_acceptance"][level]]
            table.add_row(str(level + 1), *(f"{value:.3f}" for value in values))
        console.print(table)
        console.print(f"projected acceptance length of a chain: {forced['projected_chain_tau']:.3f}")
    if real:
        depths = ", ".join(f"{share:.3f}" for share in real["accepted_at_depth"])
        console.print(
            f"decoded: acceptance length {real['acceptance_length']:.3f} with tree {real['tree']} "
            f"({real['prompts']} prompts, {real['tokens']} tokens in {real['forwards']} forwards, "
            f"{real['seconds']:.1f} s); accepted at depth 1, 2, ...: {depths}",
            soft_wrap=True,
        )
