"""What drafters and the lean target forward are made of.

B batch, N tokens, H hidden, D head width, G query heads that share one key/value head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """nn.Linear that can keep its weight in the layout the CPU's matrix kernels want (`pack`).

    Only a frozen layer may be packed: the packed copy does not follow later changes of the weight.
    """

    _packed: Tensor | None = None

    def pack(self) -> None:
        """Prepare for inference on CPU in bf16; does nothing elsewhere."""
        self._packed = pack_weight(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        if self._packed is None or torch.is_grad_enabled():
            return super().forward(x)
        return packed_linear(x, self._packed, self.bias)


def pack_weight(weight: Tensor) -> Tensor | None:
    """The prepacked form of a weight, or None where prepacking does not apply."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias with a weight of `pack_weight`."""
    if x.numel() == x.shape[-1]:
        # The kernel for a single row is slower than that for two, and rounds differently.
        two = x.reshape(1, -1).expand(2, -1)
        return torch.ops.mkldnn._linear_pointwise(two, weight, bias, "none", [], "")[:1].view(*x.shape[:-1], -1)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class Fused:
    """One matrix product in place of several: stacked weights of `nn.Linear`s with the same input."""

    def __init__(self, *parts: nn.Linear) -> None:
        self.weight = torch.cat([p.weight.detach() for p in parts]) if len(parts) > 1 else parts[0].weight.detach()
        biases = [p.bias for p in parts]
        self.bias: Tensor | None = None
        if any(b is not None for b in biases):
            whole = [p.weight.new_zeros(p.out_features) if p.bias is None else p.bias.detach() for p in parts]
            self.bias = torch.cat(whole)
        self.packed = pack_weight(self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        # A packed weight cannot be traced, and the compiler has layouts of its own.
        if torch.compiler.is_compiling() or self.packed is None:
            return F.linear(x, self.weight, self.bias)
        return packed_linear(x, self.packed, self.bias)


def pack_linears(module: nn.Module) -> None:
    """Prepare a frozen module for inference: every part that can pack itself, as a whole, does."""
    for part in module.children():
        if callable(pack := getattr(part, "pack", None)):
            pack()
        else:
            pack_linears(part)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learned scale, computed in fp32."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., H] -> [..., H] in x's dtype."""
    if x.dtype == torch.bfloat16 and x.device.type == "cpu" and not torch.is_grad_enabled():
        # torch takes a dozen full-size operations for this on CPU; one reduction and two products do.
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
        scale = square.div_(x.shape[-1]).add_(eps).rsqrt_()
        return (x * scale).to(x.dtype) * weight
    if x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def rope_tables(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine [..., D] of rotary positions (arXiv:2104.09864), the two halves of a head rotated together."""
    frequency = theta ** -(torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    angle = positions[..., None].float() * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [..., D] by tables that broadcast to it."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + rotated * sin


def fold_mask(seen: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """[B, N, S] bool -> [B, 1, G · N, S] additive, the shape `tree_attention` wants; made once for all layers."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
    return mask.repeat(1, groups, 1)[:, None]


def tree_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of tree nodes over a cache, grouped heads without repeating keys.

    Args:
        query: [B, heads, N, D].  keys, values: [B, key heads, S, D].
        mask: [B, 1, G · N, S] of `fold_mask`.
    Returns: [B, N, heads · D].
    """
    batch, heads, nodes, dim = query.shape
    groups = heads // keys.shape[1]
    # Query heads of one key head become rows of one matrix: the cache is read once and never copied.
    folded = query.reshape(batch, keys.shape[1], groups * nodes, dim)
    out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
    return out.view(batch, heads, nodes, -1).transpose(1, 2).reshape(batch, nodes, -1)
