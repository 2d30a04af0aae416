"""Tiny targets as folders on disk, with a chat tokenizer: what sub-processes load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.tiny import COMMON, FAMILIES
from tests.tokenizers_for_tests import build_tokenizer


def chat_target_folder(folder: Path, family: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """Save a random model of a family and a byte-level chat tokenizer; returns the folder."""
    tokenizer = build_tokenizer()
    sizes = {
        **COMMON,
        **FAMILIES[family],
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
    }
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**{**sizes, "pad_token_id": tokenizer.pad_token_id, **changes})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
