"""Conversations in, token ids and loss masks out; every row that is not used is counted under a reason.

A row is one line of JSONL: OpenAI (`messages`, role/content), ShareGPT (`conversations`, from/value), or a
bare list of such turns. Policies for odd rows:

- human/gpt/model/observation/function become the roles that templates know; other roles: row dropped.
- No user turn before the first answer, a blank user or assistant turn, content that is not text: row dropped.
- Null content beside tool calls becomes "" (templates would print "None"); arguments written as a JSON string
  are parsed.
- Two user turns in a row, or a system turn, are kept where the template takes them, else the row is dropped.
- What follows the last answer is left out. finish_reason "length" marks an answer that was cut.
- A row that names the template it was generated with (`template_sha256`) is dropped where another is in use.

T tokens of a sample.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from headsmith.training.recipe import DataSection
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
_SENTINEL = "headsmithsentinel"
_EXAMPLES = 3  # line numbers kept for each reason


class ConversationError(ValueError):
    """Training text cannot be read, or none of it can be used; names file, line and remedy."""


class Dropped(Exception):
    """A row cannot be used; the message is the reason it is counted under."""


@dataclass(frozen=True)
class Row:
    """One line of a file.

    Args:
        where: `file:line`.
        messages: role/content dictionaries, normalised.
        fields: the other keys of the line (id, category, finish_reason, tools, ...).
        problem: why the messages cannot be used, or None.
    """

    where: str
    messages: list[dict[str, Any]]
    fields: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None

    @property
    def id(self) -> str:
        """The row's own id, or `file:line` without folders, so that a moved file keeps its held-out rows."""
        given = self.fields.get("id")
        return Path(self.where).name if given is None else str(given)


@dataclass(frozen=True, eq=False)
class Sample:
    """What one training sample consists of.

    Args:
        input_ids: int32 [T].
        loss_mask: bool [T]: the tokens that are learned, each predicted from those before it.
        row_id: samples of one conversation share it.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    row_id: str = ""

    def __len__(self) -> int:
        return len(self.input_ids)


class Encoded(NamedTuple):
    """The samples of a conversation, how many were cut at max_length, and why others were dropped."""

    samples: list[Sample]
    truncated: int
    dropped: list[str]


@dataclass
class Report:
    """What became of the rows.

    Args:
        rows, kept: lines read, and those that gave at least one sample.
        truncated: samples cut at max_length.
        dropped: rows (and, where marked so, parts of rows) by reason.
        examples: a few `file:line` for each reason.
        supervised_tokens, total_tokens: over all samples.
        lengths: tokens of each sample.
    """

    rows: int = 0
    kept: int = 0
    truncated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    supervised_tokens: int = 0
    total_tokens: int = 0
    lengths: list[int] = field(default_factory=list)

    def drop(self, reason: str, where: str) -> None:
        """Count a dropped row."""
        self.dropped[reason] += 1
        places = self.examples.setdefault(reason, [])
        if len(places) < _EXAMPLES:
            places.append(where)

    def keep(self, encoded: Encoded) -> None:
        """Count a row that gave samples."""
        self.kept += 1
        self.truncated += encoded.truncated
        for sample in encoded.samples:
            self.lengths.append(len(sample))
            self.total_tokens += len(sample)
            self.supervised_tokens += int(sample.loss_mask.sum())

    def __str__(self) -> str:
        lines = [
            f"{self.kept} of {self.rows} rows kept: {len(self.lengths)} samples, {self.truncated} cut, "
            f"{self.total_tokens} tokens, {self.supervised_tokens} supervised"
        ]
        for reason, count in self.dropped.most_common():
            places = self.examples[reason]
            more = ", ..." if count > len(places) else ""
            lines.append(f"dropped {count}: {reason} ({', '.join(places)}{more})")
        return "\n".join(lines)


def read_rows(path: str | Path) -> Iterator[Row]:
    """Read a JSONL file line by line (never as a table: tool arguments have mixed types).

    Raises: ConversationError for a missing file, or a line that is not JSON.
    """
    if not Path(path).is_file():
        raise ConversationError(f"{path} is not a file; check the path, or write it with `headsmith generate RECIPE`")
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _parse_row(line, f"{path}:{number}")


def _parse_row(line: bytes, where: str) -> Row:
    try:
        content = json.loads(line)
    except ValueError as error:  # UnicodeDecodeError is one, too
        raise ConversationError(
            f"{where} is not JSON ({error}); expected one object a line, as `jq -c '.[]'` makes of an array"
        ) from None
    fields = content if isinstance(content, dict) else {}
    turns = content if isinstance(content, list) else fields.get("messages", fields.get("conversations"))
    rest = {key: value for key, value in fields.items() if key not in ("messages", "conversations")}
    try:
        return Row(where, normalise(turns), rest)
    except Dropped as reason:
        return Row(where, [], rest, str(reason))


def normalise(turns: Any) -> list[dict[str, Any]]:
    """Turns of either schema -> role/content dictionaries, by the policies at the top of this module.

    Raises: Dropped with the reason.
    """
    if not isinstance(turns, list) or not turns:
        raise Dropped("no list of turns under messages or conversations")
    messages = [_normalise_turn(turn) for turn in turns]
    spoken = [message["role"] for message in messages if message["role"] not in ("system", "developer")]
    if spoken[:1] != ["user"]:
        raise Dropped("no user turn before the first answer")
    return messages


def _normalise_turn(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise Dropped("a turn is not an object with role and content")
    name = turn.get("role", turn.get("from"))
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise Dropped(f"unknown role {name!r}")
    content = _text(turn.get("content", turn.get("value")))
    calls = turn.get("tool_calls")
    if role in ("user", "assistant") and not calls and not content.strip():
        raise Dropped("empty turn")
    rest = {key: value for key, value in turn.items() if key not in ("from", "value", "tool_calls")}
    message = {**rest, "role": role, "content": content}
    return {**message, "tool_calls": [_parse_arguments(call) for call in calls]} if calls else message


def _text(content: Any) -> str:
    """Text, null, or OpenAI's list of text parts."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(parts) else content
    if content is not None and not isinstance(content, str):
        raise Dropped("content is not text")
    return content or ""


def _parse_arguments(call: Any) -> Any:
    """OpenAI writes a tool call's arguments as a JSON string; chat templates expect the object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except ValueError:
        return call


@dataclass(frozen=True)
class _Turn:
    """One answer: the render that the target saw, and the render up to the last token that it wrote."""

    prompt: str
    written: str


class ChatEncoder:
    """Renders conversations through a tokenizer's chat template and marks what the target wrote.

    Stock templates carry no generation tags, so an answer is the difference of two renders: the conversation
    before it with the generation prompt, and the conversation including it. Where a template rewrites history
    (drops earlier reasoning, ends only the last turn differently) the conversation becomes several samples,
    each as the target saw it.

    Raises: ConversationError if the tokenizer has no chat template, or one that refuses one answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None):
        self.tokenizer = tokenizer
        self.kwargs = dict(template_kwargs or {})
        self.fingerprint = template_fingerprint(tokenizer, self.kwargs)
        added = tokenizer.added_tokens_decoder.values()
        names = {str(token) for token in added if token.special} | {str(tokenizer.eos_token or "")}
        self.specials = sorted(names - {""})
        self.closing = self._find_closing()
        self.end_of_turn = self._end_of_turn(self.closing)

    def _find_closing(self) -> str:
        """All that the template writes after an answer, such as "<|im_end|>\\n"."""
        probe = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _SENTINEL}]
        try:
            _, found, closing = self.render(probe).rpartition(_SENTINEL)
        except Dropped as reason:
            raise ConversationError(f"{reason}, even for one question and answer; repair it") from None
        if not found:
            raise ConversationError("the chat template leaves out the answer; choose another, or its arguments")
        return closing

    def _end_of_turn(self, closing: str) -> int:
        """How many characters of the closing the target writes itself: up to its first special token.

        What follows (the "\\n" of ChatML) comes from the template. 0: the template has no such token.
        """
        found = [(closing.find(name), -len(name)) for name in self.specials if name in closing]
        start, length = min(found, default=(0, 0))
        return start - length

    def render(self, messages: Sequence[dict[str, Any]], prompt: bool = False, tools: Any = None) -> str:
        """The template's text; `prompt` adds the opening of an answer. Raises: Dropped."""
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt, **self.kwargs
            )
        except (TemplateError, TypeError) as error:
            raise Dropped(f"the chat template refuses it: {str(error)[:100]}") from None
        return str(text)

    def spell(self, ids: Sequence[int]) -> str:
        """The exact text of token ids."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        """Token ids of rendered texts, whose special tokens the template has written already."""
        return self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]

    def encode(
        self,
        messages: list[dict[str, Any]],
        data: DataSection,
        finish_reason: str | None = None,
        tools: Any = None,
        row_id: str = "",
    ) -> Encoded:
        """Turn a normalised conversation into samples.

        Args:
            data: gives max_length, train_on and min_supervised.
            finish_reason: "length" if the last answer was cut before its end of turn.
        Returns: at least one sample.
        Raises: Dropped with the reason.
        """
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise Dropped("no answer to learn from")
        cut = answers[-1] if finish_reason == "length" else None
        groups: list[list[_Turn]] = []
        for index in answers:
            turn = self._turn(messages[: index + 1], tools, cut=index == cut)
            if groups and turn.prompt.startswith(groups[-1][-1].written):
                groups[-1].append(turn)
            else:  # the first answer, or history has been rewritten since the last one
                groups.append([turn])
        encoded = Encoded([], 0, [])
        for group in groups:
            encoded = self._add(encoded, group, data, row_id)
        if not encoded.samples:
            raise Dropped(encoded.dropped[0])
        return encoded

    def _turn(self, messages: list[dict[str, Any]], tools: Any, cut: bool) -> _Turn:
        prompt = self.render(messages[:-1], prompt=True, tools=tools)
        text = self.render(messages, tools=tools)
        if not text.startswith(prompt):
            raise Dropped("the generation prompt is not how the template opens this answer (other thinking mode?)")
        if text[len(prompt) :].endswith(self.closing):
            content = text[: len(text) - len(self.closing)]
            return _Turn(prompt, content if cut else content + self.closing[: self.end_of_turn])
        content, end = self._last_special(text, len(prompt))
        if cut and not end:
            raise Dropped("a cut answer whose end of turn cannot be told from its text")
        return _Turn(prompt, content if cut else content + end)

    def _last_special(self, text: str, start: int) -> tuple[str, str]:
        """Split text before the special token that ends it, blanks aside: tool calls may end otherwise."""
        trimmed = text.rstrip()
        for name in self.specials:
            if trimmed.endswith(name) and len(trimmed) - len(name) >= start:
                return trimmed.removesuffix(name), name
        return text, ""

    def _add(self, encoded: Encoded, turns: list[_Turn], data: DataSection, row_id: str) -> Encoded:
        samples, truncated, dropped = encoded
        try:
            ids, spans = self._token_spans(turns)
            mask = np.zeros(len(ids), dtype=bool)
            for start, end in [(1, len(ids))] if data.train_on == "all" else spans:
                mask[start:end] = True
            if (learned := int(mask.sum())) < data.min_supervised:
                raise Dropped(f"{learned} tokens to learn, fewer than data.min_supervised")
            mask = mask[: data.max_length]
            if mask.sum() < data.min_supervised:
                raise Dropped("the answer lies beyond data.max_length")
        except Dropped as reason:
            return Encoded(samples, truncated, [*dropped, str(reason)])
        sample = Sample(np.array(ids[: data.max_length], dtype=np.int32), mask, row_id)
        return Encoded([*samples, sample], truncated + (len(ids) > data.max_length), dropped)

    def _token_spans(self, turns: list[_Turn]) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of the last render, and [start, end) of each answer in them.

        The prompt's ids have to be the first ids of the whole: the target saw just these before it answered.
        """
        prompts, written = [turn.prompt for turn in turns], [turn.written for turn in turns]
        ids, *prefixes = self.tokenize([written[-1], *prompts, *written[:-1]])
        if all(ids[: len(prefix)] == prefix for prefix in prefixes):
            starts = [len(prefix) for prefix in prefixes[: len(turns)]]
            ends = [len(prefix) for prefix in prefixes[len(turns) :]]
            return ids, list(zip(starts, [*ends, len(ids)]))
        return self._splice(turns)

    def _splice(self, turns: list[_Turn]) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokenise piece by piece where a token straddles prompt and answer ("\\n" before an answer's).

        The target never saw that token: it continued the prompt's ids.
        Raises: Dropped where the pieces' ids do not spell the text (tokenizers that add blanks).
        """
        edges = [0] + [len(edge) for turn in turns for edge in (turn.prompt, turn.written)]
        text = turns[-1].written
        pieces = self.tokenize([text[start:end] for start, end in pairwise(edges)])
        ids = [token for piece in pieces for token in piece]
        if self.spell(ids) != text:
            raise Dropped("prompt and answer share a token, and the tokenizer does not join pieces")
        ends = np.cumsum([len(piece) for piece in pieces]).tolist()
        return ids, list(zip(ends[::2], ends[1::2]))


def encode(
    messages: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int = 1024,
    train_on: str = "answers",
    finish_reason: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[Sample] | str:
    """The samples of one conversation (of either schema), or the reason why there are none."""
    data = DataSection(max_length=max_length, train_on=train_on)
    try:
        return ChatEncoder(tokenizer, template_kwargs).encode(normalise(messages), data, finish_reason).samples
    except Dropped as reason:
        return str(reason)


def load_samples(
    paths: str | Path | Iterable[str | Path], tokenizer: PreTrainedTokenizerBase, data: DataSection
) -> tuple[list[Sample], Report]:
    """Read files and encode every usable row.

    Raises: ConversationError if a file cannot be read, or no row can be used (with the report).
    """
    paths = [paths] if isinstance(paths, str | Path) else list(paths)
    encoder = ChatEncoder(tokenizer, data.chat_template_kwargs)
    samples: list[Sample] = []
    report = Report()
    for row in (row for path in paths for row in read_rows(path)):
        report.rows += 1
        try:
            encoded = _encode_row(row, encoder, data)
        except Dropped as reason:
            report.drop(str(reason), row.where)
            continue
        report.keep(encoded)
        samples += encoded.samples
        for part in encoded.dropped:
            report.drop(f"part of a row: {part}", row.where)
    if not samples:
        names = ", ".join(str(path) for path in paths)
        raise ConversationError(f"no usable row in {names}; put right what the reasons name\n{report}")
    return samples, report


def _encode_row(row: Row, encoder: ChatEncoder, data: DataSection) -> Encoded:
    if row.problem:
        raise Dropped(row.problem)
    if row.fields.get("template_sha256", encoder.fingerprint) != encoder.fingerprint:
        raise Dropped("generated with another chat template or other data.chat_template_kwargs")
    tools = row.fields.get("tools") or None
    return encoder.encode(row.messages, data, row.fields.get("finish_reason"), tools, row.id)


def hold_out(samples: list[Sample], data: DataSection) -> tuple[list[Sample], list[Sample]]:
    """Split into (train, eval) where no `data.eval` is given: whole rows, chosen by a hash of their id."""
    rows = sorted({sample.row_id for sample in samples}, key=lambda row: hashlib.sha256(row.encode()).digest())
    count = min(round(len(rows) * data.eval_fraction), data.eval_limit or len(rows))
    if data.eval_fraction > 0 and len(rows) > 1:
        count = max(count, 1)
    chosen = set(rows[:count])
    train = [sample for sample in samples if sample.row_id not in chosen]
    return train, [sample for sample in samples if sample.row_id in chosen]


def template_fingerprint(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None) -> str:
    """sha256 of the chat template and its arguments: text rendered under another one is another text.

    Raises: ConversationError if the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise ConversationError(
            f"the tokenizer of {tokenizer.name_or_path or 'the target'} has no chat template; "
            "train for the instruct model, or set tokenizer.chat_template and save it with the target"
        )
    content = json.dumps([tokenizer.get_chat_template(), dict(template_kwargs or {})], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()
