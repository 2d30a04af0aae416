"""headsmith decode --target T --heads DIR --prompt "…" """

from __future__ import annotations

from typing import Any

import click

from .common import open_heads, open_target, render, target_options


@click.command("decode")
@target_options
@click.option("--heads", help="Heads folder or training run; without it the target decodes plainly.")
@click.option("--prompt", required=True, help="What the user says.")
@click.option("--system", help="A system message before it.")
@click.option("--tree", default="calibrated", show_default=True, help="Or chain, fixed, dynamic; dynamic:total=8.")
@click.option("--new-tokens", default=256, show_default=True)
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", default=1.0, show_default=True)
@click.option("--top-k", default=0, show_default=True)
@click.option("--seed", type=int, help="Seed of sampled answers.")
@click.option("--stats", is_flag=True, help="Say at the end how much each forward brought.")
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
    new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int | None,
    stats: bool,
) -> None:
    """Answer PROMPT, streaming. The answer is the target's own: heads only make it come sooner."""
    import time

    import torch
    from headsmith.inference import SpeculativeDecoder
    from transformers import TextStreamer

    target = open_target(target_name, dtype, threads, trust_remote_code)
    drafter = open_heads(heads, target, any_target) if heads else None
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    generator = None if seed is None else torch.Generator(target.device).manual_seed(seed)
    start = time.perf_counter()
    out = SpeculativeDecoder(target, drafter, tree=tree).generate(
        render(target, messages),
        max_new_tokens=new_tokens,
        streamer=TextStreamer(target.tokenizer, skip_prompt=True, skip_special_tokens=True),
        generator=generator,
        **sampling,
    )
    if stats:
        seconds, tokens = time.perf_counter() - start, out.stats.committed + 1
        tau = f", τ {out.stats.acceptance_length:.2f} ({out.stats.tree} tree)" if drafter else ""
        click.echo(f"[{tokens} tokens in {seconds:.2f} s, {out.stats.forwards} verify forwards{tau}]", err=True)
