"""Checkpoints of a run: whole or not there, the newest few, and a resume that goes on exactly."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from headsmith.heads.checkpoint import CheckpointError, whole_folder
from headsmith.training.conversations import Sample
from headsmith.training.recipe import Recipe, save_recipe

_NAME = re.compile(r"step-(\d{6,})")


@dataclass
class TrainState:
    """How far a run has come.

    Args:
        step: optimizer steps taken.
        epoch, index: place in the data: epoch, and steps taken in it.
        share: of the current epoch that is done.
        seconds: training time of all sittings.
        tokens: tokens of text seen, over all ranks.
    """

    step: int = 0
    epoch: int = 0
    index: int = 0
    share: float = 0.0
    seconds: float = 0.0
    tokens: int = 0

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for entry in fields(self):
            setattr(self, entry.name, state[entry.name])


def data_fingerprint(samples: Sequence[Sample]) -> str:
    """16 hex digits over every token and mask in order: text, tokenizer, template and truncation count."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(np.int64(len(sample)).tobytes())
        digest.update(sample.input_ids.tobytes())
        digest.update(sample.loss_mask.tobytes())
    return digest.hexdigest()[:16]


def run_identity(recipe: Recipe, target: str, data: str, processes: int) -> dict[str, Any]:
    """What has to be the same for a resume to go on with the same run.

    Args:
        target, data: fingerprints.
    """
    return {
        "target": target,
        "data": data,
        "drafter.method": recipe.drafter.method,
        "drafter.options": recipe.drafter.options,
        "seed": recipe.seed,
        "train.optimizer": recipe.train.optimizer,
        "train.batch_tokens": recipe.train.batch_tokens,
        "train.accumulation": recipe.train.accumulation,
        "train.ema": recipe.train.ema,
        "processes": processes,
    }


class Checkpoints:
    """The folder `OUTPUT_DIR/checkpoints`, with a folder `step-000123` for each checkpoint.

    What goes in is what Accelerate has prepared (drafter, optimizer, random states) or was given to
    `register_for_checkpointing`; the frozen target is neither.

    Args:
        size: bytes of a checkpoint, roughly.
    """

    def __init__(self, accelerator: Accelerator, recipe: Recipe, identity: dict[str, Any], size: int = 0) -> None:
        self.accelerator = accelerator
        self.size = size
        self.recipe = recipe
        self.identity = identity
        self.root = Path(recipe.output_dir) / "checkpoints"

    def newest(self) -> Path | None:
        """The checkpoint of the highest step; half-written ones have other names."""
        found = self._all()
        return found[-1] if found else None

    def _all(self) -> list[Path]:
        names = [(match, path) for path in self.root.glob("step-*") if (match := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(names, key=lambda entry: int(entry[0][1]))]

    def save(self, step: int) -> Path:
        """Write a checkpoint, all ranks together, and drop all but the newest few.

        Raises: CheckpointError on every rank if it cannot be written; the earlier ones are untouched.
        """
        folder = self.root / f"step-{step:06d}"
        if folder.is_dir():
            return folder
        with self._agreed(folder), ExitStack() as stack:
            scratch = self._scratch(stack, folder)
            with self._agreed(folder):
                self.accelerator.save_state(str(scratch))
                if self.accelerator.is_main_process:
                    save_recipe(self.recipe, scratch / "recipe.yaml")
                    (scratch / "identity.json").write_text(json.dumps(self.identity, indent=2) + "\n")
        if self.accelerator.is_main_process:
            for old in self._all()[: -self.recipe.train.keep]:
                shutil.rmtree(old, ignore_errors=True)
        return folder

    def _scratch(self, stack: ExitStack, folder: Path) -> Path:
        """A folder that all ranks write to; it becomes `folder` when the stack is left without an error."""
        path = [""]
        with self._agreed(folder):
            if self.accelerator.is_main_process:
                self.root.mkdir(parents=True, exist_ok=True)
                if shutil.disk_usage(self.root).free < self.size:
                    raise OSError(errno.ENOSPC, "too little space")  # before any of it is used up
                path[0] = str(stack.enter_context(whole_folder(folder)))
        broadcast_object_list(path)
        return Path(path[0])

    @contextmanager
    def _agreed(self, folder: Path) -> Iterator[None]:
        """What fails on one rank within the block fails on all: the others would wait for it for ever."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        failures = [text for text in gather_object([self._described(failure, folder)]) if text]
        if failures:
            raise CheckpointError(failures[0]) from failure

    def _described(self, error: Exception | None, folder: Path) -> str:
        """What to tell the user about a failed save, "" if it did not fail; a full disk has many names."""
        if error is None or isinstance(error, CheckpointError):
            return str(error or "")
        free = shutil.disk_usage(self.root).free
        words = "No space left" in str(error) or free < 1 << 20
        problem = f"{type(error).__name__}: {error}"
        if getattr(error, "errno", None) == errno.ENOSPC or words:
            problem = f"the disk is full ({self.size:,} bytes needed, {free:,} free)"
        return f"cannot save {folder}: {problem}; free some space, then resume=true: earlier ones are unchanged"

    def restore(self, folder: Path) -> None:
        """Load a checkpoint into what is prepared and registered.

        Raises: CheckpointError if it belongs to another run, or cannot be read.
        """
        try:
            self._check_identity(json.loads((folder / "identity.json").read_text()), folder)
            self.accelerator.load_state(str(folder))
        except CheckpointError:
            raise
        except Exception as error:  # a damaged file shows itself in as many ways as there are formats
            raise CheckpointError(
                f"{folder} cannot be read: {error}; delete it to go on from the one before it"
            ) from error

    def _check_identity(self, saved: dict[str, Any], folder: Path) -> None:
        given = json.loads(json.dumps(self.identity))
        wrong = [
            f"{key} found {given[key]!r}, expected {saved.get(key)!r}" for key in given if given[key] != saved.get(key)
        ]
        if wrong:
            raise CheckpointError(
                f"{folder} was made by another run: {'; '.join(wrong)}; restore these, "
                "or start anew with another output_dir"
            )

    def prepare(self) -> Path | None:
        """The checkpoint to go on from, or None for a fresh start; leftovers of killed runs are removed.

        Raises: CheckpointError if there are checkpoints and the recipe does not say resume.
        """
        newest = self.newest()
        if newest is not None and not self.recipe.resume:
            raise CheckpointError(
                f"{self.root} holds checkpoints up to {newest.name}; "
                "set resume=true to go on from there, or choose another output_dir"
            )
        if self.accelerator.is_main_process:
            for leftover in self.root.glob(".step-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        return newest if self.recipe.resume else None
