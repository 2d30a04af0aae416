"""Questions for the target: read, split for evaluation, or asked by the target itself."""

import json
import logging

import pytest
from headsmith.training.conversations import ConversationError
from headsmith.training.prompts import (
    Prompt,
    load_prompts,
    parse_synthesised,
    split_questions,
    user_turn_opening,
)

from tests.tokenizers_for_tests import CHATML, LLAMA3, NO_END, build_tokenizer


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def user(content):
    return {"role": "user", "content": content}


def test_answers_in_a_prompt_file_are_left_to_the_target(tmp_path):
    chat = [{"role": "system", "content": "s"}, user("a"), {"role": "assistant", "content": "x"}, user("b")]
    rows = [{"id": 7, "category": "maths", "messages": chat}, {"turns": ["c", "d"]}, [user("e")]]
    first, second, third = load_prompts(write(tmp_path / "p.jsonl", *rows))
    assert first == Prompt("7", "maths", chat[:2], ("b",))
    assert second.messages == [user("c")] and second.follow_ups == ("d",)
    assert third.messages == [user("e")] and third.id != second.id


def test_prompts_that_cannot_be_used_or_repeat_are_logged(tmp_path, caplog):
    path = write(tmp_path / "p.jsonl", [user("a")], [user("a")], [user("")], {"text": "b"})
    with caplog.at_level(logging.WARNING):
        assert len(load_prompts(path)) == 1
    assert "1 prompts; dropped: 1 repeated, 1 empty turn, 1 no list of turns" in caplog.text


def test_an_id_of_two_questions_is_refused(tmp_path):
    path = write(tmp_path / "p.jsonl", {"id": 1, "messages": [user("a")]}, {"id": 1, "messages": [user("b")]})
    with pytest.raises(ConversationError, match=r"p.jsonl:2 has the id '1' of another question in .*p.jsonl:1"):
        load_prompts(path)


def test_a_file_without_questions_is_refused(tmp_path):
    with pytest.raises(ConversationError, match=r"no question in .*dropped: 1 empty turn"):
        load_prompts(write(tmp_path / "p.jsonl", [user("")]))
    with pytest.raises(ConversationError, match="it is empty"):
        load_prompts(write(tmp_path / "q.jsonl"))


def test_limit_takes_the_first(tmp_path):
    path = write(tmp_path / "p.jsonl", *([user(str(number))] for number in range(5)))
    assert [prompt.messages[0]["content"] for prompt in load_prompts(path, limit=2)] == ["0", "1"]


PROMPTS = [Prompt(f"{category}{number}", category, []) for category in "abc" for number in range(10)]


@pytest.mark.parametrize("held_out, number", [(0.2, 2), (3, 3), (0.01, 1), (0, 0)])
def test_split_is_alike_in_every_category_and_whatever_the_order(held_out, number):
    train, test = split_questions(PROMPTS, held_out, seed=1)
    assert [sum(prompt.category == name for prompt in test) for name in "abc"] == [number] * 3
    assert sorted(train + test, key=PROMPTS.index) == PROMPTS
    again = split_questions(PROMPTS[::-1], held_out, seed=1)[1]
    assert {prompt.id for prompt in again} == {prompt.id for prompt in test}


def test_another_seed_holds_out_others_and_a_share_of_all_is_refused():
    assert split_questions(PROMPTS, 3, seed=1)[1] != split_questions(PROMPTS, 3, seed=2)[1]
    with pytest.raises(ValueError, match=r"held_out is 1.0, expected a share from 0 to below 1"):
        split_questions(PROMPTS, 1.0)


@pytest.mark.parametrize(
    "template, opening",
    [(CHATML, "<|im_start|>user\n"), (LLAMA3, "<|begin|><|start|>user<|stop|>"), (NO_END, "user: ")],
)
def test_the_target_can_go_on_where_a_user_begins(template, opening):
    tokenizer = build_tokenizer(template)
    ids = user_turn_opening(tokenizer)
    assert tokenizer.decode(ids).startswith(opening.rstrip())
    for words in ("Tell me", "9 lives"):
        chat = tokenizer.apply_chat_template([user(words)], tokenize=True)["input_ids"]
        assert chat[: len(ids)] == ids


def test_a_blank_before_the_question_is_left_to_its_first_word():
    """Many tokenizers join them: ids of the bare opening would never be seen by the target."""
    tokenizer = build_tokenizer(NO_END)
    assert tokenizer.decode(user_turn_opening(tokenizer)) == "user:"


def test_a_template_that_alters_the_question_is_refused():
    tokenizer = build_tokenizer("{% for m in messages %}{{ m.content }} {{ m.content }}<|im_end|>{% endfor %}")
    with pytest.raises(ConversationError, match=r"writes a user's text 2 times, expected once; give questions"):
        user_turn_opening(tokenizer)


def test_packaged_prompts_have_categories_and_unique_ids():
    prompts = load_prompts("builtin")
    assert len(prompts) >= 500 and all(prompt.category for prompt in prompts)


@pytest.mark.parametrize("text", ["", "Hi you", "What is <|im_start|> then", "the cat " * 30, "a b " + "c" * 5000])
def test_what_is_no_question_is_refused(text):
    assert parse_synthesised(text) is None


@pytest.mark.parametrize("text", [" What is gravity?\n", "请解释一下什么是引力"])
def test_questions_are_stripped(text):
    assert parse_synthesised(text) == [user(text.strip())]
