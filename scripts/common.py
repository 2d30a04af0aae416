"""Options that sub-commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def target_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """--target, --dtype, --threads, --any-target, --trust-remote-code."""
    options = [
        click.option("--target", "target_name", required=True, help="Folder, hub name, peft adapter, or alias."),
        click.option("--dtype", default="auto", show_default=True, help="bfloat16, float16, float32 or auto."),
        click.option("--threads", type=int, help="Threads of torch on a CPU."),
        click.option("--any-target", is_flag=True, help="Accept heads trained for other weights of these sizes."),
        click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the target."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def open_target(name: str, dtype: str, threads: int | None, trust_remote_code: bool) -> Any:
    """Load the target as the shared options say."""
    import torch
    from headsmith.heads import Target

    if threads is not None:
        torch.set_num_threads(threads)
    device_map = "auto" if torch.cuda.is_available() else None
    return Target.from_pretrained(name, dtype=dtype, device_map=device_map, trust_remote_code=trust_remote_code)


def render(target: Any, messages: list[dict[str, Any]]) -> Any:
    """A prompt as the target's chat template opens its answer: [1, T] token ids on the target's device."""
    encoded = target.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return encoded["input_ids"].to(target.device)


def open_heads(folder: str, target: Any, any_target: bool) -> Any:
    """Load heads; say so where they were trained on text of another chat template than the target's."""
    import json
    from pathlib import Path

    from headsmith.heads import load_drafter
    from headsmith.heads.checkpoint import heads_folder
    from headsmith.training.conversations import template_fingerprint

    drafter = load_drafter(folder, target, any_target)
    record = heads_folder(Path(folder)) / "training.json"
    if record.is_file():
        notes = json.loads(record.read_text())
        found = template_fingerprint(target.tokenizer, notes["recipe"]["data"]["chat_template_kwargs"])
        if found != notes["template_fingerprint"]:
            click.echo(
                f"warning: the heads in {folder} were trained on another chat template than {target.name} has now; "
                "answers stay the same, fewer drafts may be accepted",
                err=True,
            )
    return drafter
