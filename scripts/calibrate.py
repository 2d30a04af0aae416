"""headsmith calibrate --target T --heads DIR [--table]"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from .common import open_heads, open_target, target_options


def _numbers(context: click.Context, option: click.Parameter, text: str) -> tuple[int, ...]:
    """Positive integers, separated by commas."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{text!r} is not a list of positive integers such as 1,2,8")
    return tuple(map(int, parts))


@click.command("calibrate")
@target_options
@click.option("--heads", help="Heads folder or training run; without it prompt lookup is measured.")
@click.option("--batch", default=1, show_default=True, help="Rows decoded at once.")
@click.option("--forward", default="auto", show_default=True, help="auto, lean or generic.")
@click.option("--table", is_flag=True, help="Time all of the following, beside what a law expects; nothing is kept.")
@click.option("--contexts", default="256,1024,4096", show_default=True, callback=_numbers, help="Tokens before a tree.")
@click.option("--batches", default="1,2,4,8", show_default=True, callback=_numbers, help="Rows.")
@click.option("--sizes", default="1,2,4,8,16,32,64", show_default=True, callback=_numbers, help="Nodes a row.")
@click.option("--json", "output", type=click.Path(path_type=Path), help="Where the table is also written.")
def command(
    target_name: str,
    dtype: str,
    threads: int | None,
    any_target: bool,
    trust_remote_code: bool,
    heads: str | None,
    batch: int,
    forward: Any,
    table: bool,
    contexts: tuple[int, ...],
    batches: tuple[int, ...],
    sizes: tuple[int, ...],
    output: Path | None,
) -> None:
    """Measure anew what decoding costs on this machine, for the calibrated tree, and keep it.

    Decoding does this by itself the first time; do it again when the machine was busy then.
    """
    from headsmith.heads import build_drafter
    from headsmith.inference.costs import calibrate
    from headsmith.inference.engine import choose_forward

    if output and not table:
        raise click.UsageError("--json writes the table; add --table")
    target = open_target(target_name, dtype, threads, trust_remote_code)
    drafter = open_heads(heads, target, any_target) if heads else None
    chosen = choose_forward(target, forward)
    if table:
        _show_table(target, drafter, chosen, contexts, batches, sizes, output)
    else:
        costs = calibrate(target, drafter or build_drafter("prompt_lookup", target), batch, chosen)
        _show_costs(costs, target.max_positions)


def _show_costs(costs: Any, positions: int | None) -> None:
    for nodes, seconds in zip(costs.nodes, costs.verify):
        click.echo(f"T({nodes}) = {1e3 * seconds:.1f} ms, {seconds / costs.plain:.2f} steps of plain decoding")
    click.echo(f"drafting: {1e3 * costs.observe:.1f} ms for the first level, {1e3 * costs.expand:.1f} ms a further one")
    longer = [c for c in (1024, 4096) if costs.growth and c <= (positions or c)]
    for context in (costs.context, *longer):
        there = costs.at(context)
        least = (there.verify_times(8)[-1] + there.drafting(2)) / there.plain
        click.echo(f"behind {context} tokens, 8 nodes on 3 levels pay where τ is above {least:.2f}")


def _show_table(
    target: Any,
    drafter: Any,
    forward: Any,
    contexts: tuple[int, ...],
    batches: tuple[int, ...],
    sizes: tuple[int, ...],
    output: Path | None,
) -> None:
    import torch
    from headsmith.inference.cost_table import measure_table, report

    table = measure_table(target, drafter, forward, contexts, batches, sizes)
    setting = {
        "target": target.name,
        "dtype": str(target.dtype),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "forward": forward.name,
    }
    click.echo(", ".join(f"{name} {value}" for name, value in setting.items()))
    for line in report(table):
        click.echo(line)
    if output:
        output.write_text(json.dumps({**setting, **asdict(table)}, indent=1))
