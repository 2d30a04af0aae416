"""The training loop: one optimizer step after the other until the run's time, steps or epochs are used up."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from headsmith.heads.drafter import Teacher
from headsmith.training.ema import EMA
from headsmith.training.features import Batches, FeatureSource, Step
from headsmith.training.recipe import Recipe, TrainSection
from headsmith.training.state import Checkpoints, TrainState
from headsmith.training.tracking import NonFiniteLossError, Tracker, Window
from torch import Tensor


class Interrupted(RuntimeError):
    """The run was asked to stop, and has saved a checkpoint."""


@dataclass
class Run:
    """All that the loop works on; drafter and optimizers are Accelerate's, the teacher is not."""

    recipe: Recipe
    accelerator: Accelerator
    drafter: Any
    optimizers: list[torch.optim.Optimizer]
    teacher: Teacher
    batches: Batches
    features: FeatureSource
    ema: EMA
    checkpoints: Checkpoints
    tracker: Tracker
    evaluate: Callable[[], dict[str, Any]]
    state: TrainState
    window: Window


def fit(run: Run) -> None:
    """Train until the run is over.

    Raises: NonFiniteLossError; Interrupted after SIGINT or SIGTERM; CheckpointError if one cannot be saved.
    """
    train, state, accelerator = run.recipe.train, run.state, run.accelerator
    with stop_requests() as stop:
        clock = Clock(accelerator, state.seconds, stop)
        run.tracker.start_window(state.tokens)
        for step, progress in remaining(run, clock):
            set_learning_rate(run.optimizers, train, state.step, progress)
            unrolled = train.unroll_steps(progress)
            # DDP averages over ranks, Accelerate over micro-batches: both are undone.
            scale = accelerator.num_processes * train.accumulation
            for batch in step.batches:
                with accelerator.accumulate(run.drafter):
                    loss = run.drafter(run.features(batch), run.teacher, unrolled)
                    accelerator.backward(loss.total(max(step.supervised, 1)) * scale)
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(run.drafter.parameters(), train.clip or math.inf)
                        check_finite(norm, accelerator, state.step)
                    for optimizer in run.optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
                    run.window.add(loss)
            run.ema.update()
            advance(state, step, clock)
            after_step(run, clock)
    if run.window.sums is not None:
        log_window(run)


def remaining(run: Run, clock: Clock) -> Iterator[tuple[Step, float]]:
    """Steps from the run's place in the data on, each with the run's progress, until that is 1."""
    state = run.state
    while True:
        for step in run.batches.steps(state.epoch, state.index):
            if (progress := run_progress(run.recipe.train, state, clock.seconds)) >= 1:
                return
            yield step, progress
        state.epoch, state.index, state.share = state.epoch + 1, 0, 0.0


def run_progress(train: TrainSection, state: TrainState, seconds: float) -> float:
    """Share of the run that is done: by whichever of its limits is nearest."""
    shares = [
        seconds / (60 * train.minutes) if train.minutes is not None else 0.0,
        state.step / train.max_steps if train.max_steps is not None else 0.0,
        (state.epoch + state.share) / train.epochs if train.epochs is not None else 0.0,
    ]
    return max(shares)


def rate_factor(train: TrainSection, step: int, progress: float) -> float:
    """Share of its peak that a learning rate has: linear warm-up from a tenth, then the schedule.

    A pure function of the run's place.
    """
    if train.warmup_steps is not None:
        warm = step / train.warmup_steps if train.warmup_steps else 1.0
    else:
        warm = progress / train.warmup_fraction if train.warmup_fraction else 1.0
    left = {
        "cosine": (1 + math.cos(math.pi * min(progress, 1.0))) / 2,
        "linear": 1 - min(progress, 1.0),
        "constant": 1.0,
    }[train.schedule]
    decayed = train.min_lr_fraction + (1 - train.min_lr_fraction) * left
    return (0.1 + 0.9 * min(warm, 1.0)) * decayed


def set_learning_rate(optimizers: list[torch.optim.Optimizer], train: TrainSection, step: int, progress: float) -> None:
    factor = rate_factor(train, step, progress)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor


def check_finite(norm: Tensor | None, accelerator: Accelerator, step: int) -> None:
    """Refuse a bad gradient before it reaches the weights. Gradients are the same on all ranks, so all stop.

    Under fp16 the gradient scaler skips such steps, and needs some of them to find its scale; a loss that
    stays bad is found by the window.
    """
    if norm is None or accelerator.scaler is not None or bool(torch.isfinite(norm)):
        return
    raise NonFiniteLossError(
        f"the gradient's norm is {float(norm)} at step {step}, expected a finite number; lower train.lr, "
        "set train.mixed_precision=null or dtype=float32. Earlier checkpoints are unchanged"
    )


def advance(state: TrainState, step: Step, clock: Clock) -> None:
    """Move the run's place behind the step."""
    state.step += 1
    state.epoch, state.index, state.share = step.epoch, step.index + 1, step.share
    state.tokens += step.tokens
    state.seconds = clock.tick()


def after_step(run: Run, clock: Clock) -> None:
    """Log, evaluate, save, and stop if asked to."""
    train, state = run.recipe.train, run.state
    if state.step % train.log_every == 0:
        log_window(run)
    if train.eval_every and state.step % train.eval_every == 0:
        run.tracker.held_out(state.step, run.evaluate())
    if clock.stop_requested or clock.save_is_due(train, state.step):
        folder = save(run)
        clock.saved()
        if clock.stop_requested:
            raise Interrupted(f"stopped at step {state.step}; go on with resume=true from {folder}")


def save(run: Run) -> Path:
    """Write a checkpoint of the run as it is."""
    run.window.collect()
    return run.checkpoints.save(run.state.step)


def log_window(run: Run) -> None:
    """Report the window's means and begin another."""
    state = run.state
    run.window.collect()
    place = {
        "step": state.step,
        "epoch": round(state.epoch + state.share, 4),
        "progress": round(min(run_progress(run.recipe.train, state, state.seconds), 1.0), 6),
        "lr": run.optimizers[0].param_groups[0]["lr"],
        "seconds": round(state.seconds, 2),
    }
    run.tracker.log(run.window, place, state.tokens)
    run.window.sums = None


class Clock:
    """Training time and stop requests, the same on every rank: the main process's time, anyone's request."""

    def __init__(self, accelerator: Accelerator, seconds: float, stop: threading.Event) -> None:
        self.accelerator = accelerator
        self.seconds = seconds
        self.stop_requested = False
        self._stop = stop
        self._start = time.monotonic() - seconds
        self._saved = seconds

    def tick(self) -> float:
        """Read the time and requests, all ranks together."""
        self.seconds, self.stop_requested = time.monotonic() - self._start, self._stop.is_set()
        if self.accelerator.num_processes > 1:
            mine = torch.tensor([[self.seconds, float(self.stop_requested)]], device=self.accelerator.device)
            everyone = self.accelerator.gather(mine)
            self.seconds, self.stop_requested = float(everyone[0, 0]), bool(everyone[:, 1].any())
        return self.seconds

    def save_is_due(self, train: TrainSection, step: int) -> bool:
        if train.save_every is not None:
            return step % train.save_every == 0
        return train.save_minutes is not None and self.seconds - self._saved >= 60 * train.save_minutes

    def saved(self) -> None:
        self._saved = self.seconds


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """SIGINT and SIGTERM set the yielded event, so that a step is finished and saved.

    A second one stops at once.
    """
    stop = threading.Event()

    def request(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop  # signals belong to the main thread
        return
    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
