"""Load a target's model and tokenizer from wherever they are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from .embedded import EMBEDDED, embedded_target


def resolve(name_or_path: str) -> str:
    """Turn an embedded target's alias into its folder; check that what looks like a local path is one.

    Raises: FileNotFoundError for a local path that is not there.
    """
    name = str(name_or_path)
    if name in EMBEDDED:
        return str(embedded_target(name))
    looks_local = name.startswith((".", "~", os.sep)) or name.count("/") > 1
    path = Path(name).expanduser()
    if looks_local and not path.is_dir():
        raise FileNotFoundError(
            f"the target {name!r} is not a folder; give a local model folder, a hub name like 'org/model', "
            f"or an embedded target: {', '.join(EMBEDDED)}"
        )
    return str(path) if path.is_dir() else name


def load_tokenizer(name_or_path: str, trust_remote_code: bool = False) -> Any:
    """The target's tokenizer (of a peft adapter: its own if it has one, else its base model's)."""
    from transformers import AutoTokenizer

    path = resolve(name_or_path)
    if _is_adapter(path) and not (Path(path) / "tokenizer_config.json").is_file():
        path = _adapter_base(path)
    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def load_model(
    name_or_path: str,
    dtype: str | torch.dtype = "auto",
    device_map: Any = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """The target's model; a peft adapter is merged into its base."""
    from transformers import AutoModelForCausalLM

    path = resolve(name_or_path)
    options = {
        "dtype": dtype,
        "device_map": device_map,
        "attn_implementation": attn_implementation,
        "trust_remote_code": trust_remote_code,
    }
    options = {key: value for key, value in options.items() if value is not None}
    if not _is_adapter(path):
        return AutoModelForCausalLM.from_pretrained(path, **options)
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(_adapter_base(path), **options)
    merged = PeftModel.from_pretrained(base, path).merge_and_unload()
    merged.name_or_path = path
    return merged


def _is_adapter(path: str) -> bool:
    return (Path(path) / "adapter_config.json").is_file()


def _adapter_base(path: str) -> str:
    from peft import PeftConfig

    base = PeftConfig.from_pretrained(path).base_model_name_or_path
    if not base:
        raise ValueError(f"{path}/adapter_config.json names no base_model_name_or_path; add it, or merge the adapter")
    return resolve(base)
