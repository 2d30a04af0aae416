"""`headsmith chat`: turns in one conversation, of which each only reads what is new."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from headsmith.heads import Target, build_drafter
from headsmith.inference import SpeculativeDecoder
from headsmith.scripts.chat import Conversation
from headsmith.scripts.common import render

from tests.folders import chat_target_folder

ARGUMENTS = {"max_new_tokens": 12, "do_sample": False, "generator": None}
TURNS = ["Hello there", "And then?", "Say it again"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("chat")
    target = Target.from_pretrained(str(chat_target_folder(made / "target")), dtype="float32")
    build_drafter("eagle3", target).save_pretrained(made / "heads")
    return made


@pytest.fixture
def chat(folder):
    target = Target.from_pretrained(str(folder / "target"), dtype="float32")
    return Conversation(SpeculativeDecoder(target, build_drafter("eagle3", target)), "Be kind.", ARGUMENTS)


def plainly(chat: Conversation) -> str:
    """What the target answers to the messages so far, read from the beginning."""
    target = chat.decoder.target
    prompt = render(target, chat.messages)
    out = SpeculativeDecoder(target, None).generate(prompt, **ARGUMENTS)
    return target.tokenizer.decode(out.answers[0], skip_special_tokens=True)


def test_each_turn_is_answered_as_if_it_were_read_whole(chat, capsys):
    for number, turn in enumerate(TURNS):
        line = chat.say(turn)
        answer = chat.messages.pop()
        assert answer["role"] == "assistant" and answer["content"].strip() == plainly(chat).strip()
        assert answer["content"] in capsys.readouterr().out
        chat.messages.append(answer)
        read, given = map(int, re.search(r"(\d+) of (\d+) prompt tokens read", line).groups())
        assert (read == given) == (number == 0)
    assert [message["role"] for message in chat.messages] == ["system"] + ["user", "assistant"] * 3


def test_a_new_conversation_forgets_the_old_one(chat, capsys):
    chat.say(TURNS[0])
    first = chat.messages[-1]
    chat.say(TURNS[1])
    chat.begin()
    chat.say(TURNS[0])
    assert chat.messages[-1] == first and len(chat.messages) == 3


def test_an_interrupted_answer_stays_as_far_as_it_was_shown(chat, capsys, monkeypatch):
    chat.say(TURNS[0])
    generate, count = chat.decoder.generate, 0

    def stop(ids, scores):
        nonlocal count
        count += 1
        if count > 5:
            raise KeyboardInterrupt
        return scores

    monkeypatch.setattr(chat.decoder, "generate", lambda *a, **k: generate(*a, logits_processor=[stop], **k))
    assert chat.say(TURNS[1]) == "[interrupted]"
    monkeypatch.undo()
    assert len(chat.messages) == 5
    chat.say(TURNS[2])
    answer = chat.messages.pop()["content"]
    assert answer.strip() == plainly(chat).strip()


def test_a_turn_that_does_not_fit_was_not_said(chat):
    with pytest.raises(ValueError, match="positions"):
        chat.say("word " * 5000)
    assert len(chat.messages) == 1
    chat.say(TURNS[0])


def test_turns_may_be_piped_in(folder):
    command = [sys.executable, "-m", "headsmith.scripts.cli", "chat", "--target", folder / "target"]
    command += ["--heads", folder / "heads", "--dtype", "float32", "--new-tokens", "12", "--stats"]
    text = "\n".join([TURNS[0], "", "/new", TURNS[0], TURNS[1], "/exit", TURNS[2]])
    done = subprocess.run(list(map(str, command)), input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"(\d+) of (\d+) prompt tokens read", done.stderr)
    assert [read == given for read, given in lines] == [True, True, False]
    assert "τ" in done.stderr
    too_long = subprocess.run(list(map(str, command)), input="word " * 5000, capture_output=True, text=True)
    assert too_long.returncode == 2 and "error: prompt and new tokens need" in too_long.stderr
