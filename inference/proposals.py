"""From a drafter's scores to tokens.

B rows, W expanded nodes, V_d draft vocabulary.
"""

from __future__ import annotations

import torch
from headsmith.heads.drafter import Proposal
from torch import Tensor


def best_children(proposal: Proposal, width: int, draft_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """The `width` best continuations of every node, [B, W, width] token ids and scores (-inf: none)."""
    scores, index = proposal.scores.topk(min(width, proposal.scores.shape[-1]), dim=-1)
    ids = to_tokens(index, draft_ids) if proposal.ids is None else proposal.ids.gather(-1, index)
    return pad_width(ids, scores, width)


def to_tokens(index: Tensor, draft_ids: Tensor | None) -> Tensor:
    return index if draft_ids is None else draft_ids[index]


def pad_width(ids: Tensor, scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    missing = width - ids.shape[-1]
    if missing <= 0:
        return ids, scores
    pad = (0, missing)
    return torch.nn.functional.pad(ids, pad), torch.nn.functional.pad(scores, pad, value=-torch.inf)
