"""The slots that answers are written in: one token a step for all of them, refilled as their texts end.

n rows in use, T prompt tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from headsmith.heads.drafter import last_valid
from headsmith.inference.engine import Session
from headsmith.inference.verify import NonFiniteLogitsError, inverse_cdf
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

_PREFILL_TOKENS = 512  # of one prefill, padding included, unless a prompt alone is longer
_NUCLEUS = 256  # most likely tokens that are looked at before the whole vocabulary is sorted
_BLOCK = 128  # tokens of one block in `draw`


@dataclass(frozen=True)
class Request:
    """One text to be written.

    Args:
        key: what the caller knows it by; not looked at.
        prompt: token ids.
        limit: most new tokens, at least 1.
        stops: token ids that end it; the one written belongs to the text.
        temperature: 0 is greedy.
        top_p: 1 keeps every token.
        seed: of this text's own random numbers, so that it is the same in every slot and company.
    """

    key: Any
    prompt: list[int]
    limit: int
    stops: frozenset[int]
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Finished:
    """A text and why it ended: "stop" at one of its stop tokens, else "length"."""

    request: Request
    tokens: list[int]
    reason: str


@dataclass(eq=False)
class _Row:
    request: Request
    uniforms: Tensor
    tokens: list[int] = field(default_factory=list)
    reason: str = ""

    def push(self, token: int) -> None:
        self.tokens.append(token)
        if token in self.request.stops:
            self.reason = "stop"
        elif len(self.tokens) >= self.request.limit:
            self.reason = "length"


class Slots:
    """Texts in progress on a `Session` of the engine.

    They always stand in the session's first rows, so a step computes no idle slot.
    """

    def __init__(self, session: Session, size: int) -> None:
        self.session = session
        self.size = size
        self.tokens = 0  # written so far, in finished and unfinished texts
        self._rows: list[_Row] = []

    @property
    def busy(self) -> int:
        return len(self._rows)

    @property
    def free(self) -> int:
        return self.size - len(self._rows)

    def add(self, requests: Sequence[Request]) -> None:
        """Prefill free slots with these prompts and write each text's first token.

        Several at once are cheaper than one by one: a short prompt is bound by reading the weights.
        """
        if len(requests) > self.free:
            raise ValueError(f"{len(requests)} requests for {self.free} free slots of {self.size}; step() first")
        for group in _alike(requests):
            self._prefill([_Row(request, _uniforms(request)) for request in group])

    def _prefill(self, rows: list[_Row]) -> None:
        prompts = [torch.tensor(row.request.prompt) for row in rows]
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.session.lengths.device)
        padded = pad_sequence(prompts, batch_first=True).to(lengths.device)
        start = len(self._rows)
        output = self.session.prefill(padded, lengths, rows=slice(start, start + len(rows)))
        self._rows += rows
        self._push(rows, self.session.logits(last_valid(output.final, lengths)))

    def step(self) -> list[Finished]:
        """Write one token in every slot; return the texts that ended, whose slots are free from now on."""
        if ended := self._release():  # their first token was their last
            return ended
        if not self._rows:
            return []
        device = self.session.lengths.device
        last = torch.tensor([[row.tokens[-1]] for row in self._rows], device=device)
        used = slice(0, len(self._rows))
        output = self.session.forward(last, rows=used)
        self.session.commit(torch.zeros_like(last), torch.ones_like(last[:, 0]), rows=used)
        self._push(self._rows, self.session.logits(output.final[:, 0]))
        return self._release()

    def _push(self, rows: Sequence[_Row], logits: Tensor) -> None:
        for row, token in zip(rows, _choose(rows, logits).tolist()):
            row.push(token)
        self.tokens += len(rows)

    def _release(self) -> list[Finished]:
        ended = []
        for index in reversed(range(len(self._rows))):
            row = self._rows[index]
            if row.reason:
                ended.append(Finished(row.request, row.tokens, row.reason))
                last = self._rows.pop()
                if last is not row:  # it takes the place: copying a row costs far less than a step with a gap
                    self.session.cache.move(len(self._rows), index)
                    self._rows[index] = last
        return ended


def _alike(requests: Sequence[Request]) -> Iterator[list[Request]]:
    """Groups of like length, so that little is padding, and of bounded size: masks grow as its square."""
    group: list[Request] = []
    for request in sorted(requests, key=lambda request: len(request.prompt)):
        if group and (len(group) + 1) * len(request.prompt) > _PREFILL_TOKENS:
            yield group
            group = []
        group.append(request)
    if group:
        yield group


def _uniforms(request: Request) -> Tensor:
    """[limit, 2] random numbers, a pair for each token that may be written."""
    generator = torch.Generator().manual_seed(request.seed)
    return torch.rand(request.limit if request.temperature > 0 else 0, 2, generator=generator)


def _choose(rows: Sequence[_Row], logits: Tensor) -> Tensor:
    """The next token [n] of each row, from logits [n, V].

    Raises: NonFiniteLogitsError naming the request.
    """
    best = logits.max(-1)  # several times quicker than argmax on bf16
    finite = torch.isfinite(best.values)
    if not bool(finite.all()):
        key = rows[finite.tolist().index(False)].request.key
        raise NonFiniteLogitsError(f"the target's logits are not finite in {key}; try another dtype")
    sampled = [index for index, row in enumerate(rows) if row.request.temperature > 0]
    if not sampled:
        return best.indices
    where = torch.tensor(sampled, device=logits.device)
    requests = [rows[index].request for index in sampled]
    laws = torch.tensor([(r.temperature, r.top_p) for r in requests], device=logits.device)
    uniforms = torch.stack([rows[index].uniforms[len(rows[index].tokens)] for index in sampled])
    scores = logits[where].float().sub_(best.values[where, None]).div_(laws[:, :1])
    mass = scores.exp_()
    narrow = laws[:, 1] < 1
    if bool(narrow.any()):
        mass[narrow] = nucleus(mass[narrow], laws[narrow, 1])
    return best.indices.index_put((where,), draw(mass, uniforms.to(mass.device)))


def draw(mass: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a token [n] from each row of mass [n, V], which need not sum to 1; uniforms [n, 2] in [0, 1).

    First a block of the vocabulary, then a token in it: a sum over V is much quicker than a running one.
    """
    mass = F.pad(mass, (0, -mass.shape[1] % _BLOCK))
    blocks = mass.view(mass.shape[0], -1, _BLOCK)
    block = inverse_cdf(blocks.sum(-1), uniforms[:, 0])
    inside = blocks[torch.arange(len(blocks), device=mass.device), block]
    return block * _BLOCK + inverse_cdf(inside, uniforms[:, 1])


def nucleus(mass: Tensor, top_p: Tensor) -> Tensor:
    """Keep of each row of mass [n, V] the fewest likeliest tokens whose share reaches top_p [n]; else 0."""
    wanted = top_p * mass.sum(-1)
    for size in (min(_NUCLEUS, mass.shape[1]), mass.shape[1]):
        top = mass.topk(size)
        reach = top.values.cumsum(-1)
        if bool((reach[:, -1] >= wanted).all()):
            break  # as a rule at once: sorting the whole vocabulary takes longer than the model
    kept = reach - top.values < wanted[:, None]
    return torch.zeros_like(mass).scatter_(1, top.indices, top.values * kept)
