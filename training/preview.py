"""What a run would train on, before anything is trained: needs the tokenizer and the text, not the model.

T tokens, C captured layers, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from headsmith.training.conversations import Report, Sample, load_samples
from headsmith.training.features import Batches, feature_bytes
from headsmith.training.recipe import Recipe
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

_FEW_TOKENS = 20_000  # supervised; below this the heads learn hardly anything that carries over
_BINS = 10
_BAR = 40  # characters of the longest bar


def preview(
    recipe: Recipe, console: Console, rows: int = 3, layers: int | None = None, hidden: int | None = None
) -> Report:
    """Print samples with their learned tokens marked, dropped rows by reason, sizes and lengths.

    Args:
        rows: samples shown.
        layers, hidden: C and H of the drafter and target; with both, the size of cached features is printed.
    Raises: ConversationError if a file is missing or no row can be used.
    """
    from headsmith.heads.target import load_tokenizer

    tokenizer = load_tokenizer(recipe.target, recipe.trust_remote_code)
    samples, report = load_samples(recipe.train_paths, tokenizer, recipe.data)
    markers = ("", "") if console.color_system else ("[[", "]]")
    legend = "green" if console.color_system else "in [[double brackets]]"
    console.print(f"What is {legend} is learned, the rest is only read.\n", markup=False)
    for sample in samples[:rows]:
        console.rule(Text(sample.row_id))
        console.print(masked_text(sample, tokenizer, *markers))
    console.rule("all rows")
    console.print(str(report), markup=False, highlight=False)
    if report.supervised_tokens < _FEW_TOKENS:
        console.print(
            f"warning: {report.supervised_tokens:,} supervised tokens are few (expected {_FEW_TOKENS:,} "
            "or more): let the target answer more prompts",
            style="yellow",
        )
    for line in length_histogram(report.lengths):
        console.print(line, markup=False, highlight=False)
    console.print(_sizes(recipe, samples, report, layers, hidden), markup=False, highlight=False)
    return report


def masked_text(sample: Sample, tokenizer: PreTrainedTokenizerBase, before: str = "", after: str = "") -> Text:
    """The sample as text, learned tokens in green and between `before` and `after`."""
    text = Text()
    for learned, span in _spans(sample.loss_mask):
        ids = sample.input_ids[span].tolist()
        piece = str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        text.append(f"{before}{piece}{after}" if learned else piece, "bold green" if learned else "dim")
    return text


def _spans(mask: np.ndarray) -> Iterator[tuple[bool, slice]]:
    """Runs of equal values in a bool [T]."""
    start = 0
    for value, run in groupby(mask.tolist()):
        end = start + len(list(run))
        yield value, slice(start, end)
        start = end


def length_histogram(lengths: Sequence[int]) -> list[str]:
    """One line of text a bin: how many samples have how many tokens."""
    counts, edges = np.histogram(lengths, bins=min(_BINS, max(lengths)), range=(0, max(lengths) + 1))
    rounded = [math.ceil(edge) for edge in edges]
    bars = ["#" * math.ceil(_BAR * count / counts.max()) for count in counts]
    return [
        f"{start:>6} to {end - 1:>6} tokens {count:>8} {bar}"
        for start, end, count, bar in zip(rounded, rounded[1:], counts, bars)
    ]


def _sizes(recipe: Recipe, samples: Sequence[Sample], report: Report, layers: int | None, hidden: int | None) -> str:
    batches = len(Batches(samples, recipe.train.batch_tokens).plan(0))
    steps = math.ceil(batches / recipe.train.accumulation)
    lines = [f"{steps:,} optimizer steps an epoch on one process ({batches:,} micro-batches)"]
    if layers is not None and hidden is not None:
        size = feature_bytes(report.total_tokens, layers, hidden)
        lines.append(f"{size / 1e9:.2f} GB of target features if they are cached (train.features)")
    return "\n".join(lines)
