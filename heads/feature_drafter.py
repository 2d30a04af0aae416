"""What the EAGLE drafters have in common: one decoder layer over pairs of a feature and the token that follows it.

EAGLE (arXiv:2401.15077), EAGLE-2 (arXiv:2406.16858), HASS (arXiv:2408.15766), EAGLE-3 (arXiv:2503.01840). The pair
(feature at t, token at t + 1) stands at position t and drafts the token at t + 2. Further levels have no true feature:
the layer's own output takes its place, in decoding and in the unrolled steps of training alike.

B rows, T tokens, N nodes, M newly verified positions, W expanded nodes, E nodes expanded so far, H hidden, D head
width, V_d draft vocabulary, J unrolled steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import LayerShape, RaggedTreeCache
from .checkpoint import SavedDrafter
from .drafter import DraftState, HeadLoss, Proposal, TargetFeatures, Teacher, last_valid
from .layers import Fused, Linear, RMSNorm, apply_rope, fold_mask, rope_tables, tree_attention
from .losses import LevelResult, Supervision, head_loss
from .unrolled import unrolled_attention


@dataclass(frozen=True, kw_only=True)
class FeatureDrafterConfig:
    """Sizes of a drafter's layer, the target's own unless given, and how far it is unrolled.

    Args:
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
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    steps: int = 3
    max_depth: int = 8
    draft_vocab_size: int | None = None
    loss_decay: float = 0.8
    max_positions: int | None = None

    def __post_init__(self) -> None:
        if self.steps < 1 or self.max_depth < 1:
            raise ValueError(f"steps and max_depth are at least 1, not {self.steps}, {self.max_depth}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )


class Attention(nn.Module):
    """Grouped attention that reads `inputs` times H and writes H."""

    def __init__(self, config: FeatureDrafterConfig, inputs: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        wide = inputs * config.hidden_size
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
        """[B, N, inputs · H] -> rotated queries and keys, and values, each [B, heads, N, D]."""
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


class DraftLayer(nn.Module):
    """A decoder layer without its input norms, which the drafters place differently."""

    self_attn: Attention
    post_attention_layernorm: RMSNorm
    mlp: MLP

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Residual [B, N, H], output projection of [B, N, heads · D] and MLP -> the output state [B, N, H]."""
        state = residual + self.self_attn.o_proj(attended)
        return state + self.mlp(self.post_attention_layernorm(state))


@dataclass
class FeatureState(DraftState):
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


class FeatureDrafter(SavedDrafter):
    """Training and decoding of an EAGLE drafter; a subclass says what it reads, joins and compares.

    The cache of verified pairs is filled from the target's true features only: what was drafted on the way is computed
    anew in `observe`.
    """

    config: Any
    midlayer: DraftLayer

    def __init__(self, config: FeatureDrafterConfig, draft_ids: Tensor | None) -> None:
        super().__init__(config, draft_ids)
        self.max_depth = config.max_depth
        self.max_positions = config.max_positions

    # What subclasses give

    def fuse(self, features: TargetFeatures) -> Tensor:
        """What the target computed at each position -> the state [B, T, H] that enters the layer there."""
        raise NotImplementedError

    def join(self, embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """[B, N, H] twice -> the residual stream [B, N, H], and what attention reads."""
        raise NotImplementedError

    def fed_back(self, output: Tensor) -> Tensor:
        """The layer's output [B, N, H] -> the state that enters it at the next level."""
        return output

    def compare(self, supervision: Supervision, level: int, output: Tensor, teacher: Teacher) -> LevelResult:
        """One unrolled step's output [B, T, H] against the target."""
        raise NotImplementedError

    def draft_logits(self, output: Tensor, target: Any) -> Tensor:
        """[B, N, H] output of the layer in decoding -> [B, N, V_d] logits."""
        raise NotImplementedError

    # Training

    def forward(self, features: TargetFeatures, teacher: Teacher, steps: int | None = None) -> HeadLoss:
        """`steps` (all of the config's if None) unrolled steps over a batch, each on the output of the one before."""
        supervision = Supervision.of(features, teacher, self.draft_ids)
        state = self.fuse(features)
        attention = self.midlayer.self_attn
        results, keys, values = [], [], []
        for step in range(min(steps or self.config.steps, self.config.max_depth)):
            following = features.input_ids.roll(-1 - step, dims=1)  # wraps at the right edge, which is never supervised
            rope = self._rope(torch.arange(state.shape[1], device=state.device)[None] + step)
            residual, x = self.join(teacher.embed(following), state)
            query, key, value = attention.project(x, *rope)
            keys.append(key)
            values.append(value)
            output = self.midlayer.finish(residual, unrolled_attention(query, keys, values))
            results.append(self.compare(supervision, step, output, teacher))
            state = self.fed_back(output)
        return head_loss(results, supervision, self.config.loss_decay)

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rope_tables(positions, self.config.head_dim, self.config.rope_theta)

    def _ready(self, features: Tensor) -> Tensor:
        """Features of the target in the dtype that the weights compute in."""
        return features if torch.is_autocast_enabled(features.device.type) else features.to(self.dtype)

    # Decoding

    def start(self, session: Any, input_ids: Tensor, lengths: Tensor) -> FeatureState:
        shape = LayerShape(self.config.num_key_value_heads, self.config.head_dim, self.config.head_dim)
        cache = RaggedTreeCache([shape], len(input_ids), session.capacity, self.dtype, input_ids.device)
        return FeatureState(session, len(input_ids), cache=cache)

    def observe(
        self, state: FeatureState, features: TargetFeatures | None, next_tokens: Tensor, counts: Tensor
    ) -> Proposal:
        assert features is not None
        batch, new = next_tokens.shape
        steps = torch.arange(new, device=next_tokens.device).expand(batch, new)
        positions = state.cache.lengths[:, None] + steps
        output = self._layer(state, self.fuse(features), next_tokens, positions, None)
        state.cache.commit(steps, counts)
        root = last_valid(output, counts)[:, None]
        state.states = root
        state.depth = torch.zeros(batch, 1, dtype=torch.long, device=root.device)
        state.ancestors = torch.zeros(batch, 0, 0, dtype=torch.bool, device=root.device)
        return self._propose(state, root)

    def expand(self, state: FeatureState, parents: Tensor, tokens: Tensor, valid: Tensor) -> Proposal:
        rows = torch.arange(state.batch, device=tokens.device)[:, None]
        depth = state.depth[rows, parents] + 1
        # The root's pair is the last committed one: level 1 follows right behind it.
        positions = state.cache.lengths[:, None] + depth - 1
        state.ancestors = _extend(state.ancestors, parents)
        new = state.ancestors[:, -tokens.shape[1] :]
        output = self._layer(state, self.fed_back(state.states[rows, parents]), tokens, positions, new)
        state.states = torch.cat((state.states, output), 1)
        state.depth = torch.cat((state.depth, depth), 1)
        return self._propose(state, output)

    def rewind(self, state: FeatureState, lengths: Tensor) -> None:
        state.cache.rewind(lengths)

    def _layer(
        self, state: FeatureState, below: Tensor, tokens: Tensor, positions: Tensor, ancestors: Tensor | None
    ) -> Tensor:
        before = 0 if ancestors is None else ancestors.shape[2] - tokens.shape[1]
        span = state.cache.begin(slice(None), tokens.shape[1], before)
        residual, x = self.join(state.session.target.embed(tokens), below)
        attention = self.midlayer.self_attn
        query, key, value = attention.project(x, *self._rope(positions))
        keys, values = state.cache.update(0, key, value, span)
        mask = fold_mask(state.cache.mask(span, ancestors), attention.heads // attention.key_heads, query.dtype)
        return self.midlayer.finish(residual, tree_attention(query, keys, values, mask, attention.dim**-0.5))

    def _propose(self, state: FeatureState, output: Tensor) -> Proposal:
        return Proposal(self.draft_logits(output, state.session.target).float().log_softmax(-1))


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


def sizes_of(target: Any) -> dict[str, Any]:
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
    }


@torch.no_grad()
def sample_features(target: Any, needs: Any) -> TargetFeatures:
    """The target's features of random tokens [8, 20], to measure scales by.

    The first positions are left out: many targets park activations of several hundred there.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.num_tokens, (8, 24), generator=generator).to(target.device)
    found = target.features(ids, needs)
    hidden, final = (None if part is None else part[:, 4:].float() for part in (found.hidden, found.final))
    return TargetFeatures(ids[:, 4:], hidden, final)
