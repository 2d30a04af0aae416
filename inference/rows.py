"""What each row of a decode has said so far, and when it ends.

B rows, T prompt tokens, M tokens of one round, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .options import DecodingOptions
from .sampling import Texts
from .verify import Verified


def right_padded(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Strip padding on either side: prompts [B, T'] padded on the right, and their lengths [B].

    Raises: ValueError for an empty row or a mask with holes.
    """
    if attention_mask is None:
        lengths = torch.full((input_ids.shape[0],), input_ids.shape[1], device=input_ids.device)
        mask = torch.ones_like(input_ids, dtype=torch.bool)
    else:
        mask = attention_mask.bool()
        lengths = mask.sum(1)
    if not bool((lengths > 0).all()):
        raise ValueError("a prompt has no tokens; every row needs at least one")
    starts = mask.long().argmax(1)
    index = starts[:, None] + torch.arange(int(lengths.max()), device=input_ids.device)
    inside = index < (starts + lengths)[:, None]
    if not bool(mask.gather(1, index.clamp(max=input_ids.shape[1] - 1))[inside].all()):
        raise ValueError("an attention mask has holes; only padding on the left or the right is understood")
    picked = input_ids.gather(1, index.clamp(max=input_ids.shape[1] - 1))
    return torch.where(inside, picked, picked[:, :1]), lengths


@dataclass
class Steps:
    """What a round's tokens were chosen from: [B, M, V] processed scores and raw logits."""

    scores: Tensor
    logits: Tensor


class Rows:
    """Answers of a batch: tokens are pushed one by one, so that every criterion cuts exactly where generate() cuts.

    Args:
        input_ids: [B, T] the prompts as given.
        prompts: [B, T'] the same, padded on the right.
        lengths: [B] their tokens.
        streamer: gets the calls of single-row generate(): the prompt, each token, the end.
    """

    def __init__(
        self, input_ids: Tensor, prompts: Tensor, lengths: Tensor, options: DecodingOptions, streamer: Any = None
    ) -> None:
        if streamer is not None and input_ids.shape[0] > 1:
            raise ValueError(f"a streamer shows one row, not {input_ids.shape[0]}; decode the prompts one by one")
        self.input_ids = input_ids
        self.options = options
        self.prompted: list[int] = lengths.tolist()
        self.answers: list[list[int]] = [[] for _ in range(input_ids.shape[0])]
        self.kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.answers]  # (scores [V], logits [V]) a token
        self.ended = [False] * input_ids.shape[0]
        self.active = torch.ones_like(lengths, dtype=torch.bool)
        self.active_before = self.active
        reads_text = options.processors.reads_text or options.criteria
        self.texts = Texts.of(prompts, lengths, options.limits) if reads_text else None
        self.streamer = streamer
        if streamer is not None:
            streamer.put(input_ids.cpu())

    @property
    def batch(self) -> int:
        return len(self.answers)

    @property
    def limit(self) -> int:
        """The most tokens that any row may say."""
        return max(self.options.limits)

    @property
    def finished(self) -> bool:
        return all(self.ended)

    def steps(self, logits: Tensor, scores: Tensor, verified: Verified) -> Steps | None:
        """What the path's tokens were chosen from, of [B, N, V], where the caller wants to see it."""
        if not (self.options.scores or self.options.logits):
            return None
        rows = torch.arange(self.batch, device=logits.device)[:, None]
        return Steps(scores[rows, verified.path].float(), logits[rows, verified.path].float())

    def push(self, tokens: Tensor, counts: Tensor, steps: Steps | None = None) -> list[int]:
        """Append each row's first `counts` [B] of `tokens` [B, M]; return how many each row took before it ended."""
        self.active_before = self.active
        if self.texts is not None:
            self.texts.write(tokens)
        taken = [0] * self.batch
        for row, (new, count) in enumerate(zip(tokens.tolist(), counts.tolist())):
            for place, token in enumerate(new[:count]):
                if self.ended[row]:
                    break
                self.answers[row].append(token)
                taken[row] += 1
                if steps is not None:
                    self.kept[row].append((steps.scores[row, place], steps.logits[row, place]))
                # Asked even where the token is an EOS: generate() asks every criterion after every token.
                stopped = bool(self.options.criteria) and self._stopped(row)
                full = len(self.answers[row]) >= self.options.limits[row]
                self.ended[row] = stopped or full or token in self.options.eos
                if self.streamer is not None:
                    self.streamer.put(torch.tensor([token]))
        if self.texts is not None:
            self.texts.lengths = self.texts.lengths + torch.tensor(taken, device=tokens.device)
        self.active = torch.tensor([not end for end in self.ended], device=self.input_ids.device)
        return taken

    def _stopped(self, row: int) -> bool:
        """Whether a criterion ends this row at the token just appended."""
        assert self.texts is not None
        text = self.texts.tokens[row : row + 1, : self.prompted[row] + len(self.answers[row])]
        scores = tuple(scores[None] for scores, _ in self.kept[row]) if self.options.scores else None
        return bool(self.options.criteria(text, scores).all())  # type: ignore[arg-type]

    def end(self) -> None:
        if self.streamer is not None:
            self.streamer.end()

    def sequences(self) -> Tensor:
        """[B, T + longest answer], padded as generate() pads."""
        longest = max(len(answer) for answer in self.answers)
        padded = [answer + [self.options.pad] * (longest - len(answer)) for answer in self.answers]
        new = torch.tensor(padded, dtype=self.input_ids.dtype, device=self.input_ids.device)
        return torch.cat((self.input_ids, new.view(self.batch, longest)), 1)

    def scores(self) -> tuple[Tensor, ...] | None:
        """[B, V] processed scores a step, zero where a row had ended; None unless asked for."""
        return self._stacked(0) if self.options.scores else None

    def logits(self) -> tuple[Tensor, ...] | None:
        """[B, V] raw logits a step, zero where a row had ended; None unless asked for."""
        return self._stacked(1) if self.options.logits else None

    def _stacked(self, which: int) -> tuple[Tensor, ...]:
        return by_step([[kept[which] for kept in row] for row in self.kept])


def by_step(rows: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """[B, V] a step of what B rows of unequal lengths have a step, [V]; zero where a row had ended."""
    nothing = torch.zeros_like(rows[0][0])
    longest = max(map(len, rows))
    return tuple(torch.stack([row[step] if step < len(row) else nothing for row in rows]) for step in range(longest))
