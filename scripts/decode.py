"""headsmith decode --target T --heads DIR --prompt "…" """

from __future__ import annotations

from typing import Any

import click

from .answering import answer_arguments, answer_options, notes_afterwards, stats_line
from .common import open_heads, open_target, render, target_options


@click.command("decode")
@target_options
@answer_options
@click.option("--prompt", required=True, help="What the user says.")
@click.option("--certify", is_flag=True, help="Decode plainly, too, and prove the answer: greedy only.")
def command(
    target_name: str,
    dtype: str,
    threads: int | None,
    any_target: bool,
    trust_remote_code: bool,
    heads: str | None,
    prompt: str,
    system: str | None,
    tree: str,
    certify: bool,
    stats: bool,
    **answering: Any,
) -> None:
    """Answer PROMPT, streaming. The answer is the target's own: heads only make it come sooner."""
    import time

    from headsmith.inference import SpeculativeDecoder
    from transformers import TextStreamer

    target = open_target(target_name, dtype, threads, trust_remote_code)
    drafter = open_heads(heads, target, any_target) if heads else None
    messages = [{"role": "system", "content": system}] if system else []
    ids = render(target, [*messages, {"role": "user", "content": prompt}])
    start = time.perf_counter()
    with notes_afterwards():
        out = SpeculativeDecoder(target, drafter, tree=tree).generate(
            ids,
            streamer=TextStreamer(target.tokenizer, skip_prompt=True, skip_special_tokens=True),
            certify=certify,
            **answer_arguments(target, **answering),
        )
    if certify:
        click.echo(f"[{out.certificate or 'nothing to compare: generate() itself answered'}]", err=True)
    if stats:
        # The parts leave out what a certificate takes, and what is done once; where generate() answers there are none.
        seconds = sum(out.stats.seconds.values()) or time.perf_counter() - start
        click.echo(stats_line(out.stats, seconds, ids.shape[1]), err=True)
