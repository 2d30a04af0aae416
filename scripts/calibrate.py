"""headsmith calibrate --target T --heads DIR"""

from __future__ import annotations

from typing import Any

import click

from .common import open_heads, open_target, target_options


@click.command("calibrate")
@target_options
@click.option("--heads", help="Heads folder or training run; without it prompt lookup is measured.")
@click.option("--batch", default=1, show_default=True, help="Rows decoded at once.")
@click.option("--forward", default="auto", show_default=True, help="auto, lean or generic.")
def command(
    target_name: str,
    dtype: str,
    threads: int | None,
    any_target: bool,
    trust_remote_code: bool,
    heads: str | None,
    batch: int,
    forward: Any,
) -> None:
    """Measure anew what decoding costs on this machine, for the calibrated tree, and keep it.

    Decoding does this by itself the first time; do it again when the machine was busy then.
    """
    from headsmith.heads import build_drafter
    from headsmith.inference.costs import calibrate
    from headsmith.inference.engine import choose_forward

    target = open_target(target_name, dtype, threads, trust_remote_code)
    drafter = open_heads(heads, target, any_target) if heads else build_drafter("prompt_lookup", target)
    costs = calibrate(target, drafter, batch, choose_forward(target, forward))
    for nodes, seconds in zip(costs.nodes, costs.verify):
        click.echo(f"T({nodes}) = {1e3 * seconds:.1f} ms, {seconds / costs.plain:.2f} steps of plain decoding")
    click.echo(f"drafting: {1e3 * costs.observe:.1f} ms for the first level, {1e3 * costs.expand:.1f} ms a further one")
    least = (costs.verify_times(8)[-1] + costs.drafting(2)) / costs.plain
    click.echo(f"8 nodes on 3 levels pay where τ is above {least:.2f}")
