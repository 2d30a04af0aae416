"""What a run reports: window means to the console, to log.jsonl and to a tracker.

J draft levels, K ranks counted.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from headsmith.heads.drafter import HeadLoss
from headsmith.training.recipe import Recipe, RecipeError
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from torch import Tensor

_LOSS, _COUNT, _JOINT, _BEFORE, _HITS = range(5)  # columns of the sums; hits among the best 1..K follow


class NonFiniteLossError(RuntimeError):
    """Loss or gradient became infinite or not a number; checkpoints from before are as they were."""


class Window:
    """Sums over every micro-batch, step and rank since the last log line: a single micro-batch says little.

    Args:
        sums: [J, 4 + K] of each level: loss, positions, how often all levels up to it were right, how often
            all before it were (every position, for the first), hits; None before the first micro-batch.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.sums: Tensor | None = None

    @torch.no_grad()
    def add(self, loss: HeadLoss) -> None:
        """Take in one micro-batch; later ones may have more levels."""
        columns = [loss.loss, loss.count, loss.joint, torch.cat((loss.count[:1], loss.joint[:-1]))]
        sums = torch.cat((torch.stack([column.float() for column in columns], 1), loss.hits.float()), 1)
        if self.sums is None:
            self.sums = sums
            return
        if missing := len(sums) - len(self.sums):
            small = self.sums if missing > 0 else sums
            padding = small.new_zeros(abs(missing), small.shape[1])
            grown = torch.cat((small, padding))
            self.sums, sums = (grown, sums) if missing > 0 else (self.sums, grown)
        self.sums = self.sums + sums

    def collect(self) -> None:
        """Move all ranks' sums to the main process.

        Raises: NonFiniteLossError on every rank.
        """
        if self.sums is None:
            return
        total = self.accelerator.reduce(self.sums, reduction="sum")
        if not bool(torch.isfinite(total).all()):
            raise NonFiniteLossError(
                f"the losses of the levels add up to {total[:, _LOSS].tolist()}, expected finite numbers; "
                "lower train.lr, or set train.mixed_precision=null or dtype=float32"
            )
        self._keep_on_main(total)

    def _keep_on_main(self, sums: Tensor) -> None:
        self.sums = sums if self.accelerator.is_main_process else torch.zeros_like(sums)

    def means(self) -> dict[str, Any]:
        """Loss and teacher-forced accuracy of each level, and what they promise for a chain.

        `conditional_acceptance` of a level is the share of right ones where all levels before it were right;
        `projected_chain_tau` is the acceptance length of a chain if decoding met the same positions. Neither
        is measured by decoding: evaluate.decoded does that.
        """
        if self.sums is None:
            return {}
        sums = self.sums.cpu()
        count = sums[:, _COUNT].clamp(min=1)
        conditional = sums[:, _JOINT] / sums[:, _BEFORE].clamp(min=1)
        return {
            "loss": _rounded(sums[:, _LOSS] / count),
            "teacher_forced_top1": _rounded(sums[:, _HITS] / count),
            "conditional_acceptance": _rounded(conditional),
            "projected_chain_tau": round(1 + float(conditional.cumprod(0).sum()), 4),
        }

    def top_k(self) -> list[list[float]]:
        """[J][K] share of positions where the target's token was among the drafter's best 1..K."""
        if self.sums is None:
            return []
        sums = self.sums.cpu()
        return [_rounded(row[_HITS:] / row[_COUNT].clamp(min=1)) for row in sums]

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (sums := state["sums"]) is not None:
            self._keep_on_main(sums.to(self.accelerator.device))


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 5) for value in values.tolist()]


class Tracker:
    """Writes window means to the console, to `log.jsonl` and to the tracker that the recipe names.

    Args:
        resumed_at: step that the run goes on from; later lines of the log belong to steps that are run again.
    """

    def __init__(self, accelerator: Accelerator, recipe: Recipe, resumed_at: int = 0) -> None:
        self.accelerator = accelerator
        self.log_path = Path(recipe.output_dir) / "log.jsonl"
        self.external = recipe.train.tracker != "none"
        self.main = accelerator.is_main_process
        self.console = Console(quiet=not self.main, highlight=False)
        self.progress: Progress | None = None
        self._mark = (time.monotonic(), 0)
        if self.main:
            self._keep_lines_until(resumed_at)
        if self.main and sys.stdout.isatty():
            text = TextColumn("{task.description}", table_column=Column(ratio=1))  # wraps
            self.progress = Progress(BarColumn(20), text, console=self.console, expand=True)
            self.task = self.progress.add_task("starting", total=1.0)
            self.progress.start()

    def say(self, text: str) -> None:
        """Print a line, from the main process only."""
        self.console.print(text, markup=False, soft_wrap=True)

    def start_window(self, tokens: int) -> None:
        """Speed is measured from here on, at `tokens` tokens seen."""
        self._mark = (time.monotonic(), tokens)

    def log(self, window: Window, place: dict[str, Any], tokens: int) -> None:
        """Report a window whose sums have been collected, and begin the next one.

        Args:
            place: step, epoch, progress, lr and seconds.
            tokens: seen so far.
        """
        now = time.monotonic()
        then, before = self._mark
        speed = (tokens - before) / max(now - then, 1e-9)
        self._mark = (now, tokens)
        values = {**place, **window.means(), "tokens_per_s": round(speed, 1)}
        self.write(values)
        self._show(values)

    def held_out(self, step: int, values: dict[str, Any]) -> None:
        """Report teacher-forced figures on held-out text."""
        self.write({"step": step, "held_out": values})
        if values:
            self.say(f"step {step}, held out: teacher-forced top-1 {_levels(values)}")

    def write(self, values: dict[str, Any]) -> None:
        """One line of log.jsonl; lists become one series a level in the tracker."""
        if self.main:
            with self.log_path.open("a", encoding="utf-8") as log:
                log.write(json.dumps(values) + "\n")
        if self.external:
            self.accelerator.log(dict(_series(values)), step=values["step"])

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()

    def _show(self, values: dict[str, Any]) -> None:
        done = values["progress"]
        left = values["seconds"] * (1 - done) / done if done else float("inf")
        text = (
            f"step {values['step']} ({done:.1%}) loss {sum(values['loss']) / len(values['loss']):.3f} "
            f"teacher-forced top-1 {_levels(values)} lr {values['lr']:.1e} "
            f"{values['tokens_per_s']:,.0f} tokens/s {_clock(left)} left"
        )
        if self.progress is not None:
            self.progress.update(self.task, completed=done, description=text)
        else:
            self.say(text)

    def _keep_lines_until(self, step: int) -> None:
        """Drop lines of later steps, and one that was cut off when the run was killed."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if step and self.log_path.exists():
            for line in self.log_path.read_text(encoding="utf-8").splitlines():
                try:
                    kept += [line] if json.loads(line)["step"] <= step else []
                except ValueError:
                    continue
        self.log_path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def _levels(values: dict[str, Any]) -> str:
    return " ".join(f"{top:.3f}".lstrip("0") for top in values["teacher_forced_top1"])


def _clock(seconds: float) -> str:
    if seconds == float("inf"):
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _series(values: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """{held_out: {loss: [2, 3]}} -> held_out/loss/0: 2, held_out/loss/1: 3."""
    if isinstance(values, dict | list):
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from _series(value, f"{name}/{key}" if name else str(key))
    elif name != "step":
        yield name, values


def check_tracker(name: str) -> None:
    """Refuse a tracker whose package is not installed. Raises: RecipeError."""
    if name != "none" and importlib.util.find_spec(name) is None:
        raise RecipeError(
            f"train.tracker is {name}, but the package {name} is not installed; "
            f"pip install 'headsmith[{name}]', or set train.tracker=none"
        )
