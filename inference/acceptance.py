"""The rule by which a decoder takes draft tokens: lossless, or typical, which is not.

B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from headsmith.heads.tree import DraftTree
from torch import Tensor

from .builder import TreeBuilder
from .verify import (
    NonFiniteLogitsError,
    Verified,
    inverse_cdf,
    uniforms_needed,
    verify_greedy,
    verify_lossless,
    verify_typical,
)


@dataclass(frozen=True)
class Acceptance:
    """A rule and its thresholds.

    Args:
        rule: `lossless` or `typical`.
        thresholds: epsilon and delta of typical acceptance, where they are not the paper's.
    Raises: ValueError for an unknown rule or thresholds that do not belong to it.
    """

    rule: str = "lossless"
    thresholds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rule not in ("lossless", "typical"):
            raise ValueError(f"acceptance is 'lossless' or 'typical', not {self.rule!r}")
        if self.rule == "lossless" and self.thresholds:
            raise ValueError(f"{', '.join(self.thresholds)} belong to acceptance='typical'; lossless has no threshold")
        wrong = {name: value for name, value in self.thresholds.items() if not value > 0}
        if wrong:
            raise ValueError(f"the thresholds of typical acceptance are above 0, not {wrong}")

    def check(self, builder: TreeBuilder) -> None:
        """Raises: ValueError if the tree's children are not of the kind that the rule takes."""
        if self.rule == "typical" and getattr(builder, "sampled", False):
            raise ValueError(
                "typical acceptance takes the drafter's best tokens, and this tree samples its children; use a tree of "
                "fixed children, or acceptance='lossless'"
            )

    def __call__(self, tree: DraftTree, scores: Tensor, sample: bool, generator: torch.Generator | None) -> Verified:
        """What is kept of a tree, given the target's processed scores [B, N, V]."""
        if not sample:
            best = scores.max(-1)
            if not bool(torch.isfinite(best.values).all()):
                raise NonFiniteLogitsError(_non_finite(best.values, tree.valid()))
            return verify_greedy(tree, best.indices)
        probabilities = (scores if scores.dtype == torch.float64 else scores.float()).softmax(-1)
        shape = (tree.tokens.shape[0], uniforms_needed(tree))
        uniforms = torch.rand(shape, dtype=torch.float64, device=scores.device, generator=generator)
        if self.rule == "lossless":
            return verify_lossless(tree, probabilities, uniforms)
        choices = inverse_cdf(probabilities.flatten(0, 1), uniforms.flatten()).view(tree.tokens.shape)
        return verify_typical(tree, probabilities, choices, **self.thresholds)


def _non_finite(values: Tensor, valid: Tensor) -> str:
    row, node = (~torch.isfinite(values)).nonzero()[0].tolist()
    real = "" if bool(valid[row, node]) else " (a padding node)"
    return (
        f"the target's logits are not finite in row {row}, node {node}{real}; try another dtype, or look for a "
        "processor that forbids every token"
    )
