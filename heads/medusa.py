"""Medusa heads: K small networks on the last feature, head k guessing the token k + 2 places on (arXiv:2401.10774).

B rows, T tokens, M newly verified positions, W expanded nodes, H hidden, K heads, V_d draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .checkpoint import SavedDrafter
from .drafter import DraftState, HeadLoss, Needs, Proposal, TargetFeatures, Teacher, last_valid, register
from .layers import Linear
from .losses import Supervision, compare_level, head_loss
from .vocabulary import draft_vocabulary


@dataclass(frozen=True)
class MedusaConfig:
    """Sizes of a set of Medusa heads.

    Args:
        num_heads: K; level k is drafted by head k.
        num_layers: residual blocks a head.
        lm_head: `own`: every head has an output layer of its own, started from the target's; `shared`: all use the
            target's, frozen.
        draft_vocab_size: V_d, the lowest token ids; None for all.
        loss_decay: head k weighs loss_decay^k.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_layers: int = 1
    lm_head: str = "own"
    draft_vocab_size: int | None = None
    loss_decay: float = 0.8

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.num_layers < 1:
            raise ValueError(f"num_heads and num_layers are at least 1, not {self.num_heads}, {self.num_layers}")
        if self.lm_head not in ("own", "shared"):
            raise ValueError(f"lm_head is 'own' or 'shared', not {self.lm_head!r}")


class ResidualBlock(nn.Module):
    """x + SiLU(linear(x)); the linear starts at zero, so that a new head says what the target itself says."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class ResidualHeads(SavedDrafter):
    """K heads of residual blocks with an output layer each: Medusa's, and Hydra's behind inputs of their own."""

    def __init__(self, config: MedusaConfig, draft_ids: Tensor | None = None) -> None:
        super().__init__(config, draft_ids)
        size = config.vocab_size if draft_ids is None else len(draft_ids)
        heads = range(config.num_heads)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(config.hidden_size) for _ in range(config.num_layers))) for _ in heads
        )
        self.lm_heads = nn.ModuleList(
            Linear(config.hidden_size, size, bias=False) for _ in heads if config.lm_head == "own"
        )

    @classmethod
    def build(cls, target: Any, **options: Any) -> Any:
        """Untrained heads for a target; every output layer starts as a copy of the target's."""
        sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
        config = cls.config_class(**{**sizes, **options})
        draft_ids = draft_vocabulary(target, config.draft_vocab_size)
        drafter = cls(config, draft_ids)
        weight = target.head_weight(draft_ids)
        with torch.no_grad():
            for parameter in drafter.lm_heads.parameters():
                parameter.copy_(weight)
        return drafter

    @property
    def max_depth(self) -> int:
        return self.config.num_heads

    def _ready(self, feature: Tensor) -> Tensor:
        """What comes from the target in the dtype that the weights compute in."""
        return feature if torch.is_autocast_enabled(feature.device.type) else feature.to(self.dtype)

    def _head(self, level: int, x: Tensor, teacher: Teacher, dtype: torch.dtype) -> Tensor:
        """[..., H] what a head's blocks read, of a feature's size -> [..., V_d]; `dtype` is the target's."""
        hidden = self.blocks[level](x)
        return self.lm_heads[level](hidden) if len(self.lm_heads) else teacher.logits(hidden.to(dtype))


@dataclass
class MedusaState(DraftState):
    """Scores of all heads from the last observed feature, [B, K, V_d], and the level of every expanded node."""

    scores: Tensor | None = None
    level: Tensor | None = None


@register("medusa")
class Medusa(ResidualHeads):
    """K Medusa heads. All are evaluated in `observe`; `expand` only looks up the next level's scores."""

    config_class = MedusaConfig
    needs = Needs(final=True, positions="last")

    def forward(self, features: TargetFeatures, teacher: Teacher, steps: int | None = None) -> HeadLoss:
        """Loss of all heads over a batch; `steps` is for drafters that unroll and is ignored."""
        supervision = Supervision.of(features, teacher, self.draft_ids)
        assert features.final is not None
        final = features.final

        def result(level: int) -> Any:
            def logits_at(rows: Tensor, index: Tensor) -> Tensor:
                return self._logits(level, final[rows, index], teacher)

            return compare_level(supervision, level, logits_at)

        results = [result(level) for level in range(self.config.num_heads)]
        return head_loss(results, supervision, self.config.loss_decay)

    def _logits(self, level: int, feature: Tensor, teacher: Teacher) -> Tensor:
        return self._head(level, self._ready(feature), teacher, feature.dtype)

    def start(self, session: Any, input_ids: Tensor, lengths: Tensor) -> MedusaState:
        return MedusaState(session, input_ids.shape[0])

    def observe(
        self, state: MedusaState, features: TargetFeatures | None, next_tokens: Tensor, counts: Tensor
    ) -> Proposal:
        assert features is not None and features.final is not None
        feature = last_valid(features.final, counts)
        teacher = state.session.target.teacher(self.draft_ids)
        levels = [self._logits(k, feature, teacher).float().log_softmax(-1) for k in range(self.config.num_heads)]
        state.scores = torch.stack(levels, 1)
        state.level = torch.zeros(state.batch, 1, dtype=torch.long, device=feature.device)
        return Proposal(state.scores[:, :1])

    def rewind(self, state: MedusaState, lengths: Tensor) -> None:
        """Nothing is kept of a text but its last feature, which is observed anew."""

    def expand(self, state: MedusaState, parents: Tensor, tokens: Tensor, valid: Tensor) -> Proposal:
        assert state.scores is not None and state.level is not None
        level = state.level.gather(1, parents) + 1
        state.level = torch.cat((state.level, level), 1)
        rows = torch.arange(state.batch, device=level.device)[:, None]
        return Proposal(state.scores[rows, level.clamp(max=self.config.num_heads - 1)])
