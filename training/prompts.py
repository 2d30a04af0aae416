"""Where questions come from: a JSONL file, the packaged ones, or the target itself.

A line is a conversation in either schema of conversations.py, or `turns` (a list of user texts, as public
question sets have them). Answers in the file are not used, for the target writes its own: the first question
is the prompt, and later user turns are its follow-ups.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any

from headsmith.training.conversations import (
    ChatEncoder,
    ConversationError,
    Dropped,
    Row,
    normalise,
    read_rows,
)
from transformers import PreTrainedTokenizerBase

BUILTIN = "builtin"
# Packaged sources by name. The questions are for measuring: no target is ever asked them to make training data.
PACKAGED = {BUILTIN: "prompts.jsonl", "questions": "questions.jsonl"}
_SENTINEL = "headsmithsentinel"
_OPENERS = ("Hello there", "What is it", "3 of them", "Écris", "(a)")  # no two begin alike
_MAX_CHARACTERS = 4000  # a longer question is a target that has lost its way

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """A question for the target.

    Args:
        id: the line's own, else a hash of the messages; unique among the prompts of a source.
        category: "" where the line has none.
        messages: up to and including the first question (system turns come before it).
        follow_ups: later user turns, to be asked once the answer before them is written.
    """

    id: str
    category: str
    messages: list[dict[str, Any]]
    follow_ups: tuple[str, ...] = ()


def load_prompts(source: str | Path, limit: int | None = None) -> list[Prompt]:
    """Read the questions of a JSONL file, or a packaged set: `builtin` to train on, `questions` to measure with.

    Repeated prompts and rows that cannot be used are left out, and logged by reason.

    Raises: ConversationError: missing file, a line that is not JSON, two questions under one id, no question.
    """
    if (name := PACKAGED.get(str(source))) is not None:
        with as_file(files("headsmith.recipes") / name) as path:
            return _load(path, limit)
    return _load(Path(source), limit)


def _load(path: Path, limit: int | None) -> list[Prompt]:
    seen: dict[str, tuple[Prompt, str]] = {}
    dropped: Counter[str] = Counter()
    for row in read_rows(path):
        if limit is not None and len(seen) >= limit:
            break
        try:
            prompt = _prompt(row)
        except Dropped as reason:
            dropped[str(reason)] += 1
            continue
        known, where = seen.setdefault(prompt.id, (prompt, row.where))
        if known != prompt:
            raise ConversationError(
                f"{row.where} has the id {prompt.id!r} of another question in {where}; "
                "ids resume a generation, so make them unique or leave them out"
            )
        dropped["repeated"] += known is not prompt
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common() if count)
    if not seen:
        raise ConversationError(f"no question in {path}; dropped: {reasons or 'nothing, it is empty'}")
    if reasons:
        log.warning("%s: %d prompts; dropped: %s", path, len(seen), reasons)
    return [prompt for prompt, _ in seen.values()]


def _prompt(row: Row) -> Prompt:
    messages = row.messages
    if isinstance(turns := row.fields.get("turns"), list):
        messages = normalise([{"role": "user", "content": turn} for turn in turns])[:1]
        follow_ups = [str(turn) for turn in turns[1:]]
    elif row.problem:
        raise Dropped(row.problem)
    else:
        opening = list(takewhile(lambda message: message["role"] not in ("assistant", "tool"), messages))
        follow_ups = [message["content"] for message in messages[len(opening) :] if message["role"] == "user"]
        messages = opening
    identity = row.fields.get("id")
    if identity is None:
        identity = hashlib.sha256(json.dumps([messages, follow_ups], sort_keys=True).encode()).hexdigest()[:16]
    return Prompt(str(identity), str(row.fields.get("category") or ""), messages, tuple(follow_ups))


def split_questions(
    prompts: Sequence[Prompt], held_out: float | int, seed: int = 0
) -> tuple[list[Prompt], list[Prompt]]:
    """Split into (train, held out), alike in every category and whatever the order of the prompts.

    Args:
        held_out: a float is the share of each category (one or more where it has two), an int the number.
        seed: another one holds out others.
    Raises: ValueError for a negative number, or a share of 1 or more.
    """
    if held_out < 0 or (isinstance(held_out, float) and held_out >= 1):
        raise ValueError(f"held_out is {held_out!r}, expected a share from 0 to below 1, or a number of prompts")
    by_category: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_category[prompt.category].append(prompt)
    chosen: set[str] = set()
    for members in by_category.values():
        members.sort(key=lambda prompt: hashlib.sha256(f"{seed}:{prompt.id}".encode()).digest())
        chosen.update(prompt.id for prompt in members[: _how_many(held_out, len(members))])
    train = [prompt for prompt in prompts if prompt.id not in chosen]
    return train, [prompt for prompt in prompts if prompt.id in chosen]


def _how_many(held_out: float | int, size: int) -> int:
    if isinstance(held_out, int):
        return min(held_out, size)
    return max(round(held_out * size), int(held_out > 0 and size > 1))


def user_turn_opening(
    tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of a chat up to where the user begins to speak; the target continues them with a question.

    The template is rendered around a sentinel and cut there. Only those tokens of it are kept that every user
    turn starts with: a last blank belongs to the token of the word after it in many tokenizers.

    Raises: ConversationError if the template changes, repeats or drops the user's text.
    """
    encoder = ChatEncoder(tokenizer, template_kwargs)
    pieces = encoder.render([{"role": "user", "content": _SENTINEL}]).split(_SENTINEL)
    if len(pieces) != 2:
        raise ConversationError(
            f"the chat template writes a user's text {len(pieces) - 1} times, expected once; "
            "give questions as a JSONL file in generate.prompts"
        )
    opening, closing = pieces
    columns = zip(*encoder.tokenize([opening, *(opening + words + closing for words in _OPENERS)]))
    shared = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
    spelled = encoder.spell(shared)
    if not shared or spelled.strip() != opening.strip():
        raise ConversationError(
            f"the opening of a user turn is {opening!r}, but its own tokens spell {spelled!r}; "
            "give questions as a JSONL file in generate.prompts"
        )
    return shared


def parse_synthesised(text: str) -> list[dict[str, Any]] | None:
    """What the target wrote as a user -> messages, or None where it is no question.

    Refused: fewer than three words (or eight characters of a script without blanks), left-over markers of the
    template, a text that never ends, and one that repeats itself.
    """
    text = text.strip()
    words = text.split()
    if len(words) < 3 and (text.isascii() or len(text) < 8):
        return None
    repeats = len(words) >= 20 and len(set(words)) < len(words) / 5
    if "<|" in text or len(text) > _MAX_CHARACTERS or repeats:
        return None
    return [{"role": "user", "content": text}]


def spread(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """At most `limit` prompts, taken from the categories in turn; all of them, in order, if None."""
    if limit is None:
        return list(prompts)
    groups: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        groups[prompt.category].append(prompt)
    turns = zip_longest(*groups.values())
    return [prompt for turn in turns for prompt in turn if prompt is not None][:limit]
