"""EAGLE-3: one decoder layer on fused target features and the next token, unrolled on its own output.

arXiv:2503.01840.

B rows, T tokens, M newly verified positions, W expanded nodes, E nodes expanded so far, C captured layers, H hidden,
D head width, V_d draft vocabulary, J unrolled steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import LayerShape, RaggedTreeCache
from .checkpoint import SavedDrafter
from .drafter import DraftState, HeadLoss, Needs, Proposal, TargetFeatures, Teacher, last_valid, register
from .layers import Fused, Linear, RMSNorm, apply_rope, fold_mask, rope_tables, tree_attention
from .losses import Supervision, compare_level, head_loss
from .unrolled import unrolled_attention
from .vocabulary import draft_vocabulary


@dataclass(frozen=True)
class Eagle3Config:
    """Sizes of an EAGLE-3 drafter; those of its layer are the target's own unless given.

    Args:
        layers: three indices into the target's hidden_states (inputs of those layers), low, middle and high.
        steps: J, unrolled steps in training.
        max_depth: levels it may draft, and the most steps it is unrolled.
        draft_vocab_size: V_d, the lowest token ids; None for all.
        loss_decay: step j weighs loss_decay^j.
        max_positions: positions it drafts for; texts beyond go on plainly. None: as many as the target has.
    """

    hidden_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    layers: tuple[int, int, int]
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    steps: int = 3
    max_depth: int = 8
    draft_vocab_size: int | None = None
    loss_decay: float = 0.8
    max_positions: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))  # JSON and YAML hand over a list
        if len(self.layers) != 3 or len(set(self.layers)) != 3:
            raise ValueError(f"layers are three different indices of the target's hidden states, not {self.layers}")
        if self.steps < 1 or self.max_depth < 1:
            raise ValueError(f"steps and max_depth are at least 1, not {self.steps}, {self.max_depth}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )


class Attention(nn.Module):
    """Grouped attention whose queries, keys and values read [norm(embedding); norm(state)], 2H wide."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.heads, self.key_heads, self.dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        wide = 2 * config.hidden_size
        self.q_proj = Linear(wide, self.heads * self.dim, bias=False)
        self.k_proj = Linear(wide, self.key_heads * self.dim, bias=False)
        self.v_proj = Linear(wide, self.key_heads * self.dim, bias=False)
        self.o_proj = Linear(self.heads * self.dim, config.hidden_size, bias=False)
        self._fused: Fused | None = None

    def pack(self) -> None:
        """Queries, keys and values in one product from here on; the weights must not change any more."""
        self._fused = Fused(self.q_proj, self.k_proj, self.v_proj)
        self.o_proj.pack()

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, N, 2H] -> rotated queries and keys, and values, each [B, heads, N, D]."""
        if self._fused is None:
            parts = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        else:
            sizes = [heads * self.dim for heads in (self.heads, self.key_heads, self.key_heads)]
            parts = list(self._fused(x).split(sizes, dim=-1))
        query, key, value = (part.unflatten(-1, (-1, self.dim)).transpose(1, 2) for part in parts)
        cos, sin = cos[:, None].to(query.dtype), sin[:, None].to(query.dtype)
        return apply_rope(query, cos, sin), apply_rope(key, cos, sin), value


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate, bias=False)
        self.up_proj = Linear(hidden, intermediate, bias=False)
        self.down_proj = Linear(intermediate, hidden, bias=False)
        self._fused: Fused | None = None

    def pack(self) -> None:
        """Both inner products in one from here on; the weights must not change any more."""
        self._fused = Fused(self.gate_proj, self.up_proj)
        self.down_proj.pack()

    def forward(self, x: Tensor) -> Tensor:
        if self._fused is None:
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        gate, up = self._fused(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class MidLayer(nn.Module):
    """The one decoder layer; the residual stream is the un-normed state."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def inputs(self, embedding: Tensor, state: Tensor) -> Tensor:
        """[B, N, H] twice -> [B, N, 2H]."""
        return torch.cat((self.input_layernorm(embedding), self.hidden_norm(state)), dim=-1)

    def finish(self, state: Tensor, attended: Tensor) -> Tensor:
        """Residual, output projection and MLP -> the new state [B, N, H], not normed."""
        state = state + self.self_attn.o_proj(attended)
        return state + self.mlp(self.post_attention_layernorm(state))


@dataclass
class EagleState(DraftState):
    """The drafter's own cache of verified pairs, and what it expanded since they were observed.

    Args:
        cache: keys and values of the pairs (feature at t, token at t + 1), at position t.
        states: [B, 1 + E, H] output state of the root (the last pair) and of every expanded node.
        depth: [B, 1 + E] their levels, 0 for the root.
        ancestors: [B, E, E] over the expanded nodes, itself included.
    """

    cache: Any = None
    states: Any = None
    depth: Any = None
    ancestors: Any = None


@register("eagle3")
class Eagle3(SavedDrafter):
    """The EAGLE-3 drafter. Its pre-norm output state feeds the next level; logits are lm_head(norm(state))."""

    config_class = Eagle3Config
    captures = 3
    feature_scale: Tensor

    def __init__(self, config: Eagle3Config, draft_ids: Tensor | None = None) -> None:
        super().__init__(config, draft_ids)
        self.needs = Needs(layers=config.layers)
        self.max_depth = config.max_depth
        self.max_positions = config.max_positions
        # Layers differ in scale by orders of magnitude; an export folds this into fc.
        self.register_buffer("feature_scale", torch.ones(3 * config.hidden_size))
        self.fc = Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        size = config.vocab_size if draft_ids is None else len(draft_ids)
        self.lm_head = Linear(config.hidden_size, size, bias=False)

    @classmethod
    def build(cls, target: Any, **options: Any) -> Eagle3:
        """An untrained drafter; its output layer starts as the target's rows, its feature scales are measured.

        Raises: ValueError if the target is too shallow for three different layers, or an option does not fit.
        """
        config = Eagle3Config(**{**_sizes_of(target), **options})
        draft_ids = draft_vocabulary(target, config.draft_vocab_size)
        drafter = cls(config, draft_ids)
        with torch.no_grad():
            drafter.lm_head.weight.copy_(target.head_weight(draft_ids))
            drafter.feature_scale.copy_(_feature_scale(target, drafter.needs))
        return drafter

    # Training

    def forward(self, features: TargetFeatures, teacher: Teacher, steps: int | None = None) -> HeadLoss:
        """Training-time test: `steps` (all of the config's if None) unrolled steps over a batch."""
        assert features.hidden is not None
        supervision = Supervision.of(features, teacher, self.draft_ids)
        state = self.fuse(features.hidden)
        results, keys, values = [], [], []
        for step in range(min(steps or self.config.steps, self.config.max_depth)):
            following = features.input_ids.roll(-1 - step, dims=1)  # wraps at the right edge, which is never supervised
            cos, sin = self._rope(torch.arange(state.shape[1], device=state.device)[None] + step)
            x = self.midlayer.inputs(teacher.embed(following), state)
            query, key, value = self.midlayer.self_attn.project(x, cos, sin)
            keys.append(key)
            values.append(value)
            state = self.midlayer.finish(state, unrolled_attention(query, keys, values))

            def logits_at(rows: Tensor, index: Tensor, state: Tensor = state) -> Tensor:
                return self.lm_head(self.norm(state[rows, index]))

            results.append(compare_level(supervision, step, logits_at))
        return head_loss(results, supervision, self.config.loss_decay)

    def fuse(self, hidden: Tensor) -> Tensor:
        """Project the captured layers [B, T, C, H] to one state [B, T, H]."""
        scaled = hidden.flatten(-2) * self.feature_scale.to(hidden.dtype)
        return self.fc(scaled if torch.is_autocast_enabled(scaled.device.type) else scaled.to(self.dtype))

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rope_tables(positions, self.config.head_dim, self.config.rope_theta)

    # Decoding

    def start(self, session: Any, input_ids: Tensor, lengths: Tensor) -> EagleState:
        shape = LayerShape(self.config.num_key_value_heads, self.config.head_dim, self.config.head_dim)
        cache = RaggedTreeCache([shape], len(input_ids), session.capacity, self.dtype, input_ids.device)
        return EagleState(session, len(input_ids), cache=cache)

    def observe(
        self, state: EagleState, features: TargetFeatures | None, next_tokens: Tensor, counts: Tensor
    ) -> Proposal:
        assert features is not None and features.hidden is not None
        batch, new = next_tokens.shape
        steps = torch.arange(new, device=next_tokens.device).expand(batch, new)
        positions = state.cache.lengths[:, None] + steps
        out = self._layer(state, self.fuse(features.hidden), next_tokens, positions, None)
        state.cache.commit(steps, counts)
        root = last_valid(out, counts)[:, None]
        state.states = root
        state.depth = torch.zeros(batch, 1, dtype=torch.long, device=root.device)
        state.ancestors = torch.zeros(batch, 0, 0, dtype=torch.bool, device=root.device)
        return self._propose(root)

    def expand(self, state: EagleState, parents: Tensor, tokens: Tensor, valid: Tensor) -> Proposal:
        rows = torch.arange(state.batch, device=tokens.device)[:, None]
        depth = state.depth[rows, parents] + 1
        # The root's pair is the last committed one: level 1 follows right behind it.
        positions = state.cache.lengths[:, None] + depth - 1
        state.ancestors = _extend(state.ancestors, parents)
        new = state.ancestors[:, -tokens.shape[1] :]
        out = self._layer(state, state.states[rows, parents], tokens, positions, new)
        state.states = torch.cat((state.states, out), 1)
        state.depth = torch.cat((state.depth, depth), 1)
        return self._propose(out)

    def rewind(self, state: EagleState, lengths: Tensor) -> None:
        state.cache.rewind(lengths)

    def _layer(
        self, state: EagleState, below: Tensor, tokens: Tensor, positions: Tensor, ancestors: Tensor | None
    ) -> Tensor:
        before = 0 if ancestors is None else ancestors.shape[2] - tokens.shape[1]
        span = state.cache.begin(slice(None), tokens.shape[1], before)
        embedding = state.session.target.embed(tokens)
        query, key, value = self.midlayer.self_attn.project(
            self.midlayer.inputs(embedding, below), *self._rope(positions)
        )
        keys, values = state.cache.update(0, key, value, span)
        attention = self.midlayer.self_attn
        mask = fold_mask(state.cache.mask(span, ancestors), attention.heads // attention.key_heads, query.dtype)
        return self.midlayer.finish(below, tree_attention(query, keys, values, mask, attention.dim**-0.5))

    def _propose(self, states: Tensor) -> Proposal:
        return Proposal(self.lm_head(self.norm(states)).float().log_softmax(-1))


def _extend(ancestors: Tensor, parents: Tensor) -> Tensor:
    """Add W nodes below `parents` [B, W] (0 is the root, which is committed) to an [B, E, E] ancestor mask."""
    batch, known, _ = ancestors.shape
    width = parents.shape[1]
    whole = F.pad(ancestors, (0, width, 0, width))
    rows = torch.arange(batch, device=parents.device)[:, None]
    # A row of False in front stands for the root's ancestors among the expanded nodes.
    inherited = F.pad(whole[:, :known], (0, 0, 1, 0))[rows, parents]
    itself = torch.eye(width, dtype=torch.bool, device=parents.device)
    inherited[:, :, known:] = itself
    whole[:, known:] = inherited
    return whole


def _sizes_of(target: Any) -> dict[str, Any]:
    """Defaults of a drafter's sizes from the target's configuration."""
    config = target.config
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    return {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or target.hidden_size // heads,
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * target.hidden_size,
        "rope_theta": float(rope.get("rope_theta", 10000.0)),
        "rms_norm_eps": float(getattr(config, "rms_norm_eps", None) or 1e-6),
        "layers": default_layers(target.num_layers),
    }


def default_layers(depth: int) -> tuple[int, int, int]:
    """The paper's [2, L // 2, L - 3]; on shallow targets, where these collapse, three layers spread evenly.

    Raises: ValueError for a target of fewer than 3 layers.
    """
    if depth < 3:
        raise ValueError(f"the target has {depth} layers, EAGLE-3 reads three different ones; use medusa instead")
    chosen = (2, depth // 2, depth - 3)
    if chosen[0] < chosen[1] < chosen[2]:
        return chosen
    return (depth // 4 or 1, max(depth // 2, 2 if depth > 3 else 1), depth - 1) if depth > 3 else (0, 1, 2)


@torch.no_grad()
def _feature_scale(target: Any, needs: Needs) -> Tensor:
    """[3H] one over the root mean square of every captured channel, on random tokens.

    The first positions are left out: many targets park activations of several hundred there.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.num_tokens, (8, 24), generator=generator).to(target.device)
    hidden = target.features(ids, needs).hidden[:, 4:].float().flatten(-2)
    return hidden.square().mean((0, 1)).clamp(min=1e-8).rsqrt().cpu()
