"""transformers' own assisted generation: what `generate()` takes for it, checked before it is measured."""

from __future__ import annotations

from typing import Any, cast

import torch
from headsmith.heads.target import Target
from headsmith.heads.target.loading import load_model, load_tokenizer
from headsmith.heads.target.tokenizers import require_same_tokenizer

EARLY_EXIT = "early_exit"


def assistant_arguments(target: Target, assistant: str, trust_remote_code: bool = False) -> dict[str, Any]:
    """generate()'s arguments for an assistant: a smaller model of the same tokenizer by name, or `early_exit=N`, the
    target's own first N layers.

    Raises: ValueError for another vocabulary, or layers that cannot draft; what loading raises for a name.
    """
    kind, _, layers = assistant.partition("=")
    if kind == EARLY_EXIT:
        return {"assistant_early_exit": _early_exit(target, layers)}
    return {"assistant_model": _assistant_model(target, assistant, trust_remote_code)}


def _assistant_model(target: Target, name: str, trust_remote_code: bool) -> Any:
    tokenizer = load_tokenizer(name, trust_remote_code)
    require_same_tokenizer(f"the assistant {name}", tokenizer, target, f"{EARLY_EXIT}=N")
    model = load_model(name, dtype=target.dtype, trust_remote_code=trust_remote_code).to(target.device)
    rows = model.get_output_embeddings().weight.shape[0]
    if rows != target.vocab_size:
        raise ValueError(
            f"the assistant {name} has {rows} rows in its head, {target.name} has {target.vocab_size}; transformers "
            "assists only between equal ones, name another model, or early_exit=N"
        )
    return model.eval().requires_grad_(False)


def _early_exit(target: Target, layers: str) -> int:
    depth = target.num_layers
    if not layers.isdigit() or not 0 < int(layers) < depth:
        raise ValueError(
            f"early_exit={layers}: expected a number of layers from 1 to {depth - 1}, as {target.name} has {depth}"
        )
    ids = torch.zeros((1, 4), dtype=torch.long, device=target.device)
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    try:
        cast(Any, target.model).generate(ids, **arguments, assistant_early_exit=int(layers))
    except Exception as error:  # many models run all layers whatever their configuration says, and find a short cache
        raise ValueError(
            f"early_exit={layers}: transformers cannot draft with the first layers of {target.name} "
            f"({type(error).__name__}: {error}); name a smaller model as the assistant"
        ) from error
    finally:
        # transformers shortens it for a draft, and leaves it so where that fails.
        target.config.num_hidden_layers = depth
    return int(layers)
