"""A short name for exactly these weights, so that heads and answers say which target they belong to."""

from __future__ import annotations

import hashlib
import json
from typing import Any, cast

import torch
from torch import nn

SAMPLES = 64  # values looked at in each tensor: enough to tell fine-tunes apart, quick on large models


def fingerprint(model: nn.Module) -> str:
    """16 hex digits over the architecture and a sample of every weight, independent of dtype up to bf16 rounding."""
    config = cast(Any, model).config.to_dict()
    keep = {k: config.get(k) for k in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")}
    digest = hashlib.sha256(json.dumps(keep, sort_keys=True, default=str).encode())
    for name, value in model.state_dict().items():
        flat = value.detach().reshape(-1)
        step = max(1, flat.numel() // SAMPLES)
        picked = flat[::step][:SAMPLES].to("cpu", torch.bfloat16).view(torch.int16)
        digest.update(name.encode() + str(tuple(value.shape)).encode() + picked.numpy().tobytes())
    return digest.hexdigest()[:16]
