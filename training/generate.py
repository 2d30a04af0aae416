"""The target writes the text its heads are trained on: answers to prompts, and the prompts too where asked.

    path = generate(load_recipe("smollm2-135m-eagle3"))

Answers are appended to a JSONL file one by one, so a run that was killed goes on where it stopped. What a
prompt is answered with depends on the recipe's seed and the prompt's id alone, not on order, batch or
interruptions (as far as the rounding of the kernels allows).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from headsmith.heads.target import Target
from headsmith.inference.engine import Session
from headsmith.inference.options import not_honoured
from headsmith.training.conversations import ChatEncoder, Dropped, normalise
from headsmith.training.prompts import Prompt, load_prompts, parse_synthesised, user_turn_opening
from headsmith.training.recipe import Recipe, RecipeError
from headsmith.training.slots import Finished, Request, Slots
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

SELF = "self"
_QUESTION_TOKENS = 256  # most tokens of a question that the target asks itself
_FRUITLESS = 200  # questions of its own in a row that came to nothing: then it cannot ask
_SYNC_SECONDS = 5.0  # what a power cut may lose
_LINE_SECONDS = 15.0  # between progress lines where there is no terminal
_OPENING = b'{"id": '  # of every record

log = logging.getLogger(__name__)


class AnswersError(ValueError):
    """The answers file cannot be continued; names file, line and remedy."""


@dataclass
class Summary:
    """What a call of `write_answers` did.

    Args:
        path: the answers file.
        before: records it held at the start.
        records: records added.
        tokens: tokens written for these, ends of turn included.
        computed: all tokens computed: also questions, dropped answers, and those cut off by the time limit.
        seconds: spent on answering, loading not counted.
        reasons: records by finish_reason.
        dropped: prompts that gave no record, by reason; a later call tries them again.
        retokenised: answers whose text is tokenised otherwise than the target wrote it.
        complete: every prompt was dealt with before time ran out.
    """

    path: Path
    before: int = 0
    records: int = 0
    tokens: int = 0
    computed: int = 0
    seconds: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    retokenised: int = 0
    complete: bool = False

    @property
    def tokens_per_second(self) -> float:
        return self.computed / self.seconds if self.seconds else 0.0

    @property
    def mean_tokens(self) -> float:
        return self.tokens / self.records if self.records else 0.0

    def __str__(self) -> str:
        ended = ", ".join(f"{count} {reason}" for reason, count in sorted(self.reasons.items()))
        lines = [
            f"{self.path}: {self.before + self.records} records, {self.records} of them new"
            + (f" ({ended}), {self.mean_tokens:.0f} tokens each" if self.records else ""),
            f"{self.computed:,} tokens in {self.seconds:.0f} s, {self.tokens_per_second:.0f} tokens/s",
        ]
        if self.retokenised:
            lines.append(f"{self.retokenised} answers are tokenised otherwise than they were written")
        lines += [f"dropped {count}: {reason}" for reason, count in self.dropped.most_common()]
        if not self.complete:
            lines.append("stopped by generate.minutes with prompts left; run the same command to go on")
        return "\n".join(lines)


def generate(recipe: Recipe, target: Target | None = None, progress: bool = True) -> Path:
    """Answer the recipe's prompts with its target; returns the answers file. See `write_answers`."""
    summary = write_answers(recipe, target, progress)
    if progress:
        Console(stderr=True).print(str(summary), markup=False, highlight=False)
    return summary.path


def write_answers(recipe: Recipe, target: Target | None = None, progress: bool = True) -> Summary:
    """Append an answer to `recipe.answers_path` for every prompt that has none there yet.

    Args:
        target: already loaded, else `recipe.target` is.
        progress: show it, on stderr.
    Raises:
        RecipeError: no prompts are named.
        AnswersError: the file was written by another target or template, is broken, or in use.
        ConversationError: the prompts cannot be read, or the target has no usable chat template.
    """
    if recipe.generate.prompts is None:
        raise RecipeError('generate.prompts is null, expected a JSONL file, "builtin" or "self"')
    target = target or _load(recipe)
    if target.tokenizer is None:
        raise ValueError(f"{target.name} came without a tokenizer; pass Target(model, tokenizer)")
    encoder = ChatEncoder(target.tokenizer, recipe.data.chat_template_kwargs)
    with AnswerFile(recipe.answers_path, target.fingerprint, encoder.fingerprint) as answers:
        return _Interview(recipe, target, encoder, answers).run(progress)


def _load(recipe: Recipe) -> Target:
    device_map = recipe.device_map
    if device_map is None and torch.accelerator.is_available():
        device_map = str(torch.accelerator.current_accelerator())
    return Target.from_pretrained(
        recipe.target, recipe.dtype, device_map, recipe.attn_implementation, recipe.trust_remote_code
    )


class AnswerFile:
    """The JSONL of answers: what it holds already, and how to append so that a crash costs one line at most.

    Args: target, template: fingerprints that every record has to carry.
    Raises: AnswersError.
    """

    def __init__(self, path: Path, target: str, template: str) -> None:
        self.path = path
        self.marks = {"target": target, "template_sha256": template}
        self.known: dict[str, str] = {}  # id -> digest of its first question
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 (closed by __exit__)
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise
        self._synced = time.monotonic()

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def has(self, identity: str, question: list[dict[str, Any]]) -> bool:
        """Is this prompt answered? Raises: AnswersError if its id stands for another prompt in the file."""
        if identity not in self.known:
            return False
        if self.known[identity] != _digest(question):
            raise AnswersError(
                f"{self.path} holds an answer to another prompt under the id {identity!r}; "
                "set another generate.output, or make the ids of your prompt files distinct"
            )
        return True

    def append(self, record: dict[str, Any]) -> None:
        """Write one record as one line with one call, so that no other writer or crash can split it."""
        line = json.dumps({**record, **self.marks}, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        if self._file.write(line) != len(line):
            raise OSError(f"{self.path}: a record was written in part, is the disk full? Run again to go on")
        self.known[record["id"]] = _digest(record["messages"])
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def _lock(self) -> None:
        with suppress(ImportError):  # Windows has no fcntl; there two runs on one file are not noticed
            import fcntl

            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise AnswersError(
                    f"{self.path} is being written by another process; wait for it, or set generate.output"
                ) from None

    def _read(self) -> None:
        """Note what is answered, and cut off a last line that a crash left unfinished."""
        good, broken, line = 0, "", b""
        with open(self.path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if broken:
                    raise AnswersError(f"{broken}, and not the last line; repair it or delete it")
                try:
                    record = json.loads(line if line.endswith(b"\n") else b"")
                except ValueError:
                    broken = f"{self.path}:{number} is not a whole JSON object"
                    continue
                self._note(record, f"{self.path}:{number}")
                good += len(line)
        if broken:
            if not (line.startswith(_OPENING) or _OPENING.startswith(line.strip(b"\0\n"))):
                raise AnswersError(f"{broken} and was not written here; set another generate.output")
            log.warning("%s: cut off, its prompt is answered again", broken)
            self._file.truncate(good)

    def _note(self, record: Any, where: str) -> None:
        if not isinstance(record, dict) or not {"id", "messages", *self.marks} <= record.keys():
            raise AnswersError(
                f"{where} is not a record of `headsmith generate`; set another generate.output, or remove {self.path}"
            )
        for key, expected in self.marks.items():
            if record[key] != expected:
                what = "target" if key == "target" else "chat template (or data.chat_template_kwargs)"
                raise AnswersError(
                    f"{where} was written with another {what}: {key} is {record[key]}, expected {expected}; "
                    f"set another generate.output, or remove {self.path}"
                )
        if record["id"] in self.known:
            raise AnswersError(f"{where} repeats the id {record['id']!r}; delete one of the two lines")
        self.known[record["id"]] = _digest(record["messages"])


def _digest(messages: list[dict[str, Any]]) -> str:
    """Of the first question, with what stands before it."""
    roles = [message["role"] for message in messages]
    end = roles.index("assistant") if "assistant" in roles else len(roles)
    return hashlib.sha256(json.dumps(messages[:end], sort_keys=True).encode()).hexdigest()


@dataclass(eq=False)
class _Chat:
    """A prompt on its way to a record.

    Args:
        messages: what is asked next, after all that was said before; [] while the target has yet to ask.
        answered: the conversation up to the last answer that can be used.
        reason: why that answer ended.
    """

    id: str
    temperature: float
    top_p: float = 1.0
    category: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    follow_ups: deque[str] = field(default_factory=deque)
    answered: list[dict[str, Any]] = field(default_factory=list)
    reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __str__(self) -> str:
        return f"prompt {self.id}"


class _Interview:
    """Puts prompts to the target and writes down its answers."""

    def __init__(self, recipe: Recipe, target: Target, encoder: ChatEncoder, answers: AnswerFile) -> None:
        self.seed, self.options = recipe.seed, recipe.generate
        self.target, self.encoder, self.answers = target, encoder, answers
        self.checks = replace(recipe.data, max_length=2**31 - 1, min_supervised=1, train_on="answers")
        self.source = str(recipe.generate.prompts)
        self.stops = _stops(target)
        self.summary = Summary(answers.path, before=len(answers.known))
        self.waiting: deque[Request] = deque()  # what is written next; follow-ups come before new chats
        self.asked = set(answers.known.values())  # digests of the target's own questions
        self.begun = self.failed = self.fruitless = 0  # chats; the last counts those failed in a row
        self.total = self.options.count  # records still to come, None if only time ends it
        self.chats = self._asked_by_target() if self.source == SELF else self._asked_by_file()
        self.slots = Slots(Session(target, self.options.batch, 256 + self.options.max_new_tokens), self.options.batch)

    @torch.inference_mode()
    def run(self, progress: bool) -> Summary:
        started = time.monotonic()
        minutes = self.options.minutes
        deadline = math.inf if minutes is None else started + 60 * minutes
        with _Display(progress, self.total, deadline) as display:
            while time.monotonic() < deadline:
                self._fill()
                if not self.slots.busy:
                    self.summary.complete = True
                    break
                for finished in self.slots.step():
                    self._take(finished)
                display.show(self.summary.records, self.slots.tokens)
        self.summary.computed = self.slots.tokens
        self.summary.seconds = time.monotonic() - started
        return self.summary

    def _fill(self) -> None:
        """Refill once an eighth of the slots is free: prompts are read several at a time."""
        if self.slots.busy and self.slots.free < self.options.batch // 8:
            return
        requests: list[Request] = []
        while len(requests) < self.slots.free:
            while not self.waiting:
                chat = next(self.chats, None)
                if chat is None:
                    return self.slots.add(requests)
                self.begun += 1
                self._ask(chat)
            requests.append(self.waiting.popleft())
        self.slots.add(requests)

    def _asked_by_file(self) -> Iterator[_Chat | None]:
        prompts = load_prompts(self.source)
        # Shuffled: files are sorted by topic as a rule, and `count` or `minutes` may end this anywhere.
        prompts.sort(key=lambda prompt: self._number("order", prompt.id))
        prompts = prompts[: self.options.count]
        prompts = [prompt for prompt in prompts if not self.answers.has(prompt.id, prompt.messages)]
        self.total = len(prompts)
        return (self._chat(prompt.id, prompt) for prompt in prompts)

    def _asked_by_target(self) -> Iterator[_Chat | None]:
        self.opening = user_turn_opening(self.encoder.tokenizer, self.encoder.kwargs)
        if self.total is not None:
            done = sum(identity.startswith(f"{SELF}-") for identity in self.answers.known)
            self.total = max(self.total - done, 0)
        return self._empty_chats()

    def _empty_chats(self) -> Iterator[_Chat | None]:
        """As many chats as are still wanted; None while those in progress may be enough."""
        for number in itertools.count(1):
            identity = f"{SELF}-{number:06d}"
            if identity in self.answers.known:
                continue
            while self.total is not None and self.begun - self.failed >= self.total:
                yield None
            yield self._chat(identity)

    def _chat(self, identity: str, prompt: Prompt | None = None) -> _Chat:
        if self._number("sampled", identity) < self.options.sampled_fraction * 2**63:
            chat = _Chat(identity, self.options.sample_temperature, self.options.top_p)
        else:
            chat = _Chat(identity, self.options.temperature)
        if prompt is not None:
            chat.category, chat.messages, chat.follow_ups = (
                prompt.category,
                prompt.messages,
                deque(prompt.follow_ups),
            )
        return chat

    def _number(self, *what: object) -> int:
        """A number below 2**63 that the recipe's seed gives for this purpose."""
        digest = hashlib.sha256(repr((self.seed, *what)).encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def _ask(self, chat: _Chat) -> None:
        """Queue what the target writes next in this chat: an answer, or a question of its own."""
        if not chat.messages:
            stops = self.stops.union(self.encoder.tokenizer.all_special_ids)
            seed = self._number("question", chat.id)
            limit = min(_QUESTION_TOKENS, self._room(self.opening))
            self.waiting.append(Request(chat, self.opening, max(limit, 1), stops, 1.0, 1.0, seed))
            return
        try:
            prompt = self.encoder.tokenize([self.encoder.render(chat.messages, prompt=True)])[0]
        except Dropped as reason:
            return self._end(chat, str(reason))
        limit = min(self.options.max_new_tokens, self._room(prompt))
        if limit < 1:
            positions = self.target.max_positions
            return self._end(chat, f"a prompt that fills the target's context of {positions} tokens")
        seed = self._number("answer", chat.id, len(chat.messages))
        self.waiting.append(Request(chat, prompt, limit, self.stops, chat.temperature, chat.top_p, seed))

    def _room(self, prompt: list[int]) -> int:
        """How many tokens may follow a prompt."""
        positions = self.target.max_positions
        return sys.maxsize if positions is None else positions - len(prompt)

    def _take(self, finished: Finished) -> None:
        chat: _Chat = finished.request.key
        if not chat.messages:
            return self._take_question(chat, finished)
        messages = [*chat.messages, {"role": "assistant", "content": self._text(finished)}]
        if problem := self._problem(messages, finished):
            return self._end(chat, problem)
        chat.answered, chat.reason = messages, finished.reason
        chat.prompt_tokens = len(finished.request.prompt)
        chat.completion_tokens += len(finished.tokens)
        if not chat.follow_ups or finished.reason != "stop":
            return self._end(chat)
        chat.messages = [*messages, {"role": "user", "content": chat.follow_ups.popleft()}]
        self._ask(chat)

    def _take_question(self, chat: _Chat, finished: Finished) -> None:
        question = parse_synthesised(self._text(finished)) if finished.reason == "stop" else None
        if question is None:
            return self._end(chat, "the target's own question is none")
        digest = _digest(question)
        if digest in self.asked:
            return self._end(chat, "the target asked this before")
        self.asked.add(digest)
        chat.messages = question
        self._ask(chat)

    def _text(self, finished: Finished) -> str:
        """What was written, without the token that ended it."""
        tokens = finished.tokens[:-1] if finished.reason == "stop" else finished.tokens
        text = self._decode(tokens)
        while finished.reason == "length" and tokens and text.endswith("\ufffd"):
            tokens = tokens[:-1]  # the limit fell between the bytes of one character
            text = self._decode(tokens)
        return text

    def _decode(self, tokens: list[int]) -> str:
        # Special tokens stay: an answer that holds one has to look so in the checks and in training.
        decode = self.encoder.tokenizer.decode
        return cast(str, decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _problem(self, messages: list[dict[str, Any]], finished: Finished) -> str:
        """Why training could not use this conversation as the target saw it, or ""."""
        try:
            encoded = self.encoder.encode(normalise(messages), self.checks, finished.reason)
        except Dropped as reason:
            return str(reason)
        if encoded.dropped:
            return encoded.dropped[-1]
        prompt = finished.request.prompt
        ids = encoded.samples[-1].input_ids.tolist()
        if ids[: len(prompt)] != prompt:
            return "the prompt is tokenised otherwise in front of its answer"
        # "stop" may stand for another end of text than the template's.
        written = finished.tokens[:-1] if finished.reason == "stop" else finished.tokens
        self.summary.retokenised += ids[len(prompt) :][: len(written)] != written
        return ""

    def _end(self, chat: _Chat, problem: str = "") -> None:
        """Write what was answered; a follow-up that came to nothing leaves the turns before it."""
        if problem:
            self.summary.dropped[f"a follow-up: {problem}" if chat.answered else problem] += 1
        if chat.answered:
            self.answers.append(self._record(chat))
            self.summary.records += 1
            self.summary.tokens += chat.completion_tokens
            self.summary.reasons[chat.reason] += 1
        self.failed += not chat.answered
        self.fruitless = 0 if chat.answered else self.fruitless + 1
        if self.source == SELF and self.fruitless >= _FRUITLESS:
            raise AnswersError(
                f"{self.fruitless} questions in a row that {self.target.name} asked itself gave no answer "
                f"(the last: {problem}); give generate.prompts a JSONL file"
            )

    def _record(self, chat: _Chat) -> dict[str, Any]:
        return {
            "id": chat.id,
            **({"category": chat.category} if chat.category else {}),
            "messages": chat.answered,
            "finish_reason": chat.reason,
            "temperature": chat.temperature,
            **({"top_p": chat.top_p} if chat.temperature > 0 else {}),
            "source": self.source,
            "prompt_tokens": chat.prompt_tokens,
            "completion_tokens": chat.completion_tokens,
        }


def _stops(target: Target) -> frozenset[int]:
    """Token ids that end an answer; says so where generate() would do more than we do."""
    config = target.model.generation_config
    if changed := not_honoured(config):
        log.warning("not applied to the answers, though in the target's generation config: %s", changed)
    eos = config.eos_token_id
    if eos is None:
        eos = target.tokenizer.eos_token_id
    if eos is None:
        raise ValueError(f"{target.name} has no eos_token_id in generation config or tokenizer; set one")
    return frozenset(eos if isinstance(eos, list | tuple) else [int(eos)])


class _Display:
    """Progress on stderr: a bar on a terminal, elsewhere a line now and then.

    Args: total: records expected, or None.  deadline: of time.monotonic(), may be infinite.
    """

    def __init__(self, show: bool, total: int | None, deadline: float) -> None:
        self.enabled, self.total, self.deadline = show, total, deadline
        self.started = self.printed = time.monotonic()
        self.console = Console(stderr=True)
        self.bar = Progress(
            BarColumn(),
            TextColumn("{task.description}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task("the first answers are being written", total=total)

    def __enter__(self) -> _Display:
        if self.enabled:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(self, records: int, tokens: int) -> None:
        if not self.enabled:
            return
        now = time.monotonic()
        if self.console.is_terminal:
            self.bar.update(self.task, completed=records, description=self._line(records, tokens, now))
        elif now - self.printed >= _LINE_SECONDS:
            self.printed = now
            self.console.print(self._line(records, tokens, now), markup=False, highlight=False)

    def _line(self, records: int, tokens: int, now: float) -> str:
        elapsed = now - self.started
        left = self.deadline - now
        if self.total is not None and records:
            left = min(left, elapsed / records * (self.total - records))
        of = "" if self.total is None else f" of {self.total}"
        until = "" if math.isinf(left) else f", {max(left, 0) / 60:.1f} minutes left"
        return f"{records}{of} records, {tokens:,} tokens, {tokens / elapsed:.0f} tokens/s{until}"
