"""EAGLE-3: one decoder layer on fused target features and the next token, unrolled on its own output.

arXiv:2503.01840. The options `norm_features` and `feedback: normed` make the variant known as EAGLE-3.1.

B rows, T tokens, N nodes, C captured layers, H hidden, V_d draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .drafter import Needs, TargetFeatures, Teacher, register
from .feature_drafter import (
    MLP,
    Attention,
    DraftLayer,
    FeatureDrafter,
    FeatureDrafterConfig,
    sample_features,
    sizes_of,
)
from .layers import Linear, RMSNorm
from .losses import LevelResult, Supervision, compare_level
from .vocabulary import draft_vocabulary


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(FeatureDrafterConfig):
    """Sizes of an EAGLE-3 drafter; see `FeatureDrafterConfig` for those that it shares.

    Args:
        layers: three indices into the target's hidden_states (inputs of those layers), low, middle and high.
        norm_features: an RMSNorm for each captured layer in front of the projection, in place of the measured scale.
        feedback: what feeds the next level: the layer's output as it is (`raw`), or behind the norm in front of the
            output layer (`normed`).
    """

    layers: tuple[int, int, int]
    norm_features: bool = False
    feedback: str = "raw"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "layers", tuple(self.layers))  # JSON and YAML hand over a list
        if len(self.layers) != 3 or len(set(self.layers)) != 3:
            raise ValueError(f"layers are three different indices of the target's hidden states, not {self.layers}")
        if self.feedback not in ("raw", "normed"):
            raise ValueError(f"feedback is {self.feedback!r}, expected raw or normed")


class MidLayer(DraftLayer):
    """The one decoder layer. Attention reads [norm(embedding); norm(state)]; the residual is the un-normed state."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, inputs=2)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)


@register("eagle3")
class Eagle3(FeatureDrafter):
    """The EAGLE-3 drafter: logits are lm_head(norm(output)), with an output layer of its own."""

    config_class = Eagle3Config
    captures = 3
    midlayer: MidLayer
    feature_scale: Tensor

    def __init__(self, config: Eagle3Config, draft_ids: Tensor | None = None) -> None:
        super().__init__(config, draft_ids)
        self.needs = Needs(layers=config.layers)
        if config.norm_features:
            self.feature_norms = nn.ModuleList(RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3))
        else:
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
        config = Eagle3Config(**{**sizes_of(target), "layers": default_layers(target.num_layers), **options})
        draft_ids = draft_vocabulary(target, config.draft_vocab_size)
        drafter = cls(config, draft_ids)
        with torch.no_grad():
            drafter.lm_head.weight.copy_(target.head_weight(draft_ids))
            if not config.norm_features:
                drafter.feature_scale.copy_(_feature_scale(target, drafter.needs))
        return drafter

    def fuse(self, features: TargetFeatures) -> Tensor:
        """Project the captured layers [B, T, C, H] to one state [B, T, H]."""
        assert features.hidden is not None
        hidden = features.hidden
        if self.config.norm_features:
            wide = torch.cat([norm(hidden[:, :, k]) for k, norm in enumerate(self.feature_norms)], -1)
        else:
            wide = hidden.flatten(-2) * self.feature_scale.to(hidden.dtype)
        return self.fc(self._ready(wide))

    def join(self, embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """[B, N, H] twice -> the state as it is, and [B, N, 2H] both normed."""
        layer = self.midlayer
        return state, torch.cat((layer.input_layernorm(embedding), layer.hidden_norm(state)), dim=-1)

    def fed_back(self, output: Tensor) -> Tensor:
        return self.norm(output) if self.config.feedback == "normed" else output

    def compare(self, supervision: Supervision, level: int, output: Tensor, teacher: Teacher) -> LevelResult:
        return compare_level(supervision, level, lambda rows, index: self._logits(output[rows, index]))

    def draft_logits(self, output: Tensor, target: Any) -> Tensor:
        return self._logits(output)

    def _logits(self, output: Tensor) -> Tensor:
        return self.lm_head(self.norm(output))


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


def _feature_scale(target: Any, needs: Needs) -> Tensor:
    """[3H] one over the root mean square of every captured channel, on random tokens."""
    hidden = sample_features(target, needs).hidden
    assert hidden is not None
    return hidden.flatten(-2).square().mean((0, 1)).clamp(min=1e-8).rsqrt().cpu()
