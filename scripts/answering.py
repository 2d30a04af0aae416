"""What `decode` and `chat` share: the options of an answer, and what is said of it afterwards."""

from __future__ import annotations

import logging
import logging.handlers
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click


def answer_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """--heads, --system, --tree, --new-tokens, --temperature, --top-p, --top-k, --seed, --stats."""
    options = [
        click.option("--heads", help="Heads folder or training run; without it the target decodes plainly."),
        click.option("--system", help="A system message before it."),
        click.option(
            "--tree", default="calibrated", show_default=True, help="Or chain, fixed, best, dynamic; dynamic:total=8."
        ),
        click.option("--new-tokens", default=256, show_default=True, help="Most tokens of an answer."),
        click.option("--temperature", default=0.0, show_default=True, help="0 is greedy."),
        click.option("--top-p", default=1.0, show_default=True),
        click.option("--top-k", default=0, show_default=True),
        click.option("--seed", type=int, help="Seed of sampled answers."),
        click.option("--stats", is_flag=True, help="Say how much each forward brought."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def answer_arguments(
    target: Any, new_tokens: int, temperature: float, top_p: float, top_k: int, seed: int | None
) -> dict[str, Any]:
    """Arguments of `SpeculativeDecoder.generate` for these options."""
    import torch

    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    generator = None if seed is None else torch.Generator(target.device).manual_seed(seed)
    return {"max_new_tokens": new_tokens, "generator": generator, **sampling}


def stats_line(stats: Any, seconds: float, prompt: int) -> str:
    """One line on an answer to a prompt of so many tokens."""
    tau = f", τ {stats.acceptance_length:.2f} ({stats.tree} tree)" if stats.tree != "plain" else ""
    read = f"{stats.prefilled} of {prompt} prompt tokens read, cache {stats.cache_bytes / 2**20:.0f} MiB"
    return f"[{stats.committed + 1} tokens in {seconds:.2f} s, {stats.forwards} verify forwards{tau}; {read}]"


@contextmanager
def notes_afterwards() -> Iterator[None]:
    """Within the block warnings wait, so that none is printed into an answer that is being streamed."""
    held = logging.handlers.MemoryHandler(1000, flushLevel=logging.CRITICAL, target=logging.StreamHandler())
    logger = logging.getLogger("headsmith")
    logger.addHandler(held)
    try:
        yield
    finally:
        logger.removeHandler(held)
        held.close()
