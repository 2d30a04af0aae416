"""The reduced draft vocabulary: which token ids a drafter can propose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def draft_vocabulary(target: Any, size: int | None) -> Tensor | None:
    """Token ids [V_d] that may be drafted, the lowest ones (tokenizers give frequent tokens low ids).

    Args: size: V_d; None for all. Rows of the head beyond the tokenizer are padding and never drafted.
    Returns: sorted ids, or None where every row of the head may be drafted.
    Raises: ValueError if size is not between 1 and the number of tokens.
    """
    if size is None:
        size = target.num_tokens
    if not 1 <= size <= target.num_tokens:
        raise ValueError(
            f"draft_vocab_size is {size}, expected 1 to {target.num_tokens} (the target's tokens), or null for all"
        )
    return None if size == target.vocab_size else torch.arange(size)
