"""How much faster: every method over the same questions in one run, taking turns, with both baselines.

`generate` is transformers' own loop, `plain` the same engine without a drafter: what a faster forward brings must not
be sold as speculation.
"""

from __future__ import annotations

import platform
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from headsmith.heads.drafter import Drafter
from headsmith.heads.target import Target
from torch import Tensor

from .builder import TreeBuilder
from .calibrated_tree import CalibratedTree
from .certify import CertificationError, Difference, Finer, first_difference
from .costs import RoundCosts, round_costs
from .decoder import SpeculativeDecoder
from .stats import PARTS, DecodeStats

GENERATE, PLAIN = "generate", "plain"
LOOKUP, ASSISTANT = "generate+lookup", "generate+assistant"


@dataclass(frozen=True)
class Question:
    """One prompt of a benchmark, as token ids [1, T]."""

    id: str
    category: str
    input_ids: Tensor


@dataclass
class Answer:
    """What one method said to one question."""

    seconds: float
    tokens: list[int]
    stats: DecodeStats | None = None


@dataclass
class Method:
    """A way of decoding: `run` answers a prompt and times itself."""

    name: str
    tree: str
    run: Callable[[Tensor], Answer]
    costs: Callable[[], RoundCosts] | None = None
    answers: list[Answer] = field(default_factory=list)


@dataclass
class Setting:
    """What all methods of a run share.

    Args:
        certify: judge differences from plain decoding in a finer dtype, on a copy of the target made for it.
        compile: our decoders, plain decoding among them, run compiled forwards.
    """

    target: Target
    new_tokens: int = 64
    forward: Any = "auto"
    certify: bool = False
    compile: bool = False


def generate_method(setting: Setting, name: str = GENERATE, **arguments: Any) -> Method:
    """transformers' own generate(), greedy, with more arguments of it under another name."""

    def run(ids: Tensor) -> Answer:
        start = time.perf_counter()
        out = setting.target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=setting.new_tokens,
            do_sample=False,
            **arguments,
        )
        return Answer(time.perf_counter() - start, out[0, ids.shape[1] :].tolist())

    return Method(name, "-", run)


def decoder_method(
    setting: Setting, name: str, drafter: Drafter | None, tree: str | TreeBuilder, measure: bool = True
) -> Method:
    """Our decoder with a drafter and a tree, or without (the plain loop)."""
    decoder = SpeculativeDecoder(setting.target, drafter, tree=tree, forward=setting.forward, compile=setting.compile)

    def run(ids: Tensor) -> Answer:
        start = time.perf_counter()
        out = decoder.generate(ids, max_new_tokens=setting.new_tokens, do_sample=False)
        return Answer(time.perf_counter() - start, out.sequences[0, ids.shape[1] :].tolist(), out.stats)

    costs: Callable[[], RoundCosts] | None = None
    if drafter is not None and isinstance(decoder.builder, CalibratedTree):
        costs = decoder.builder.round_costs
    elif drafter is not None and measure:
        measured = round_costs(setting.target, drafter, decoder.builder, decoder.driver)
        costs = lambda: measured  # noqa: E731
    return Method(name, tree if isinstance(tree, str) and drafter else decoder.tree_name, run, costs)


def run_benchmark(
    setting: Setting,
    methods: Sequence[Method],
    questions: Sequence[Question],
    progress: Callable[[Question], None] = lambda question: None,
) -> dict[str, Any]:
    """Ask every method every question, the methods taking turns, after one question to warm up.

    Args: methods: the first two are the baselines `generate` and `plain`.
    Returns: what `--json` writes.
    Raises: ValueError without questions.
    """
    if not questions:
        raise ValueError("there is no question to ask; give a file with at least one")
    for method in methods:
        method.run(questions[0].input_ids)
    for index, question in enumerate(questions):
        progress(question)
        # Another method begins each time, so that none always follows the same neighbour.
        for method in (*methods[index % len(methods) :], *methods[: index % len(methods)]):
            method.answers.append(method.run(question.input_ids))
    by_name = {method.name: method for method in methods}
    finer = Finer(setting.target) if setting.certify else None
    return {
        "machine": machine(setting),
        "questions": len(questions),
        "new_tokens": setting.new_tokens,
        "methods": [summary(setting, m, by_name[GENERATE], by_name[PLAIN], questions, finer) for m in methods],
    }


def summary(
    setting: Setting,
    method: Method,
    generate: Method,
    plain: Method,
    questions: Sequence[Question],
    finer: Finer | None = None,
) -> dict[str, Any]:
    """One method's figures over all questions."""
    stats = merged(method.answers)
    tau = stats.acceptance_length if stats else None
    costs = method.costs() if method.costs else None
    return {
        "name": method.name,
        "tree": method.tree,
        "seconds": round(sum(a.seconds for a in method.answers), 3),
        "tokens": sum(len(a.tokens) for a in method.answers),
        "tokens_per_second": round(1 / seconds_per_token(method.answers), 2),
        "tau": None if tau is None else round(tau, 3),
        "accepted": stats.accepted if stats else None,
        "verify_forwards": stats.forwards if stats else None,
        "ratio_generate": ratio(generate.answers, method.answers),
        "ratio_plain": ratio(plain.answers, method.answers),
        "median_ratio_generate": median_ratio(generate.answers, method.answers),
        "median_ratio_plain": median_ratio(plain.answers, method.answers),
        "predicted_ratio": None if costs is None else round(costs.predicted_ratio(tau or 1), 3),
        "round_ms": None if costs is None else {k: round(1e3 * v, 2) for k, v in vars(costs).items()},
        "identical": sum(a.tokens == b.tokens for a, b in zip(method.answers, plain.answers)),
        "differences": differences(setting, method, plain, questions, finer),
        "round_parts": None if stats is None else round_parts(stats),
        "by_category": by_category(method, plain, questions),
        "by_depth": [] if not stats else conditional(stats),
    }


def ratio(baseline: Sequence[Answer], answers: Sequence[Answer]) -> float:
    """How many times less a token costs than in the baseline."""
    return round(seconds_per_token(baseline) / seconds_per_token(answers), 3)


def median_ratio(baseline: Sequence[Answer], answers: Sequence[Answer]) -> float:
    """The same question by question, and the median of it: one slow moment of the machine does not count."""
    pairs = [seconds_per_token([b]) / seconds_per_token([a]) for b, a in zip(baseline, answers)]
    return round(statistics.median(pairs), 3)


def seconds_per_token(answers: Sequence[Answer]) -> float:
    return sum(a.seconds for a in answers) / max(sum(len(a.tokens) for a in answers), 1)


def merged(answers: Sequence[Answer]) -> DecodeStats | None:
    found = [a.stats for a in answers if a.stats is not None]
    if not found:
        return None
    total = DecodeStats(found[0].tree, 0, found[0].depth)
    for stats in found:
        total.merge(stats)
    return total


def conditional(stats: DecodeStats) -> list[float]:
    """By level: how often a draft token was accepted where the one above it was."""
    before = [stats.row_forwards, *stats.accepted_at[:-1]]
    return [round(now / last, 3) if last else 0.0 for now, last in zip(stats.accepted_at, before)]


def round_parts(stats: DecodeStats) -> dict[str, dict[str, float]] | None:
    """Milliseconds of a round by part, and their shares; None where no round was timed."""
    parts = [part for part in PARTS if part != "prefill"]
    total = sum(stats.seconds[part] for part in parts)
    if not stats.forwards or not total:
        return None
    return {
        part: {"ms": round(1e3 * seconds / stats.forwards, 3), "share": round(seconds / total, 4)}
        for part, seconds in ((part, stats.seconds[part]) for part in parts)
    }


def by_category(method: Method, plain: Method, questions: Sequence[Question]) -> dict[str, dict[str, float | None]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for index, question in enumerate(questions):
        groups[question.category].append(index)
    result = {}
    for name, indices in groups.items():
        answers = [method.answers[i] for i in indices]
        stats = merged(answers)
        result[name] = {
            "questions": len(indices),
            "ratio_plain": ratio([plain.answers[i] for i in indices], answers),
            "tau": round(stats.acceptance_length, 3) if stats and stats.row_forwards else None,
        }
    return result


def differences(
    setting: Setting, method: Method, plain: Method, questions: Sequence[Question], finer: Finer | None = None
) -> list[dict[str, Any]]:
    """Where a method's text leaves plain decoding, and how far apart the target's logits of the two tokens are there.

    Args: finer: measures the margin in a finer dtype and says whether it is a tie; without it, which takes no further
        memory, the margin is in the target's own dtype. The margin is None where one text had ended.
    """
    found = []
    for row, (question, ours, theirs) in enumerate(zip(questions, method.answers, plain.answers)):
        if ours.tokens == theirs.tokens:
            continue
        place = first_difference(ours.tokens, theirs.tokens)
        entry: dict[str, Any] = {"id": question.id, "token": place}
        if finer is not None:
            entry |= _judged(finer.difference(row, place, question.input_ids[0], ours.tokens, theirs.tokens))
        elif place == min(len(ours.tokens), len(theirs.tokens)):
            entry |= {"logit_margin": None}
        else:
            entry |= {"logit_margin": _margin(setting.target, question.input_ids, theirs.tokens, ours.tokens, place)}
        found.append(entry)
    return found


def _judged(difference: Difference) -> dict[str, Any]:
    ended = difference.plain is None or difference.found is None
    return {
        "logit_margin": None if ended else round(difference.margin, 6),
        "tie_bound": None if ended else round(difference.bound, 6),
        "tie": difference.is_tie,
    }


@torch.inference_mode()
def _margin(target: Target, prompt: Tensor, plain: list[int], found: list[int], place: int) -> float:
    prefix = torch.tensor([plain[:place]], dtype=torch.long, device=prompt.device)
    logits = target.model(input_ids=torch.cat((prompt, prefix), 1), use_cache=False).logits[0, -1].float()
    return round(float(logits[plain[place]] - logits[found[place]]), 4)


def check_certified(result: dict[str, Any]) -> None:
    """Look through the figures of a run with `certify`.

    Raises: CertificationError naming every first difference from plain decoding that is not a tie.
    """
    wrong = [
        f"{method['name']} ({method['tree']}), question {one['id']}, new token {one['token']}: {_apart(one)}"
        for method in result["methods"]
        for one in method["differences"]
        if not one["tie"]
    ]
    if wrong:
        raise CertificationError("not plain decoding's answers: " + "; ".join(wrong))


def _apart(one: dict[str, Any]) -> str:
    if one["logit_margin"] is None:
        return "one of the two texts ends there"
    return f"the logits are {one['logit_margin']:.4g} apart, a tie is at most {one['tie_bound']:.4g}"


def machine(setting: Setting) -> dict[str, Any]:
    """What the figures were measured with."""
    from .engine import choose_forward

    forward = choose_forward(setting.target, setting.forward)
    return {
        "device": str(setting.target.device),
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "dtype": str(setting.target.dtype).removeprefix("torch."),
        "target": setting.target.name,
        "forward": f"{forward.name}, compiled" if setting.compile else forward.name,
        "commit": _commit(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("headsmith", "torch", "transformers")},
    }


def _commit() -> str | None:
    """The checkout's commit, None for an installed package."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
