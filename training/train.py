"""Train draft heads for a target.

    accelerate launch -m headsmith.training.train RECIPE [key=value ...]
    python -m headsmith.training.train RECIPE [key=value ...]

A finished run leaves in OUTPUT_DIR: heads/ (native format), evaluation.json, log.jsonl, checkpoints/.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, gather_object, set_seed
from headsmith.heads import Target, build_drafter, load_drafter
from headsmith.heads.checkpoint import CheckpointError
from headsmith.heads.drafter import Teacher
from headsmith.heads.target import FrozenTeacher
from headsmith.training.conversations import (
    ConversationError,
    Sample,
    hold_out,
    load_samples,
    template_fingerprint,
)
from headsmith.training.ema import EMA
from headsmith.training.evaluate import decoded, held_out_prompts, report, teacher_forced
from headsmith.training.features import (
    Batches,
    FeatureMemoryError,
    OnlineFeatures,
    make_features,
    sample_feature_bytes,
)
from headsmith.training.loop import Interrupted, Run, fit, save
from headsmith.training.memory import keep_freed_memory
from headsmith.training.optimizers import make_optimizers
from headsmith.training.recipe import Recipe, RecipeError, load_recipe
from headsmith.training.state import Checkpoints, TrainState, data_fingerprint, run_identity
from headsmith.training.tracking import NonFiniteLossError, Tracker, Window, check_tracker
from torch import Tensor, nn

INTERRUPTED = 130  # exit code of a process that ended on SIGINT


class LaunchError(RuntimeError):
    """The processes were not launched as they were meant to be."""


EXPECTED_ERRORS = (
    RecipeError,
    ConversationError,
    CheckpointError,
    FeatureMemoryError,
    NonFiniteLossError,
    LaunchError,
    FileNotFoundError,
)


def train(recipe: Recipe, target: Target | None = None) -> Path:
    """Train, evaluate and save the heads that a recipe describes.

    Args:
        target: the target, where it is loaded already; its tokenizer is needed.
    Returns: the folder of the heads.
    Raises: one of EXPECTED_ERRORS with what to do about it; Interrupted once a stopped run is saved.
    """
    if recipe.train.threads is not None:
        torch.set_num_threads(recipe.train.threads)
    accelerator = make_accelerator(recipe)
    try:
        check_launch(accelerator)
        set_seed(recipe.seed)
        target = target or load_target(recipe, accelerator)
        session = set_up(recipe, accelerator, target)
        try:
            fit(session.run)
        finally:
            session.run.tracker.close()
        save(session.run)
        return finish(session)
    finally:
        accelerator.end_training()  # destroys the process group, so it comes last
        AcceleratorState._reset_state(reset_partial_state=True)  # a later run may want another precision


def make_accelerator(recipe: Recipe) -> Accelerator:
    """Accelerate for this machine. Raises: RecipeError."""
    on_cpu = not torch.accelerator.is_available()
    precision = recipe.train.mixed_precision or "no"
    if on_cpu and precision == "fp16":
        raise RecipeError("train.mixed_precision is fp16, which needs a GPU; set it to bf16 or null")
    tracker = recipe.train.tracker
    check_tracker(tracker)
    return Accelerator(
        cpu=on_cpu,
        mixed_precision=precision,
        gradient_accumulation_steps=recipe.train.accumulation,
        log_with=None if tracker == "none" else tracker,
        project_dir=recipe.output_dir,
    )


def check_launch(accelerator: Accelerator) -> None:
    """Several launch options start other processes than were asked for, without a word.

    Raises: LaunchError.
    """
    # `accelerate launch --cpu` names a meeting point for several processes, and then starts only one.
    alone = {"ACCELERATE_USE_CPU", "MASTER_ADDR"} <= os.environ.keys()
    wanted = os.environ.get("WORLD_SIZE", "2 or more" if alone else "1")
    if str(accelerator.num_processes) != wanted:
        raise LaunchError(
            f"Accelerate runs {accelerator.num_processes} process(es), expected {wanted}; for several "
            "on CPU use a config file with distributed_type: MULTI_GPU and num_processes, not --cpu"
        )
    # What was asked for and what is in force may differ: on CPU, FSDP falls back to DDP.
    asked = [kind for kind in ("DEEPSPEED", "FSDP") if os.environ.get(f"ACCELERATE_USE_{kind}") == "true"]
    kind = accelerator.distributed_type
    if asked or kind not in (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
        raise LaunchError(
            f"the launch config asks for {asked[0] if asked else kind.value}, expected MULTI_GPU: heads are "
            "small, and each process trains a replica of them; for a large target set device_map=auto"
        )


def load_target(recipe: Recipe, accelerator: Accelerator) -> Target:
    """Load the frozen target onto this process's device. Raises: RecipeError, FileNotFoundError."""
    device_map: Any = recipe.device_map
    if device_map is None and accelerator.device.type != "cpu":
        device_map = {"": accelerator.device}
    try:
        return Target.from_pretrained(
            recipe.target,
            dtype=recipe.dtype,
            device_map=device_map,
            attn_implementation=recipe.attn_implementation,
            trust_remote_code=recipe.trust_remote_code,
        )
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # transformers' own message says what is missing
        raise RecipeError(f"the target {recipe.target!r} cannot be loaded: {error}") from error


@dataclass
class Data:
    """Conversations of a run.

    Args:
        train, held_out: samples.
        prompts: [T] held-out prompts to decode.
        summary: what became of the rows.
    """

    train: list[Sample]
    held_out: list[Sample]
    prompts: list[Tensor]
    summary: str


@dataclass
class Session:
    """A run, and what is needed to finish it: the drafter (unwrapped), the target, the data."""

    run: Run
    drafter: nn.Module
    target: Target
    data: Data


def load_data(recipe: Recipe, target: Target) -> Data:
    """Read, encode and split the conversations. Raises: ConversationError."""
    paths, tokenizer, section = recipe.train_paths, target.tokenizer, recipe.data
    if tokenizer is None:
        raise RecipeError(f"{target.name} has no tokenizer; pass Target(model, tokenizer), or save one beside it")
    samples, summary = load_samples(paths, tokenizer, section)
    if section.eval is None:
        samples, held_out = hold_out(samples, section)
    else:
        paths = [Path(section.eval)]
        held_out = first_rows(load_samples(paths, tokenizer, section)[0], section.eval_limit)
    answers = held_out
    if section.train_on == "all":  # where the answers begin is then not in the masks
        rows = {sample.row_id for sample in held_out}
        encoded, _ = load_samples(paths, tokenizer, replace(section, train_on="answers"))
        answers = [sample for sample in encoded if sample.row_id in rows]
    return Data(samples, held_out, held_out_prompts(answers, recipe.evaluate.prompts), str(summary))


def first_rows(samples: Sequence[Sample], limit: int | None) -> list[Sample]:
    """The samples of the first `limit` conversations."""
    chosen = set(list(dict.fromkeys(sample.row_id for sample in samples))[:limit])
    return [sample for sample in samples if sample.row_id in chosen]


def set_up(recipe: Recipe, accelerator: Accelerator, target: Target) -> Session:
    """Build all that the loop works on; go on from the newest checkpoint where the recipe says resume."""
    data = load_data(recipe, target)
    check_training_data(data)
    fingerprint = data_fingerprint(data.train)
    check_same_data(fingerprint)
    drafter = new_drafter(recipe, target).to(accelerator.device)
    ema = EMA(drafter, recipe.train.ema)
    wrapped, *optimizers = accelerator.prepare(drafter, *make_optimizers(drafter, recipe.train))
    state, window = TrainState(), Window(accelerator)
    accelerator.register_for_checkpointing(state, window, ema)
    identity = run_identity(recipe, target.fingerprint, fingerprint, accelerator.num_processes)
    checkpoints = Checkpoints(accelerator, recipe, identity, checkpoint_bytes(drafter))
    if newest := checkpoints.prepare():
        checkpoints.restore(newest)
    features = make_features(recipe.train.features, target, data.train, drafter.needs, local_processes(accelerator))
    tracker = Tracker(accelerator, recipe, state.step)
    tracker.say(data.summary)
    tracker.say(introduction(recipe, drafter, target, data, accelerator.num_processes))
    if recipe.resume:
        tracker.say(f"going on from {newest}" if newest else f"no checkpoint in {checkpoints.root}: starting anew")
    # Only now: the checkpoint's draft vocabulary counts, not one made for this call.
    teacher = FrozenTeacher(target, drafter.draft_ids)
    evaluate = evaluation(recipe, accelerator, drafter, target, data, ema, teacher)
    batches = make_batches(recipe, accelerator, data.train)
    if recipe.train.tracker != "none":
        accelerator.init_trackers("headsmith", config=flattened(asdict(recipe)))
    run = Run(
        recipe, accelerator, wrapped, optimizers, teacher, batches, features,
        ema, checkpoints, tracker, evaluate, state, window,
    )  # fmt: skip
    return Session(run, drafter, target, data)


def new_drafter(recipe: Recipe, target: Target) -> Any:
    """An untrained drafter with fp32 weights: small steps would be lost in bf16. Raises: RecipeError."""
    try:
        drafter = build_drafter(recipe.drafter.method, target, **recipe.drafter.options)
    except ValueError as error:
        raise RecipeError(f"drafter: {error}") from error
    if not isinstance(drafter, nn.Module):
        raise RecipeError(f"drafter.method is {recipe.drafter.method}, which has no weights and needs no training")
    for parameter in drafter.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return drafter


def introduction(recipe: Recipe, drafter: Any, target: Target, data: Data, processes: int) -> str:
    """What is about to be trained, and how much memory kept features will take."""
    size = sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)
    text = (
        f"training {size / 1e6:.1f} million parameters of {recipe.drafter.method} for {target.name} "
        f"on {len(data.train)} samples, {len(data.held_out)} held out, {processes} process(es)"
    )
    if recipe.train.features == "memory":
        text += f"\ntarget features will take {sample_feature_bytes(data.train, drafter.needs, target) / 1e9:.2f} GB"
        text += " of memory in each process"
    return text


def checkpoint_bytes(drafter: nn.Module) -> int:
    """Weights, two moments of Adam and the average, in fp32; the rest is small."""
    return 16 * sum(parameter.numel() for parameter in drafter.parameters())


def make_batches(recipe: Recipe, accelerator: Accelerator, samples: Sequence[Sample]) -> Batches:
    """This process's share of the samples."""
    return Batches(
        samples,
        recipe.train.batch_tokens,
        recipe.seed,
        accelerator.process_index,
        accelerator.num_processes,
        recipe.train.accumulation,
    )


def local_processes(accelerator: Accelerator) -> int:
    """Processes on this machine, each with memory of its own."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))


def check_training_data(data: Data) -> None:
    """Refuse a run without anything to learn. Raises: ConversationError."""
    if not any(sample.loss_mask[2:].any() for sample in data.train):
        raise ConversationError(
            f"{len(data.train)} samples are left to train on after {len(data.held_out)} were held out, "
            "expected one with a token to learn; give more conversations, or lower data.eval_fraction"
        )


def check_same_data(fingerprint: str) -> None:
    """All processes plan their batches for themselves, so they have to read the same. Raises: LaunchError."""
    found = sorted(set(gather_object([fingerprint])))
    if len(found) > 1:
        raise LaunchError(
            f"the processes read different training data (fingerprints {', '.join(found)}), "
            "expected the same; give each machine the same files"
        )


def evaluation(
    recipe: Recipe,
    accelerator: Accelerator,
    drafter: nn.Module,
    target: Target,
    data: Data,
    ema: EMA,
    teacher: Teacher,
) -> Callable[[], dict[str, Any]]:
    """A function that compares the averaged weights with the target on held-out text."""
    if not data.held_out:
        return dict
    batches = make_batches(recipe, accelerator, data.held_out)
    features = OnlineFeatures(target, data.held_out, cast(Any, drafter).needs)

    def evaluate() -> dict[str, Any]:
        with ema.applied():
            return teacher_forced(drafter, batches, features, teacher, accelerator)

    return evaluate


def finish(session: Session) -> Path:
    """Save the heads, evaluate them, and decode with what was saved. Returns the heads' folder."""
    run, recipe, target = session.run, session.run.recipe, session.target
    output = Path(recipe.output_dir)
    heads = output / "heads"
    if run.accelerator.is_main_process:
        with run.ema.applied():
            cast(Any, session.drafter).save_pretrained(heads)
        (heads / "training.json").write_text(json.dumps(training_record(session), indent=2) + "\n")
        run.tracker.say(f"heads saved to {heads}")
    forced = run.evaluate()
    if run.accelerator.is_main_process:
        drafter = load_drafter(heads, target)
        drafter.ranks = forced.get("top_k")  # for a tree `best`: evaluation.json is written after decoding
        real = decoded(
            target,
            drafter,
            session.data.prompts,
            recipe.evaluate.tree,
            recipe.evaluate.new_tokens,
        )
        report(output / "evaluation.json", run.tracker.console, forced, real)
    run.accelerator.wait_for_everyone()
    return heads


def training_record(session: Session) -> dict[str, Any]:
    """What the heads were trained from."""
    recipe, target, state = session.run.recipe, session.target, session.run.state
    return {
        "headsmith": version("headsmith"),
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "template_fingerprint": template_fingerprint(target.tokenizer, recipe.data.chat_template_kwargs),
        "data_fingerprint": session.run.checkpoints.identity["data"],
        "steps": state.step,
        "tokens": state.tokens,
        "seconds": round(state.seconds, 1),
        "recipe": asdict(recipe),
    }


def flattened(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{train: {lr: 1}} -> {"train.lr": 1}; trackers want numbers and strings."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, int | float | str) else str(value)
    return flat


def share_cores() -> None:
    """Give this process its share of the machine's cores; `train.threads` overrides it.

    Without this, `accelerate launch` leaves a CPU process one thread, without a word.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(max(1, available_cores() // processes))


def available_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, 2 for an error the user can mend, 130 if interrupted."""
    parser = argparse.ArgumentParser(prog="python -m headsmith.training.train", description="Train draft heads.")
    parser.add_argument("recipe", help="a YAML file, or the name of a packaged recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as in train.minutes=5 or seed=1")
    given = parser.parse_args(arguments)
    rank = int(os.environ.get("RANK", 0))
    who = f"[process {rank}] " if rank else ""
    keep_freed_memory()
    share_cores()
    try:
        train(load_recipe(given.recipe, given.overrides))
    except EXPECTED_ERRORS as error:
        print(f"{who}error: {error}", file=sys.stderr)
        return 2
    except (Interrupted, KeyboardInterrupt) as error:
        print(f"{who}interrupted: {error or 'set resume=true to go on'}", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
