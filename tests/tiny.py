"""Tiny random targets of several families, made in the process."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from headsmith.heads import Target
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 8},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "gpt2": {"n_positions": 512, "n_embd": 32, "n_layer": 4, "n_head": 4},
}
LEAN = ("llama", "mistral", "qwen2", "qwen3")


@cache
def tiny_target(family: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Target:
    """A random target; the same arguments give the same object."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**{**COMMON, **FAMILIES.get(family, {}), **changes})
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    model.generation_config.eos_token_id = config.eos_token_id
    model.generation_config.pad_token_id = 0
    return Target(model)


def random_prompts(batch: int, longest: int, vocab: int = 97, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded prompts of unequal lengths, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, vocab, (batch, longest), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        missing = row * max(1, longest // (batch + 1))
        ids[row, :missing] = 0
        mask[row, :missing] = 0
    return ids, mask


def greedy_reference(
    target: Target, ids: torch.Tensor, mask: torch.Tensor, new: int, **arguments: Any
) -> list[list[int]]:
    """Row by row `model.generate`, each without its padding: the law that every batch is held to."""
    answers = []
    for row in range(ids.shape[0]):
        prompt = ids[row][mask[row].bool()][None]
        out = target.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False, **arguments
        )
        answers.append(out[0, prompt.shape[1] :].tolist())
    return answers
