"""Native checkpoints: a folder of config.json and model.safetensors, written whole or not at all, read strictly."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .drafter import DRAFTERS, Needs
from .layers import pack_linears

FORMAT = "headsmith-1"


class CheckpointError(ValueError):
    """Heads that cannot be read, saved, or used with this target."""


class SavedDrafter(nn.Module):
    """A trained drafter: a module with a config dataclass, a draft vocabulary and a home on disk.

    `draft_ids` [V_d] belongs to the weights: it is saved with them and never made again.
    """

    config_class: ClassVar[type]
    method: ClassVar[str]
    captures: ClassVar[int] = 0  # C, layers of the target it reads beside the final feature
    needs: Needs
    draft_ids: Tensor | None
    build: ClassVar[Any]  # build(target, **options): an untrained drafter

    def __init__(self, config: Any, draft_ids: Tensor | None) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("draft_ids", draft_ids)
        self.trained_for: dict[str, Any] = {}
        # [J][K] of the training run's evaluation, None where there is no record: what the best fixed tree is made of.
        self.ranks: list[list[float]] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def save_pretrained(self, folder: str | Path, **notes: Any) -> None:
        """Write the drafter to `folder`, replacing what is there only once all is written.

        Args: notes: more entries for config.json (target, tokens trained on, …).
        Raises: CheckpointError if the disk is full.
        """
        config = {"format": FORMAT, "method": self.method, "config": asdict(self.config)}
        config |= {"target": self.trained_for} | notes
        tensors = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        with whole_folder(folder) as scratch:
            (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})


def build_drafter(method: str, target: Any, **options: Any) -> Any:
    """An untrained drafter for a target, its config by keyword.

    Raises: ValueError for an unknown method or option.
    """
    drafter_class = find_method(method)
    try:
        drafter = drafter_class.build(target, **options)
    except TypeError as error:
        config = getattr(drafter_class, "config_class", None)
        known = ", ".join(f.name for f in fields(config)) if config else "see its docstring"
        raise ValueError(f"{method}: {error}; its options are {known}") from None
    if isinstance(drafter, SavedDrafter):
        drafter.trained_for = describe_target(target)
    return drafter


def find_method(method: str) -> Any:
    """The class registered under this name."""
    if method not in DRAFTERS:
        raise ValueError(f"unknown drafter {method!r}; known are {', '.join(sorted(DRAFTERS))}")
    return DRAFTERS[method]


def describe_target(target: Any) -> dict[str, Any]:
    """What is noted of the target that heads belong to."""
    return {
        "name": target.name,
        "fingerprint": target.fingerprint,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_layers": target.num_layers,
    }


def load_drafter(folder: str | Path, target: Any, any_target: bool = False) -> Any:
    """Read saved heads and make them ready to decode with, in the target's dtype on its device.

    Args: any_target: accept heads of another target with the same sizes (a fine-tune of it, say).
    Raises: FileNotFoundError if there are none; CheckpointError if they are damaged or belong to another target.
    """
    drafter = read_drafter(folder)
    _check_target(Path(folder), drafter.trained_for, describe_target(target), any_target)
    drafter.to(target.device, target.dtype).eval().requires_grad_(False)
    pack_linears(drafter)
    return drafter


def read_drafter(folder: str | Path) -> Any:
    """Read saved heads as they are, fp32 on CPU, to train on or to export."""
    folder = heads_folder(Path(folder))
    try:
        saved = json.loads((folder / "config.json").read_text())
        drafter_class = find_method(saved["method"])
        config = drafter_class.config_class(**saved["config"])
        tensors = load_file(folder / "model.safetensors")
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is not complete: {error.filename} is missing") from None
    except Exception as error:
        raise CheckpointError(f"{folder} does not hold heads that can be read: {error}") from None
    drafter = drafter_class(config, tensors.get("draft_ids"))
    problems = list(_differences(drafter.state_dict(), tensors))
    if problems:
        raise CheckpointError(f"{folder}/model.safetensors does not fit its config.json: {'; '.join(problems)}")
    drafter.load_state_dict(tensors, strict=True)
    drafter.trained_for = saved.get("target", {})
    drafter.ranks = _recorded_ranks(folder)
    return drafter


def heads_folder(folder: Path) -> Path:
    """The folder that holds heads: the one given, or `heads/` in a training run's output folder."""
    for candidate in (folder, folder / "heads"):
        config = candidate / "config.json"
        if config.is_file() and "method" in json.loads(config.read_text() or "{}"):
            return candidate
    raise FileNotFoundError(
        f"no heads in {folder}: expected config.json and model.safetensors there, or in {folder / 'heads'}; "
        "name a training run's output folder or a saved heads folder"
    )


def _recorded_ranks(folder: Path) -> list[list[float]] | None:
    """`top_k` of the training run that these heads lie in; None for heads that were moved out, or not evaluated."""
    if folder.resolve().name != "heads":
        return None
    try:
        return json.loads((folder.resolve().parent / "evaluation.json").read_text())["teacher_forced"]["top_k"] or None
    except (OSError, ValueError, LookupError, TypeError):  # heads decode without it: only one tree needs the record
        return None


def _differences(expected: dict[str, Tensor], found: dict[str, Tensor]) -> Iterator[str]:
    for name in sorted(expected.keys() - found.keys()):
        yield f"{name} is missing"
    for name in sorted(found.keys() - expected.keys()):
        yield f"{name} is not expected"
    for name in sorted(expected.keys() & found.keys()):
        if expected[name].shape != found[name].shape:
            yield f"{name} is {tuple(found[name].shape)}, expected {tuple(expected[name].shape)}"


def _check_target(folder: Path, trained: dict[str, Any], given: dict[str, Any], any_target: bool) -> None:
    for key in ("hidden_size", "vocab_size", "num_layers"):
        if key in trained and trained[key] != given[key]:
            raise CheckpointError(
                f"the heads in {folder} are for a target with {key} {trained[key]}, {given['name']} has "
                f"{given[key]}; load {trained.get('name', 'the target they were trained for')}"
            )
    if not any_target and trained.get("fingerprint", given["fingerprint"]) != given["fingerprint"]:
        raise CheckpointError(
            f"the heads in {folder} were trained for {trained.get('name')} (weights {trained['fingerprint']}), "
            f"{given['name']} has other weights ({given['fingerprint']}); load that target, or pass any_target=True "
            "(--any-target) to use them all the same: no answer changes, fewer drafts are accepted"
        )


@contextmanager
def whole_folder(folder: str | Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of `folder` when the block ends well, and vanishes when it does not.

    Raises: CheckpointError if the disk is full; what was at `folder` is then still there.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        made = scratch / "new"
        made.mkdir()
        yield made
        for file in made.rglob("*"):
            if file.is_file():
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
        if folder.exists():
            os.replace(folder, scratch / "old")
        os.replace(made, folder)
    except Exception as error:
        # safetensors reports a full disk in words, not by errno.
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        if not full:
            raise
        free = shutil.disk_usage(folder.parent).free
        raise CheckpointError(
            f"cannot save {folder}: the disk is full ({free >> 20} MiB free); free some space or save elsewhere. "
            "What was saved there before is unchanged"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
