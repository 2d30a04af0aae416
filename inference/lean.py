"""The lean forward: the common decoder layer (RMSNorm, RoPE, grouped attention, SwiGLU) with nothing else in the way.

It holds the target's own weights, fused and prepacked on CPU, is chosen by structure and checked against the model
when it is built. b rows, N nodes, H hidden, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from headsmith.heads.cache import LayerShape, RaggedTreeCache, Span
from headsmith.heads.layers import Fused, apply_rope, fold_mask, rms_norm, tree_attention
from headsmith.heads.target import Target
from headsmith.heads.target.probe import TOLERANCE
from torch import Tensor, nn

STATIC_ROPE = {"default", "linear", "llama3", "yarn"}  # tables that do not depend on the length of the input


@dataclass
class LeanLayer:
    """The parts of one decoder layer."""

    norm_in: Tensor
    norm_post: Tensor
    eps: float
    qkv: Fused
    out: Fused
    gate_up: Fused
    down: Fused
    query_norm: Tensor | None
    key_norm: Tensor | None


class LeanForward:
    """Runs new nodes through a target of the common layout. Same call as `GenericForward`.

    Raises: ValueError, with the reason, where the target is not of that layout; use `try_lean` to get None instead.
    """

    name = "lean"

    def __init__(self, target: Target) -> None:
        _require_layout(target)
        config = target.config
        self.target = target
        self.dtype = target.dtype
        first = target.layers[0].self_attn
        self.dim = first.head_dim
        self.heads = first.q_proj.out_features // self.dim
        self.key_heads = first.k_proj.out_features // self.dim
        self.scale = float(first.scaling)
        self.layers = [_lean_layer(layer) for layer in target.layers]
        self.norm = target.decoder.norm.weight.detach()
        self.eps = target.decoder.norm.variance_epsilon
        self.embedding = target.model.get_input_embeddings().weight.detach()
        self.head = Fused(target.model.get_output_embeddings())
        limit = config.max_position_embeddings
        self.cos, self.sin = self._tables(min(limit, 4096))
        self._check()

    @property
    def layer_shapes(self) -> list[LayerShape]:
        return [LayerShape(self.key_heads, self.dim, self.dim)] * len(self.layers)

    def logits(self, feature: Tensor) -> Tensor:
        return self.head(feature)

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        seen: Tensor,
        slot_positions: Tensor,
        cache: RaggedTreeCache,
        span: Span,
        capture: tuple[int, ...],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Feature after the final norm [b, N, H], and the inputs of the captured layers."""
        if span.used > self.cos.shape[0]:
            self.cos, self.sin = self._tables(span.used * 2)
        batch, nodes = tokens.shape
        x = F.embedding(tokens, self.embedding)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        mask = fold_mask(seen, self.heads // self.key_heads, self.dtype)
        found: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in capture:
                found[index] = x
            y = rms_norm(x, layer.norm_in, layer.eps)
            qkv = layer.qkv(y).view(batch, nodes, self.heads + 2 * self.key_heads, self.dim).transpose(1, 2)
            turned = qkv[:, : self.heads + self.key_heads]
            if layer.query_norm is not None:
                turned = self._normed(turned, layer)
            turned = apply_rope(turned, cos, sin)
            query, key = turned[:, : self.heads], turned[:, self.heads :]
            keys, values = cache.update(index, key, qkv[:, self.heads + self.key_heads :], span)
            x = x + layer.out(tree_attention(query, keys, values, mask, self.scale))
            gate, up = layer.gate_up(rms_norm(x, layer.norm_post, layer.eps)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        return rms_norm(x, self.norm, self.eps), found

    def _normed(self, turned: Tensor, layer: LeanLayer) -> Tensor:
        assert layer.query_norm is not None and layer.key_norm is not None
        query = rms_norm(turned[:, : self.heads], layer.query_norm, layer.eps)
        key = rms_norm(turned[:, self.heads :], layer.key_norm, layer.eps)
        return torch.cat((query, key), dim=1)

    def _tables(self, length: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(length, device=self.embedding.device)[None]
        cos, sin = self.target.decoder.rotary_emb(self.embedding[:1, None], positions)
        return cos[0], sin[0]

    @torch.inference_mode()
    def _check(self) -> None:
        """Compare with the model's own forward on random tokens; a layer that only looks alike is refused here."""
        from .engine import Session

        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.target.num_tokens, (1, 12), generator=generator).to(self.embedding.device)
        expected = self.target.model(input_ids=tokens, use_cache=False).logits.float()
        session = Session(self.target, 1, 12, forward=self)
        found = self.logits(session.forward(tokens).final).float()
        error = float((found - expected).square().mean().sqrt() / expected.std())
        if not error < TOLERANCE[self.dtype]:
            raise ValueError(f"its logits differ from the model's own by {error:.2g} standard deviations")


def try_lean(target: Target) -> tuple[LeanForward | None, str]:
    """The lean forward, or None and the reason why this target does not get one."""
    try:
        return LeanForward(target), "common layout"
    except ValueError as error:
        return None, str(error)


def _require_layout(target: Target) -> None:
    """Raise ValueError with the first thing that is not of the common layout."""
    config = target.config

    def require(condition: Any, what: str) -> None:
        if not condition:
            raise ValueError(f"not of the common layout: {what}")

    require(set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}, "layer types")
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    require(not windowed or getattr(config, "layer_types", None), "a sliding window")
    names = {name for name, _ in target.decoder.named_children()}
    require(names == {"embed_tokens", "layers", "norm", "rotary_emb"}, f"decoder parts {sorted(names)}")
    require(target.decoder.rotary_emb.rope_type in STATIC_ROPE, "RoPE tables that change with the length")
    require(type(target.model.get_input_embeddings()) is nn.Embedding, "the embedding")
    require(type(target.model.get_output_embeddings()) is nn.Linear, "the head")
    devices = {parameter.device for parameter in target.model.parameters()}
    require(len(devices) == 1 and "meta" not in {d.type for d in devices}, "weights on several devices")
    for layer in target.layers:
        parts = {name for name, _ in layer.named_children()}
        require(
            parts == {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
            f"parts {sorted(parts)}",
        )
        linears = [
            layer.self_attn.q_proj,
            layer.self_attn.k_proj,
            layer.self_attn.v_proj,
            layer.self_attn.o_proj,
        ]
        mlp = {name for name, _ in layer.mlp.named_children()}
        require(mlp == {"gate_proj", "up_proj", "down_proj", "act_fn"}, f"MLP parts {sorted(mlp)}")
        linears += [layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj]
        require(all(type(linear) is nn.Linear for linear in linears), "quantised or adapted linear layers")
        require("silu" in type(layer.mlp.act_fn).__name__.lower(), "the MLP's activation")
        extra = {name for name, _ in layer.self_attn.named_children()} - {
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
        }
        require(extra in (set(), {"q_norm", "k_norm"}), f"attention parts {sorted(extra)}")


def _lean_layer(layer: Any) -> LeanLayer:
    attention = layer.self_attn
    query_norm = getattr(attention, "q_norm", None)
    return LeanLayer(
        norm_in=layer.input_layernorm.weight.detach(),
        norm_post=layer.post_attention_layernorm.weight.detach(),
        eps=layer.input_layernorm.variance_epsilon,
        qkv=Fused(attention.q_proj, attention.k_proj, attention.v_proj),
        out=Fused(attention.o_proj),
        gate_up=Fused(layer.mlp.gate_proj, layer.mlp.up_proj),
        down=Fused(layer.mlp.down_proj),
        query_norm=None if query_norm is None else query_norm.weight.detach(),
        key_norm=None if query_norm is None else attention.k_norm.weight.detach(),
    )
