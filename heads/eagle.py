"""EAGLE and HASS: one decoder layer that predicts the target's next feature; the target's own head reads tokens off it.

EAGLE (arXiv:2401.15077); EAGLE-2 (arXiv:2406.16858) is the same drafter under a dynamic tree. HASS (arXiv:2408.15766)
trains the same layer on its own predictions (`steps` above 1) and weighs the target's likeliest tokens more
(`top_k_loss`).

B rows, T tokens, N nodes, H hidden, V_d draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
from .losses import LevelResult, Supervision, TopWeighted, compare_level, feature_distance
from .vocabulary import draft_vocabulary


@dataclass(frozen=True, kw_only=True)
class EagleConfig(FeatureDrafterConfig):
    """Sizes and loss of an EAGLE drafter; see `FeatureDrafterConfig` for those that it shares.

    Args:
        steps: 1 as EAGLE trains, on true features only; 3 as HASS does. Gradients flow through all of them.
        feature_weight: of the smooth L1 distance between predicted and true feature.
        logit_weight: of the cross entropy to the target's distribution.
        top_k_loss: how many of the target's likeliest tokens have a cross entropy of their own; None for none.
        top_k_weight: of that.
        noise: in training the true features that enter the layer are shifted by up to this, evenly spread, as a share
            of their root mean square. The paper adds ±0.1 as it is, to features whose size it does not tell.
    """

    steps: int = 1
    feature_weight: float = 1.0
    logit_weight: float = 0.1
    top_k_loss: int | None = None
    top_k_weight: float = 1.0
    noise: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("feature_weight", "logit_weight", "top_k_weight", "noise"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} is {value}, expected 0 or more")
        if self.top_k_loss is not None and self.top_k_loss < 1:
            raise ValueError(f"top_k_loss is {self.top_k_loss}, expected a number of tokens, or null for none")


class EagleLayer(DraftLayer):
    """The one decoder layer: nothing is normed in front of its attention, nor behind its MLP."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config, inputs=1)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)


@register("eagle")
class Eagle(FeatureDrafter):
    """The EAGLE drafter: f(t + 1) = layer(fc([embedding of the token at t + 1; f(t)])), logits by the target's head.

    Features are the target's after its final norm. Within the drafter they are scaled to a root mean square of about
    1: on some targets it is 27, where a smooth L1 distance is all L1 and the layer has far to grow.
    """

    config_class = EagleConfig
    needs = Needs(final=True)
    midlayer: EagleLayer
    feature_scale: Tensor
    embedding_scale: Tensor

    def __init__(self, config: EagleConfig, draft_ids: Tensor | None = None) -> None:
        super().__init__(config, draft_ids)
        self.register_buffer("feature_scale", torch.ones(()))
        self.register_buffer("embedding_scale", torch.ones(()))
        self.fc = Linear(2 * config.hidden_size, config.hidden_size)
        self.midlayer = EagleLayer(config)

    @classmethod
    def build(cls, target: Any, **options: Any) -> Eagle:
        """An untrained drafter; the scales of the target's features and embeddings are measured.

        Raises: ValueError if an option does not fit.
        """
        config = EagleConfig(**{**sizes_of(target), **options})
        drafter = cls(config, draft_vocabulary(target, config.draft_vocab_size))
        found = sample_features(target, cls.needs)
        assert found.final is not None
        drafter.feature_scale.copy_(_inverse_size(found.final))
        drafter.embedding_scale.copy_(_inverse_size(target.embed(found.input_ids)))
        return drafter

    def fuse(self, features: TargetFeatures) -> Tensor:
        """The features [B, T, H], scaled; in training with noise, from the generator that the run seeds and saves."""
        assert features.final is not None
        scaled = self._ready(features.final * self.feature_scale.to(features.final.dtype))
        if not self.training or not self.config.noise:
            return scaled
        return scaled + (2 * torch.rand_like(scaled) - 1) * self.config.noise

    def join(self, embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """[B, N, H] twice -> one state [B, N, H], which is residual stream and attention's input."""
        scaled = embedding * self.embedding_scale.to(embedding.dtype)
        joined = self.fc(torch.cat((scaled, state), dim=-1))
        return joined, joined

    def compare(self, supervision: Supervision, level: int, output: Tensor, teacher: Teacher) -> LevelResult:
        config, dtype = self.config, supervision.feature.dtype

        def logits_at(rows: Tensor, index: Tensor) -> Tensor:
            return teacher.logits(self._feature(output[rows, index]).to(dtype))

        weigh = TopWeighted(config.logit_weight, config.top_k_weight, config.top_k_loss or 0)
        result = compare_level(supervision, level, logits_at, weigh)
        distance = feature_distance(supervision, level, output, self.feature_scale)
        result.loss = result.loss + config.feature_weight * distance
        return result

    def draft_logits(self, output: Tensor, target: Any) -> Tensor:
        return target.teacher(self.draft_ids).logits(self._feature(output))

    def _feature(self, output: Tensor) -> Tensor:
        """The layer's output in the target's own units."""
        return output / self.feature_scale.to(output.dtype)


def _inverse_size(values: Tensor) -> Tensor:
    """One over the root mean square of all values, as a power of two: exact in every dtype, and there and back."""
    return torch.exp2(-values.float().square().mean().sqrt().clamp(min=1e-8).log2().round()).cpu()
