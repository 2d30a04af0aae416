"""Attention of unrolled training steps: the true features before a position, and its own drafted states (EAGLE-3).

B rows, T tokens, D head width, j unrolled step.
"""

from __future__ import annotations

import torch
from torch import Tensor


def unrolled_attention(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attend at step j = len(keys) - 1.

    The query of index t sees the keys of step 0 up to t (the true features), and of steps 1..j only its own index:
    these are the states that decoding would have drafted on the way.

    Args:
        query: [B, heads, T, D].  keys, values: a [B, key heads, T, D] for every step so far.
    Returns: [B, T, heads · D].
    """
    batch, heads, length, dim = query.shape
    groups = heads // keys[0].shape[1]
    query = query.reshape(batch, -1, groups, length, dim) * dim**-0.5
    first = query.flatten(2, 3) @ keys[0].transpose(-1, -2)
    scores = first.view(batch, -1, groups, length, length)
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = scores.masked_fill(future, -torch.inf)
    # Against its own drafted states a query has one score a step: a product along the diagonal.
    own = [(query * key[:, :, None]).sum(-1, keepdim=True) for key in keys[1:]]
    weights = torch.cat((scores, *own), -1).softmax(-1, dtype=torch.float32).to(values[0].dtype)
    out = (weights[..., :length].flatten(2, 3) @ values[0]).view(batch, -1, groups, length, dim)
    for step, value in enumerate(values[1:]):
        out = out + weights[..., length + step, None] * value[:, :, None]
    return out.reshape(batch, heads, length, dim).transpose(1, 2).flatten(2)
