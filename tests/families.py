"""Tiny configurations of the causal-LM families that transformers offers, and the drive that each is known to get.

Windows and chunks are shorter than prompt and answer of the tests, so that they are really at work.
`initializer_range` is chosen so that answers vary: a model that repeats one token shows no error.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from headsmith.heads import Target
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.tiny import COMMON

HEAD = {"head_dim": 8}
WINDOW = HEAD | {"sliding_window": 8}
MIXED = WINDOW | {"layer_types": ["sliding_attention", "full_attention"] * 2}
FLAGGED = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LATENT = EXPERTS | {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
}
# Many index heads: with few, a whole row of their scores is often zero, and the choice among ties is anyone's.
INDEXED = LATENT | {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 4}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8, "chunk_size": 8}
DELTA = HEAD | {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SHARED = MIXED | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}

TREE: dict[str, dict[str, Any]] = {
    "afmoe": WINDOW | EXPERTS,
    "apertus": {"initializer_range": 0.1},
    "arcee": {},
    "aria_text": EXPERTS,
    "axk1": LATENT,
    "beam": WINDOW | EXPERTS,
    "biogpt": {},
    "bitnet": {},
    "bloom": {},
    "codegen": {"rotary_dim": 4},
    "cohere": {"logit_scale": 0.3},
    "cohere2": WINDOW,
    "cohere2_moe": WINDOW | EXPERTS,
    "ctrl": {"dff": 48, "initializer_range": 1.0},
    "cwm": WINDOW,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "diffllama": {},
    "doge": {},
    "dots1": MIXED | EXPERTS,
    "ernie4_5": HEAD,
    "ernie4_5_moe": EXPERTS,
    "exaone": HEAD,
    "exaone4": WINDOW,
    "exaone_moe": WINDOW | EXPERTS,
    "falcon": {"new_decoder_architecture": True},
    "falcon (ALiBi)": {"alibi": True},
    "flex_olmo": EXPERTS,
    "flint": WINDOW | EXPERTS,
    "gemma": HEAD,
    "gemma2": WINDOW | {"final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8, "initializer_range": 0.2},
    "gemma3_text": WINDOW | {"query_pre_attn_scalar": 8, "initializer_range": 0.1},
    "gemma3n_text": SHARED
    | {"laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4, "intermediate_size": [48] * 4},
    "gemma4_text": SHARED | EXPERTS | {"global_head_dim": 8, "initializer_range": 0.1},
    "gemma4_unified_text": WINDOW | EXPERTS | {"initializer_range": 0.1},
    "glm": HEAD,
    "glm4": HEAD,
    "glm4_moe": HEAD | EXPERTS,
    "glm4_moe_lite": LATENT,
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gpt_neox_japanese": {"initializer_range": 0.2},
    "gpt_oss": WINDOW | EXPERTS,
    "gptj": {"rotary_dim": 4},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "granite_swa": WINDOW,
    "granitemoe": EXPERTS,
    "granitemoe_swa": WINDOW | EXPERTS,
    "granitemoeshared": EXPERTS,
    "helium": HEAD,
    "hrm_text": EXPERTS,
    "hunyuan_v1_dense": HEAD,
    "hunyuan_v1_moe": HEAD | EXPERTS,
    "hy_v3": HEAD | EXPERTS,
    "hyperclovax": HEAD,
    "jais2": {},
    "jetmoe": EXPERTS | {"kv_channels": 8},
    "kolibri1": WINDOW | EXPERTS,
    "laguna": MIXED | EXPERTS,
    "llama": HEAD,
    "llama4_text": HEAD | EXPERTS | {"attention_chunk_size": 8, "initializer_range": 0.2},
    "longcat_flash": LATENT,
    "mellum": MIXED | EXPERTS,
    "mimo_v2_flash": WINDOW | EXPERTS,
    "minicpm3": LATENT | {"initializer_range": 0.6},
    "minimax_m2": HEAD | EXPERTS,
    "minimax_m3_vl_text": HEAD | EXPERTS,
    "ministral": WINDOW,
    "ministral3": HEAD,
    "mistral": WINDOW,
    "mixtral": WINDOW | EXPERTS,
    "modernbert-decoder": {"sliding_window": 8},
    "mpt": {"max_seq_len": 512},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "olmoe": EXPERTS,
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "persimmon": {},
    "phi": {},
    "phi3": {"sliding_window": 8},
    "phimoe": EXPERTS | {"sliding_window": 8},
    "qwen2": FLAGGED,
    "qwen2_moe": FLAGGED | EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3": HEAD | FLAGGED,
    "qwen3_moe": HEAD | FLAGGED | EXPERTS,
    "seed_oss": HEAD,
    "smollm3": FLAGGED | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "solar_open": EXPERTS,
    "stablelm": {},
    "starcoder2": {"sliding_window": 8, "initializer_range": 0.6},
    "vaultgemma": WINDOW | {"query_pre_attn_scalar": 8},
    "xglm": {"ffn_dim": 48, "initializer_range": 0.6},
    "youtu": LATENT,
}
PATHS: dict[str, dict[str, Any]] = {
    "axk2": INDEXED,
    "bamba": MAMBA2 | {"attn_layer_indices": [1, 3]},
    "deepseek_v32": INDEXED,
    "falcon_h1": MAMBA2 | {"mamba_d_ssm": 32, "mamba_n_heads": 4},
    "glm_moe_dsa": INDEXED,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "granitemoehybrid": MAMBA2 | EXPERTS | {"layer_types": ["mamba", "attention"] * 2},
    "hy_v4": INDEXED,
    "lara_mini": WINDOW | EXPERTS,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": EXPERTS | {"layer_types": ["conv", "full_attention"] * 2},
    "lfm3": WINDOW | EXPERTS,
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "nemotron_h": HEAD
    | EXPERTS
    | {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8},
    "olmo_hybrid": HEAD,
    "qwen3_5_moe_text": DELTA | EXPERTS,
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA | EXPERTS,
    "zaya": EXPERTS | {"num_experts_per_tok": 1, "initializer_range": 1.0},
}
PLAIN: dict[str, dict[str, Any]] = {
    "falcon_mamba": {"state_size": 8},
    "jamba": EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "mamba_d_state": 8},
    "mamba": {"state_size": 8},
}
GENERATE: dict[str, dict[str, Any]] = {
    "dory": HEAD | {"sliding_window": 64},
    "minimax": HEAD | EXPERTS,
    "openai-gpt": {},
    "recurrent_gemma": {"attention_window_size": 8, "lru_width": 32},
    "rwkv": {"attention_hidden_size": 32},
}
FAMILIES = TREE | PATHS | PLAIN | GENERATE


def model_type(family: str) -> str:
    return family.split(" (")[0]


@cache
def family_target(family: str) -> Target:
    """A tiny random fp32 target of the family."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type(family)](**COMMON | FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return Target(model)
