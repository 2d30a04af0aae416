"""What each row of a decode has said so far, and when it ends.

B rows, T prompt tokens, M tokens of one round.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .options import DecodingOptions


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


class Rows:
    """Answers of a batch: tokens are pushed one by one, so that EOS and length cut exactly where generate() cuts."""

    def __init__(self, input_ids: Tensor, lengths: Tensor, options: DecodingOptions, streamer: Any = None) -> None:
        if streamer is not None and input_ids.shape[0] > 1:
            raise ValueError(f"a streamer shows one row, not {input_ids.shape[0]}; decode the prompts one by one")
        self.input_ids = input_ids
        self.options = options
        self.limit = options.new_tokens(input_ids.shape[1])
        self.answers: list[list[int]] = [[] for _ in range(input_ids.shape[0])]
        self.ended = [self.limit == 0] * input_ids.shape[0]
        self.active = torch.tensor([not end for end in self.ended], device=input_ids.device)
        self.active_before = self.active
        self.streamer = streamer
        if streamer is not None:
            streamer.put(input_ids.cpu())

    @property
    def batch(self) -> int:
        return len(self.answers)

    @property
    def finished(self) -> bool:
        return all(self.ended)

    def push(self, tokens: Tensor, counts: Tensor) -> list[int]:
        """Append each row's first `counts` [B] of `tokens` [B, M]; return how many each row took before it ended."""
        self.active_before = self.active
        taken = [0] * self.batch
        for row, (new, count) in enumerate(zip(tokens.tolist(), counts.tolist())):
            for token in new[:count]:
                if self.ended[row]:
                    break
                self.answers[row].append(token)
                taken[row] += 1
                if self.streamer is not None:
                    self.streamer.put(torch.tensor([token]))
                self.ended[row] = token in self.options.eos or len(self.answers[row]) >= self.limit
        self.active = torch.tensor([not end for end in self.ended], device=self.input_ids.device)
        return taken

    def end(self) -> None:
        if self.streamer is not None:
            self.streamer.end()

    def sequences(self) -> Tensor:
        """[B, T + longest answer], padded as generate() pads."""
        longest = max(len(answer) for answer in self.answers)
        padded = [answer + [self.options.pad] * (longest - len(answer)) for answer in self.answers]
        new = torch.tensor(padded, dtype=self.input_ids.dtype, device=self.input_ids.device)
        return torch.cat((self.input_ids, new.view(self.batch, longest)), 1)
