"""headsmith bench --target T --heads DIR --questions FILE.jsonl"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from .common import open_heads, open_target, render, target_options


@click.command("bench")
@target_options
@click.option("--heads", multiple=True, help="Heads folder or training run; may be given several times.")
@click.option(
    "--drafter",
    "drafters",
    multiple=True,
    help="Drafter without heads, as early_exit:layers=10 or draft_model:model=DIR; may be given several times.",
)
@click.option(
    "--questions",
    default="questions",
    show_default=True,
    help="JSONL of messages or turns, or the packaged held-out 'questions'.",
)
@click.option("--limit", type=int, help="Ask this many, spread over all categories.")
@click.option("--new-tokens", default=64, show_default=True)
@click.option(
    "--tree", "trees", multiple=True, help="May be given several times.  [default: chain:depth=3, calibrated]"
)
@click.option("--forward", default="auto", show_default=True, help="auto, lean or generic.")
@click.option("--compile", "compiled", is_flag=True, help="Our decoders run compiled forwards (CUDA graphs on a GPU).")
@click.option("--assistant", help="Also measure generate() assisted by this smaller model, or by early_exit=N layers.")
@click.option("--certify", is_flag=True, help="Fail if a text leaves plain decoding elsewhere than at a tie.")
@click.option("--json", "output", type=click.Path(path_type=Path), help="Write all figures here.")
def command(
    target_name: str,
    dtype: str,
    threads: int | None,
    any_target: bool,
    trust_remote_code: bool,
    heads: tuple[str, ...],
    drafters: tuple[str, ...],
    questions: str,
    limit: int | None,
    new_tokens: int,
    trees: tuple[str, ...],
    forward: str,
    compiled: bool,
    assistant: str | None,
    certify: bool,
    output: Path | None,
) -> None:
    """Measure generate(), the plain loop of the same engine, prompt lookup, heads and other drafters on the same
    questions.

    The methods take turns on every question. Ratios below 1 are slower, and are printed as they are. --certify needs
    memory for one more copy of the target, in a finer dtype.
    """
    from headsmith.inference import bench
    from headsmith.training.prompts import load_prompts, spread

    target = open_target(target_name, dtype, threads, trust_remote_code)
    setting = bench.Setting(target, new_tokens, forward, certify, compiled)
    methods = _baselines(setting, assistant, trust_remote_code)
    opened = [(drafter.method, drafter) for drafter in (open_heads(folder, target, any_target) for folder in heads)]
    opened += [(given, _untrained(given, target)) for given in drafters]
    for name, drafter in opened:
        for tree in trees or ("chain:depth=3", "calibrated"):
            methods.append(bench.decoder_method(setting, name, drafter, tree))
    asked = [_question(target, prompt) for prompt in spread(load_prompts(questions), limit)]
    result = bench.run_benchmark(
        setting, methods, asked, lambda question: click.echo(f"\r{question.id:<40}", nl=False, err=True)
    )
    click.echo("\r" + " " * 40 + "\r", nl=False, err=True)
    result["assistant"] = assistant
    show(result)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=2) + "\n")
    if certify:
        bench.check_certified(result)


def _baselines(setting: Any, assistant: str | None, trust_remote_code: bool) -> list[Any]:
    """The methods that need no heads."""
    from headsmith.heads import build_drafter
    from headsmith.inference import bench
    from headsmith.inference.assistant import assistant_arguments

    assisted = []
    if assistant is not None:
        arguments = assistant_arguments(setting.target, assistant, trust_remote_code)
        assisted.append(bench.generate_method(setting, bench.ASSISTANT, **arguments))
    lookup = build_drafter("prompt_lookup", setting.target)
    return [
        bench.generate_method(setting),
        bench.decoder_method(setting, bench.PLAIN, None, "chain"),
        bench.generate_method(setting, bench.LOOKUP, prompt_lookup_num_tokens=8),
        *assisted,
        bench.decoder_method(setting, "prompt_lookup", lookup, "chain:depth=3"),
    ]


def _untrained(given: str, target: Any) -> Any:
    """A drafter from its name, with options after a colon: `early_exit:layers=10`.

    Raises: ValueError for an option that is not name=value, a drafter that has to be trained, or as building it does.
    """
    from headsmith.heads import build_drafter
    from headsmith.heads.checkpoint import SavedDrafter, find_method

    name, _, rest = given.partition(":")
    if issubclass(find_method(name), SavedDrafter):
        raise ValueError(f"--drafter {name} has to be trained first; name the folder of its heads with --heads")
    options: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, sign, value = item.partition("=")
        if not sign:
            raise ValueError(f"--drafter option {item!r} should read name=value, as in 'early_exit:layers=10'")
        options[key] = int(value) if value.isdigit() else value == "true" if value in ("true", "false") else value
    return build_drafter(name, target, **options)


def _question(target: Any, prompt: Any) -> Any:
    from headsmith.inference.bench import Question

    return Question(prompt.id, prompt.category, render(target, prompt.messages))


def show(result: dict[str, Any]) -> None:
    """Print the figures of a run as a table, and where the rounds went below it."""
    from rich.console import Console
    from rich.table import Table

    machine = result["machine"]
    title = (
        f"{result['questions']} questions, {result['new_tokens']} new tokens, {machine['dtype']}, "
        f"{machine['threads']} threads, {machine['forward']} forward"
    )
    table = Table(title=title)
    for column in ("method", "tree", "tokens/s", "τ", "× generate", "× plain", "predicted", "identical"):
        # Folded, not cut: on a narrow terminal the methods of generate() would read alike.
        numeric = column not in ("method", "tree")
        table.add_column(column, justify="right" if numeric else "left", overflow="fold", no_wrap=column == "method")
    for method in result["methods"]:
        table.add_row(
            method["name"],
            method["tree"],
            f"{method['tokens_per_second']:.1f}",
            "-" if method["tau"] is None else f"{method['tau']:.2f}",
            f"{method['ratio_generate']:.2f}",
            f"{method['ratio_plain']:.2f}",
            "-" if method["predicted_ratio"] is None else f"{method['predicted_ratio']:.2f}",
            f"{method['identical']}/{result['questions']}",
        )
    Console().print(table)
    for method in result["methods"]:
        if method["tau"] is not None and method["tree"] != "plain" and method["round_parts"]:
            click.echo(f"{method['name']}, {method['tree']}: {_parts(method['round_parts'])}")


def _parts(parts: dict[str, dict[str, float]]) -> str:
    first, *others = ((name, part["ms"]) for name, part in parts.items())
    listed = [f"{first[0]} {first[1]:.1f} ms", *(f"{name} {ms:.1f}" for name, ms in others)]
    return f"{', '.join(listed)} ({100 * parts['rest']['share']:.1f} %)"
