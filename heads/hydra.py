"""Hydra heads: Medusa's, each of which also reads the tokens drafted before its own (arXiv:2402.05109).

Head i (from 0) at position t reads the feature at t and the embeddings of the tokens at t + 1 to t + 1 + i, and guesses
the token at t + 2 + i. Nodes of one level thus differ in what they are followed by, where Medusa's all are by the same.

B rows, T tokens, M newly verified positions, W expanded nodes, E nodes expanded so far, i level, K heads, H hidden,
V_d draft vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .cache import LayerShape, RaggedTreeCache
from .drafter import DraftState, HeadLoss, Needs, Proposal, TargetFeatures, Teacher, last_valid, register
from .feature_drafter import MLP, Attention, DraftLayer, sample_features, sizes_of
from .layers import Linear, RMSNorm, fold_mask, rope_tables, tree_attention
from .losses import Supervision, compare_level, head_loss
from .medusa import MedusaConfig, ResidualHeads
from .unrolled import unrolled_attention


@dataclass(frozen=True, kw_only=True)
class HydraConfig(MedusaConfig):
    """Sizes of a set of Hydra heads; see `MedusaConfig` for those that they share.

    Args:
        prefix_attention: a decoder layer over the features so far, whose output all heads read in the feature's place
            ("Hydra++" in the paper). The sizes that follow are its own, the target's unless given, None without it.
    """

    prefix_attention: bool = False
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


class PrefixLayer(DraftLayer):
    """Causal attention over features and an MLP; both add nothing at first, so that the layer starts as the feature."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, inputs=1)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        nn.init.zeros_(self.self_attn.o_proj.weight)
        nn.init.zeros_(self.mlp.down_proj.weight)
        self.theta = config.rope_theta

    def project(self, feature: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, H] features at positions [B, T] -> queries, keys and values, each [B, heads, T, D]."""
        rope = rope_tables(positions, self.self_attn.dim, self.theta)
        return self.self_attn.project(self.input_layernorm(feature), *rope)


@dataclass
class HydraState(DraftState):
    """What the heads know of the rows, and of what they drafted since.

    Args:
        cache: keys and values of the verified features; None without prefix attention.
        seen: [B, 1 + E, 1 + K, H] what the root and every expanded node have behind them: the feature, then the
            embeddings of the tokens up to their own; zero from there on.
        level: of the nodes expanded last, 0 for the root.
    """

    cache: Any = None
    seen: Any = None
    level: int = 0


@register("hydra")
class Hydra(ResidualHeads):
    """K Hydra heads. The first is evaluated in `observe`; each `expand` evaluates the next, for all its nodes at once.

    Features and embeddings are divided by their sizes, which differ by a factor of several hundred on some targets, and
    what the input projection makes of them is brought back to the size of a feature, on which the rest of a head works
    as Medusa's. The projection starts as the feature alone, so that a new head says what the target itself says.
    """

    config_class = HydraConfig
    feature_scale: Tensor
    embedding_scale: Tensor

    def __init__(self, config: HydraConfig, draft_ids: Tensor | None = None) -> None:
        super().__init__(config, draft_ids)
        self.needs = Needs(final=True, positions="all" if config.prefix_attention else "last")
        self.register_buffer("feature_scale", torch.ones(()))
        self.register_buffer("embedding_scale", torch.ones(()))
        self.prefix_layer = PrefixLayer(config) if config.prefix_attention else None
        size = config.hidden_size
        self.inputs = nn.ModuleList(Linear((head + 2) * size, size, bias=False) for head in range(config.num_heads))
        for part in self.inputs.parameters():
            nn.init.zeros_(part)
            nn.init.eye_(part.data[:, :size])

    @classmethod
    def build(cls, target: Any, **options: Any) -> Hydra:
        """Untrained heads for a target, the sizes of its features and embeddings measured."""
        sizes = sizes_of(target) if options.get("prefix_attention") else {}
        drafter = super().build(target, **{**sizes, **options})
        found = sample_features(target, Needs(final=True))
        assert found.final is not None
        drafter.feature_scale.fill_(_size(found.final))
        drafter.embedding_scale.fill_(_size(target.embed(found.input_ids)))
        return drafter

    # Training

    def forward(self, features: TargetFeatures, teacher: Teacher, steps: int | None = None) -> HeadLoss:
        """Loss of all heads over a batch, each behind the true tokens; `steps` is for drafters that unroll."""
        assert features.final is not None
        dtype = features.final.dtype
        supervision = Supervision.of(features, teacher, self.draft_ids)
        feature = self._attend(self._sized(features.final, self.feature_scale))
        embeddings = self._sized(teacher.embed(features.input_ids), self.embedding_scale)

        def result(level: int) -> Any:
            def logits_at(rows: Tensor, index: Tensor) -> Tensor:
                tokens = [embeddings[rows, index + 1 + i] for i in range(level + 1)]
                seen = torch.stack((feature[rows, index], *tokens), -2)
                return self._logits(level, seen, teacher, dtype)

            return compare_level(supervision, level, logits_at)

        results = [result(level) for level in range(self.config.num_heads)]
        return head_loss(results, supervision, self.config.loss_decay)

    def _sized(self, x: Tensor, scale: Tensor) -> Tensor:
        """[..., H] of the target -> the same with a size of about 1, in the dtype that the weights compute in."""
        return self._ready(x) / scale

    def _attend(self, feature: Tensor) -> Tensor:
        """[B, T, H] features of whole texts -> what the heads read in their place."""
        if self.prefix_layer is None:
            return feature
        positions = torch.arange(feature.shape[1], device=feature.device)[None]
        query, key, value = self.prefix_layer.project(feature, positions)
        return self.prefix_layer.finish(feature, unrolled_attention(query, [key], [value]))

    def _logits(self, level: int, seen: Tensor, teacher: Teacher, dtype: torch.dtype) -> Tensor:
        """[..., level + 2, H] feature and embeddings, feature first -> [..., V_d]; `dtype` is the target's."""
        joined = self.inputs[level](seen.flatten(-2)) * self.feature_scale
        return self._head(level, joined, teacher, dtype)

    # Decoding

    def start(self, session: Any, input_ids: Tensor, lengths: Tensor) -> HydraState:
        state = HydraState(session, len(input_ids))
        if self.prefix_layer is not None:
            shape = LayerShape(self.config.num_key_value_heads, self.config.head_dim, self.config.head_dim)
            state.cache = RaggedTreeCache([shape], len(input_ids), session.capacity, self.dtype, input_ids.device)
        return state

    def observe(
        self, state: HydraState, features: TargetFeatures | None, next_tokens: Tensor, counts: Tensor
    ) -> Proposal:
        assert features is not None and features.final is not None
        feature = self._last(state, self._sized(features.final, self.feature_scale), counts)
        state.seen = feature.new_zeros(state.batch, 1, 1 + self.config.num_heads, self.config.hidden_size)
        state.seen[:, 0, 0] = feature
        state.level = 0
        return self._propose(state, state.seen, last_valid(next_tokens, counts)[:, None])

    def expand(self, state: HydraState, parents: Tensor, tokens: Tensor, valid: Tensor) -> Proposal:
        rows = torch.arange(state.batch, device=tokens.device)[:, None]
        new = state.seen[rows, parents]
        state.level += 1  # nodes that are expanded together are all of one level, and so read by one head
        proposal = self._propose(state, new, tokens)
        state.seen = torch.cat((state.seen, new), 1)
        return proposal

    def rewind(self, state: HydraState, lengths: Tensor) -> None:
        if state.cache is not None:
            state.cache.rewind(lengths)

    def _last(self, state: HydraState, feature: Tensor, counts: Tensor) -> Tensor:
        """[B, M, H] newly verified features -> what the heads read at the last of each row, [B, H]."""
        last = last_valid(feature, counts)
        if self.prefix_layer is None:
            return last
        steps = torch.arange(feature.shape[1], device=feature.device).expand(feature.shape[:2])
        span = state.cache.begin(slice(None), feature.shape[1])
        query, key, value = self.prefix_layer.project(feature, state.cache.lengths[:, None] + steps)
        keys, values = state.cache.update(0, key, value, span)
        attention = self.prefix_layer.self_attn
        mask = fold_mask(state.cache.mask(span, None), attention.heads // attention.key_heads, query.dtype)
        attended = tree_attention(query, keys, values, mask, attention.dim**-0.5)
        state.cache.commit(steps, counts)
        return self.prefix_layer.finish(last, last_valid(attended, counts))

    def _propose(self, state: HydraState, seen: Tensor, tokens: Tensor) -> Proposal:
        """Put the nodes' own tokens [B, W] into `seen` [B, W, 1 + K, H], and score what may follow them."""
        target, known = state.session.target, state.level + 2
        embedding = target.embed(tokens)
        seen[:, :, known - 1] = self._sized(embedding, self.embedding_scale)
        teacher = target.teacher(self.draft_ids)
        logits = self._logits(state.level, seen[:, :, :known], teacher, embedding.dtype)
        return Proposal(logits.float().log_softmax(-1))


def _size(x: Tensor) -> float:
    """The power of two next to the root mean square: to divide by it rounds nothing, in any dtype."""
    return 2.0 ** round(math.log2(float(x.float().square().mean().sqrt())))
