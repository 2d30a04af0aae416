"""A run that certifies itself: a first difference from plain decoding must be a tie of the dtype, or it is an error.

B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from headsmith.heads.target import Target
from torch import Tensor


class CertificationError(RuntimeError):
    """An answer departs from plain decoding where the target was not undecided: a defect, not rounding."""


@dataclass(frozen=True)
class Difference:
    """The first token in which a row departs from plain decoding.

    Args:
        row, token: where, counted from the first new token.
        plain, found: token ids; None where a text had ended.
        margin: how far apart the logits of the two are in the finer dtype.
        bound: twice the largest error that the target's own dtype makes in the logits there; a smaller margin is a tie.
    """

    row: int
    token: int
    plain: int | None
    found: int | None
    margin: float
    bound: float

    @property
    def is_tie(self) -> bool:
        return self.margin <= self.bound

    def __str__(self) -> str:
        return (
            f"row {self.row}, new token {self.token}: plain decoding says {self.plain}, found {self.found}; "
            f"their logits are {self.margin:.4g} apart, a tie is at most {self.bound:.4g}"
        )


@dataclass(frozen=True)
class Certificate:
    """How many rows were compared over their full length, and where they first differ (all of it ties)."""

    rows: int
    differences: tuple[Difference, ...]

    @property
    def identical(self) -> int:
        return self.rows - len(self.differences)

    def __str__(self) -> str:
        text = f"{self.identical} of {self.rows} rows are plain decoding's, token for token"
        return "; ".join([text, *(f"a tie in {difference}" for difference in self.differences)])


def certify(
    target: Target, prompts: Sequence[Tensor], found: Sequence[list[int]], plain: Sequence[list[int]]
) -> Certificate:
    """Compare answers, row by row, over their full length.

    Where they differ, the target is run once more in a finer dtype (float32; float64 for a float32 target), on a copy
    made for it: memory for that copy is needed.

    Args:
        prompts: B prompts [T], without padding.
        found, plain: the new tokens of each row.
    Raises: CertificationError at a first difference that is not a tie.
    """
    finer = Finer(target)
    differences = []
    for row, (prompt, ours, theirs) in enumerate(zip(prompts, found, plain, strict=True)):
        if ours == theirs:
            continue
        difference = finer.difference(row, first_difference(ours, theirs), prompt, ours, theirs)
        if not difference.is_tie:
            raise CertificationError(f"not plain decoding's answer in {difference}")
        differences.append(difference)
    return Certificate(len(found), tuple(differences))


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """The first place where two texts differ: the length of the shorter one, if that is how the other begins."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))


class Finer:
    """The target in a finer dtype, made when it is first asked."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._model: Any = None

    @torch.inference_mode()
    def difference(self, row: int, place: int, prompt: Tensor, ours: list[int], theirs: list[int]) -> Difference:
        a = ours[place] if place < len(ours) else None
        b = theirs[place] if place < len(theirs) else None
        if a is None or b is None:  # one text ended without a token to differ in
            return Difference(row, place, b, a, float("inf"), 0.0)
        ids = torch.cat((prompt, torch.tensor(theirs[:place], dtype=prompt.dtype, device=prompt.device)))[None]
        coarse = self.target.model(input_ids=ids, use_cache=False).logits[0, -1].double()
        fine = self._finer()(input_ids=ids, use_cache=False).logits[0, -1].double()
        bound = 2 * float((coarse - fine).abs().max())
        return Difference(row, place, b, a, float((fine[a] - fine[b]).abs()), bound)

    def _finer(self) -> Any:
        if self._model is None:
            dtype = torch.float64 if self.target.dtype == torch.float32 else torch.float32
            self._model = cast(Any, copy.deepcopy(self.target.model)).to(dtype)
        return self._model
