"""What trained drafters are compared with, and by what: pure functions of logits.

B rows, T tokens, P supervised positions, H hidden, V_d draft vocabulary, J levels, K ranks counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .drafter import HeadLoss, TargetFeatures, Teacher

CHUNK = 128  # positions compared at a time: their logits stay in the processor's cache
RANKS = 10  # hits are counted among the best 1..RANKS


@dataclass
class Supervision:
    """The positions that are learned, with the target's word at each.

    Position s is supervised where the target wrote the token after it (`loss_mask[s + 1]`). Level j is compared there
    with the drafter's output at t = s - 1 - j: it has seen the token at t + 1 and predicts the one at t + 2 + j.

    Args:
        row, position: [P] indices b and s.
        feature: [P, H] the target's feature at s, after its final norm, which the logits are made of.
        logits: [P, V_d] the target's logits after s: its distribution, renormalised over the draft vocabulary.
        top: [P] draft id of the target's most likely token, -1 where it lies outside the draft vocabulary.
    """

    row: Tensor
    position: Tensor
    feature: Tensor
    logits: Tensor
    top: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, features: TargetFeatures, teacher: Teacher, draft_ids: Tensor | None) -> Supervision:
        """Collect the supervised positions of a batch and ask the teacher about them."""
        assert features.loss_mask is not None and features.final is not None and features.top is not None
        row, following = features.loss_mask[:, 1:].nonzero(as_tuple=True)
        final = features.final[row, following]
        with torch.autocast(final.device.type, enabled=False):  # the teacher speaks in the target's own dtype
            logits = teacher.logits(final)
        return cls(row, following, final, logits, _to_draft(features.top[row, following], draft_ids))

    def at_level(self, level: int) -> tuple[Tensor, Tensor]:
        """[P] bool: which positions a level can predict; [P] the drafter's index t for each (0 where it cannot)."""
        index = self.position - 1 - level
        return index >= 0, index.clamp(min=0)


def _to_draft(tokens: Tensor, draft_ids: Tensor | None) -> Tensor:
    """Token ids -> draft ids, -1 where a token is not drafted. `draft_ids` is sorted."""
    if draft_ids is None:
        return tokens
    place = torch.searchsorted(draft_ids, tokens.contiguous()).clamp(max=len(draft_ids) - 1)
    return torch.where(draft_ids[place] == tokens, place, -1)


@dataclass(frozen=True)
class TopWeighted:
    """What of the target's distribution is learned where not all tokens count alike (HASS, arXiv:2408.15766).

    The loss is -Σ_x w(x) p(x) log q(x); w is `everywhere` for all tokens, `top` more for the target's `best` most
    likely ones. p is not normalised again over these, so that a sure target weighs more.
    """

    everywhere: float
    top: float
    best: int

    def __call__(self, target: Tensor) -> Tensor:
        """[n, V_d] probabilities -> the same times their weights."""
        weighted = target * self.everywhere
        if self.best:
            values, ids = target.topk(min(self.best, target.shape[-1]), dim=-1)
            weighted.scatter_add_(-1, ids, values * self.top)
        return weighted


class SoftCrossEntropy(torch.autograd.Function):
    """Σ over positions of the cross entropy between the teacher's distribution and the drafter's.

    One pass in cache-sized chunks gives loss, gradient and ranks together: over a whole vocabulary, memory traffic is
    what costs. The gradient is softmax(student) - softmax(teacher); with weights the teacher's part is weighted, and
    the student's is multiplied by the sum of that.
    """

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, top: Tensor, weigh: TopWeighted | None = None
    ) -> tuple[Tensor, Tensor]:
        """[P, V_d] logits twice and [P] draft ids -> the sum, and the [P] rank (0 best) the drafter gives each id."""
        gradient = torch.empty_like(student)
        ranks = torch.empty_like(top)
        total = torch.zeros((), dtype=torch.float32, device=student.device)
        for start in range(0, len(student), CHUNK):
            part = slice(start, start + CHUNK)
            logits = student[part].float()
            target = teacher[part].float().softmax(-1)
            own = logits.gather(1, top[part].clamp(min=0)[:, None])
            ranks[part] = torch.where(top[part] < 0, logits.shape[1], (logits > own).sum(-1))
            logq = logits.log_softmax(-1)
            if weigh is not None:
                target = weigh(target)
            total -= torch.dot(target.flatten(), logq.flatten())
            drafted = logq.exp_()
            if weigh is not None:
                drafted *= target.sum(-1, keepdim=True)
            gradient[part] = drafted.sub_(target)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(ranks)
        return total, ranks

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None


@dataclass
class LevelResult:
    """One level compared: summed loss, positions, ranks [P] (-1 where the level predicts nothing)."""

    loss: Tensor
    count: Tensor
    ranks: Tensor


def compare_level(
    supervision: Supervision, level: int, logits_at: Any, weigh: TopWeighted | None = None
) -> LevelResult:
    """Compare one level at every supervised position it can predict.

    Args:
        logits_at: (rows [P'], indices [P']) -> [P', V_d] the drafter's logits there.
        weigh: tokens that count more than others; None: all alike.
    """
    usable, index = supervision.at_level(level)
    everywhere = torch.full_like(supervision.top, -1)
    # Nearly always every position is usable, and a view then spares a copy of the teacher's logits.
    part = slice(None) if bool(usable.all()) else usable
    student = logits_at(supervision.row[part], index[part])
    loss, everywhere[part] = SoftCrossEntropy.apply(student, supervision.logits[part], supervision.top[part], weigh)
    return LevelResult(loss, usable.sum(), everywhere)


def feature_distance(supervision: Supervision, level: int, predicted: Tensor, scale: Tensor) -> Tensor:
    """Σ over positions of the smooth L1 distance, a mean over H, of predicted features from the target's.

    Args:
        predicted: [B, T, H] the drafter's output of this level, in units where a feature's size is about 1.
        scale: what the target's features are multiplied by to be in the same units.
    """
    usable, index = supervision.at_level(level)
    found = predicted[supervision.row[usable], index[usable]].float()
    wanted = supervision.feature[usable].float() * scale
    return F.smooth_l1_loss(found, wanted, reduction="sum") / predicted.shape[-1]


def head_loss(results: list[LevelResult], supervision: Supervision, decay: float) -> HeadLoss:
    """Gather the levels: level j weighs decay^j."""
    ranks = torch.stack([result.ranks for result in results])
    hits = torch.stack([((ranks >= 0) & (ranks < k)).sum(1) for k in range(1, RANKS + 1)], 1)
    device = ranks.device
    return HeadLoss(
        loss=torch.stack([result.loss for result in results]),
        weight=decay ** torch.arange(len(results), device=device),
        count=torch.stack([result.count for result in results]),
        hits=hits,
        joint=_joint(ranks, supervision),
    )


def _joint(ranks: Tensor, supervision: Supervision) -> Tensor:
    """[J] how often the levels 0..j drafted from one index t were all right: level i of it is judged at s + i.

    Supervised positions are listed in order, so the one i places on is s + i exactly if it is in the same row.
    """
    levels, positions = ranks.shape
    key = supervision.row * (1 << 32) + supervision.position
    right = torch.ones(positions, dtype=torch.bool, device=ranks.device)
    counts = []
    for level in range(levels):
        shifted = torch.full((positions,), -1, dtype=ranks.dtype, device=ranks.device)
        same = torch.zeros(positions, dtype=torch.bool, device=ranks.device)
        if level < positions:
            shifted[: positions - level] = ranks[level, level:]
            same[: positions - level] = key[level:] == key[: positions - level] + level
        right = right & same & (shifted == 0)
        counts.append(right.sum())
    return torch.stack(counts)
