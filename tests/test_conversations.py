"""From rows to ids and masks: only what the target wrote is learned, and no row vanishes uncounted."""

import io
import json

import numpy as np
import pytest
from headsmith.training.conversations import (
    ChatEncoder,
    ConversationError,
    encode,
    hold_out,
    load_samples,
    read_rows,
    template_fingerprint,
)
from headsmith.training.features import feature_bytes
from headsmith.training.preview import preview
from headsmith.training.recipe import DataSection, Recipe, TrainSection
from rich.console import Console

from tests.tokenizers_for_tests import (
    CHATML,
    LLAMA3,
    NO_END,
    NO_SYSTEM,
    OPENS_THOUGHT,
    REASONING,
    TOOLS,
    TWO_ENDS,
    build_tokenizer,
)

CHAT = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello"}]
LONGER = [*CHAT, {"role": "user", "content": "More"}, {"role": "assistant", "content": "No"}]


def user(content):
    return {"role": "user", "content": content}


def answer(content):
    return {"role": "assistant", "content": content}


def learned(sample, tokenizer):
    """The learned text, a `|` wherever tokens between were not learned."""
    runs = np.split(sample.input_ids, np.flatnonzero(np.diff(sample.loss_mask.astype(int))) + 1)
    flags = np.split(sample.loss_mask, np.flatnonzero(np.diff(sample.loss_mask.astype(int))) + 1)
    return "|".join(tokenizer.decode(run) for run, flag in zip(runs, flags) if flag[0])


def whole(sample, tokenizer):
    return tokenizer.decode(sample.input_ids)


def write(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("template, end", [(CHATML, "<|im_end|>"), (LLAMA3, "<|eot|>"), (TWO_ENDS, "<|im_end|>")])
def test_answers_and_their_end_of_turn_are_learned_on_a_template_without_generation_tags(template, end):
    tokenizer = build_tokenizer(template, eos="<|endoftext|>")
    (sample,) = encode(CHAT, tokenizer)
    assert learned(sample, tokenizer) == "Hello" + end
    (sample,) = encode(LONGER, tokenizer)
    assert learned(sample, tokenizer) == f"Hello{end}|No{end}"


@pytest.mark.parametrize("template", [CHATML, LLAMA3])
def test_ids_are_those_of_the_template_and_the_prompt_comes_first(template):
    """apply_chat_template gives a BatchEncoding of length 2; what was generated from is a token prefix."""
    tokenizer = build_tokenizer(template)
    (sample,) = encode(CHAT, tokenizer)
    expected = tokenizer.apply_chat_template(CHAT, tokenize=True)["input_ids"]
    assert sample.input_ids.tolist() == expected[: len(sample)] and len(sample) > 10
    assert len(expected) - len(sample) == (template == CHATML)  # the line end that the target does not write
    prompt = tokenizer.apply_chat_template(CHAT[:1], tokenize=True, add_generation_prompt=True)["input_ids"]
    assert sample.input_ids[: len(prompt)].tolist() == prompt
    assert sample.loss_mask.tolist() == [False] * len(prompt) + [True] * (len(sample) - len(prompt))


def test_the_line_end_between_turns_is_not_learned():
    tokenizer = build_tokenizer(CHATML)
    (sample,) = encode(LONGER, tokenizer)
    ends = np.flatnonzero(sample.input_ids == tokenizer.convert_tokens_to_ids("<|im_end|>"))
    assert sample.loss_mask[ends].tolist() == [False, True, False, True]
    assert not sample.loss_mask[ends[1] + 1]


def test_end_of_turn_is_learned_although_it_is_the_pad_token():
    tokenizer = build_tokenizer(CHATML, eos="<|im_end|>")
    (sample,) = encode(CHAT, tokenizer, finish_reason="stop")
    assert sample.input_ids[-1] == tokenizer.pad_token_id and sample.loss_mask[-1]


@pytest.mark.parametrize("template", [CHATML, LLAMA3, TWO_ENDS, NO_END])
def test_a_cut_answer_has_no_end(template):
    tokenizer = build_tokenizer(template, eos="<|endoftext|>")
    (sample,) = encode(LONGER, tokenizer, finish_reason="length")
    assert whole(sample, tokenizer).endswith("No") and learned(sample, tokenizer).endswith("|No")
    assert learned(sample, tokenizer).startswith("Hello")
    assert template == NO_END or not learned(sample, tokenizer).startswith("Hello|")  # the first one did end


def test_a_template_without_end_token_teaches_the_text_alone():
    tokenizer = build_tokenizer(NO_END)
    (sample,) = encode(LONGER, tokenizer)
    assert learned(sample, tokenizer) == "Hello|No"


def test_a_template_that_rewrites_history_gives_a_sample_a_turn():
    tokenizer = build_tokenizer(REASONING)
    chat = [user("One"), answer("<think>a</think>Uno"), user("Two"), answer("<think>b</think>Dos")]
    first, second = encode(chat, tokenizer)
    assert learned(first, tokenizer) == "<think>a</think>Uno<|im_end|>"
    assert learned(second, tokenizer) == "<think>b</think>Dos<|im_end|>"
    assert "<think>a" not in whole(second, tokenizer) and "Uno" in whole(second, tokenizer)


def test_an_answer_opened_unlike_the_generation_prompt_is_dropped_with_that_reason():
    assert "opens this answer" in encode(CHAT, build_tokenizer(OPENS_THOUGHT))


def test_a_token_across_the_edge_of_the_prompt_is_split_as_the_target_saw_it():
    tokenizer = build_tokenizer(CHATML)
    chat = [CHAT[0], answer("\nHello")]
    prompt = tokenizer.apply_chat_template(CHAT[:1], tokenize=True, add_generation_prompt=True)["input_ids"]
    joined = tokenizer.apply_chat_template(chat, tokenize=True)["input_ids"]
    assert joined[: len(prompt)] != prompt  # the trap: one token for both line ends
    (sample,) = encode(chat, tokenizer)
    assert sample.input_ids[: len(prompt)].tolist() == prompt
    assert learned(sample, tokenizer) == "\nHello<|im_end|>"


def test_train_on_all_learns_every_token_but_the_first():
    (sample,) = encode(CHAT, build_tokenizer(CHATML), train_on="all")
    assert sample.loss_mask.tolist() == [False] + [True] * (len(sample) - 1)


def test_a_prompt_longer_than_max_length_is_dropped_and_counted(tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": [user("x" * 200), answer("y")]}, {"messages": CHAT})
    samples, report = load_samples(path, build_tokenizer(), DataSection(max_length=64))
    assert len(samples) == 1 and report.dropped == {"the answer lies beyond data.max_length": 1}
    assert report.examples["the answer lies beyond data.max_length"] == [f"{path}:1"]


def test_a_long_answer_is_cut_and_counted(tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": [user("x"), answer("y" * 200)]})
    (sample,), report = load_samples(path, build_tokenizer(), DataSection(max_length=64))
    assert len(sample) == 64 and sample.loss_mask[-1] and report.truncated == 1


ODD_ROWS = [
    ({"messages": CHAT, "id": "openai"}, None),
    ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]}, None),
    (CHAT, None),
    ({"conversations": [{"from": "system", "value": "Be brief"}, *CHAT]}, None),
    ({"messages": [user("a"), *CHAT]}, None),
    ({"messages": [user([{"type": "text", "text": "Hi"}]), answer("Yo")]}, None),
    ({"conversations": [{"from": "gpt", "value": "Hi"}, *CHAT]}, "no user turn before the first answer"),
    ({"messages": [user("a"), answer(" ")]}, "empty turn"),
    ({"messages": [user("a"), answer(None)]}, "empty turn"),
    ({"messages": [user("a")]}, "no answer to learn from"),
    ({"messages": []}, "no list of turns under messages or conversations"),
    ({"text": "a"}, "no list of turns under messages or conversations"),
    ({"messages": ["a"]}, "a turn is not an object with role and content"),
    ({"messages": [{"role": "critic", "content": "a"}]}, "unknown role 'critic'"),
    ({"messages": [user([{"type": "image"}]), answer("a")]}, "content is not text"),
    ({"messages": CHAT, "template_sha256": "0"}, "generated with another chat template"),
]


def test_odd_rows_in_one_file_are_used_or_counted(tmp_path):
    path = write(tmp_path / "odd.jsonl", *(row for row, _ in ODD_ROWS))
    samples, report = load_samples(path, build_tokenizer(), DataSection())
    assert len(samples) == report.kept == 6 and report.rows == len(ODD_ROWS)
    assert report.kept + sum(report.dropped.values()) == report.rows
    for number, (_, reason) in enumerate(ODD_ROWS, 1):
        found = [key for key, places in report.examples.items() if f"{path}:{number}" in places]
        assert [key.startswith(reason or "?") for key in found] == [True] * (reason is not None)
    assert "dropped 2: empty turn (" in str(report) and f"{path}:8" in str(report)


def test_a_template_that_refuses_a_system_turn_drops_that_row_only(tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": [{"role": "system", "content": "s"}, *CHAT]}, {"messages": CHAT})
    samples, report = load_samples(path, build_tokenizer(NO_SYSTEM), DataSection())
    assert len(samples) == 1 and report.dropped == {"the chat template refuses it: no system role": 1}


def test_tool_calls_of_mixed_types_load_and_null_content_is_not_printed(tmp_path):
    def row(year, content=None):
        call = {"type": "function", "function": {"name": "f", "arguments": year}}
        turns = [
            user("a"),
            {**answer(content), "tool_calls": [call]},
            {"role": "tool", "content": "1"},
            answer("b"),
        ]
        return {"messages": turns}

    rows = [row({"year": "2025"}), row({"year": 2025}), row('{"year": 2025}', "")]
    path = write(tmp_path / "a.jsonl", *rows)
    tokenizer = build_tokenizer(TOOLS)
    samples, report = load_samples(path, tokenizer, DataSection())
    texts = [learned(sample, tokenizer) for sample in samples]
    assert report.kept == 3 and not any("None" in text for text in texts)
    assert '"2025"' in texts[0] and ": 2025" in texts[1] and texts[2] == texts[1]


def test_a_broken_line_is_named_with_its_number(tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": CHAT}, "", '{"messages": [')
    with pytest.raises(ConversationError, match=r"a.jsonl:3 is not JSON .*expected one object a line"):
        list(read_rows(path))


def test_a_missing_file_says_how_to_write_it(tmp_path):
    with pytest.raises(ConversationError, match=r"none.jsonl is not a file; .*headsmith generate"):
        load_samples(tmp_path / "none.jsonl", build_tokenizer(), DataSection())


def test_no_usable_row_is_an_error_with_the_report(tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": [user("a"), answer("")]})
    with pytest.raises(ConversationError, match=r"no usable row in .*a.jsonl.*\n0 of 1 rows kept.*\ndropped 1: empty"):
        load_samples(path, build_tokenizer(), DataSection())


def test_a_tokenizer_without_template_is_refused():
    with pytest.raises(ConversationError, match=r"has no chat template; train for the instruct model"):
        ChatEncoder(build_tokenizer(None))


def test_another_mode_is_another_text_and_another_fingerprint(tmp_path):
    tokenizer = build_tokenizer(LLAMA3)
    plain, dated = template_fingerprint(tokenizer), template_fingerprint(tokenizer, {"date": "1 May"})
    assert plain != dated != template_fingerprint(build_tokenizer(CHATML), {"date": "1 May"})
    path = write(tmp_path / "a.jsonl", {"messages": CHAT, "template_sha256": dated})
    data = DataSection(chat_template_kwargs={"date": "1 May"})
    (sample,), _ = load_samples(path, tokenizer, data)
    prompt = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, date="1 May")["input_ids"]
    assert sample.input_ids[: len(prompt)].tolist() == prompt
    with pytest.raises(ConversationError, match=r"another chat template or other data.chat_template_kwargs"):
        load_samples(path, tokenizer, DataSection())


def test_held_out_rows_are_whole_and_do_not_depend_on_the_order(tmp_path):
    chat = [user("One"), answer("<think>a</think>Uno"), user("Two"), answer("Dos")]
    path = write(tmp_path / "a.jsonl", *({"id": number, "messages": chat} for number in range(20)))
    samples, _ = load_samples(path, build_tokenizer(REASONING), DataSection())
    data = DataSection(eval_fraction=0.2, eval_limit=3)
    train, held_out = hold_out(samples, data)
    assert len(held_out) == 6 and len(train) == 34
    assert not {sample.row_id for sample in train} & {sample.row_id for sample in held_out}
    again = hold_out(samples[::-1], data)[1]
    assert {sample.row_id for sample in again} == {sample.row_id for sample in held_out}


def test_preview_marks_what_is_learned_and_warns_of_little_text(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", {"messages": CHAT}, {"messages": [user("a"), answer("")]})
    monkeypatch.setattr("headsmith.heads.target.load_tokenizer", lambda *_: build_tokenizer(), raising=False)
    recipe = Recipe("t", "out", data=DataSection(train=[str(path)]), train=TrainSection(epochs=1))
    console = Console(width=200, record=True, color_system=None, file=io.StringIO())
    preview(recipe, console, layers=3, hidden=8)
    text = console.export_text()
    assert "[[Hello<|im_end|>]]" in text and "[[Hi" not in text
    assert "1 of 2 rows kept" in text and "dropped 1: empty turn" in text
    assert "warning: 6 supervised tokens are few" in text
    assert "1 optimizer steps an epoch" in text and "GB of target features" in text


def test_sizes_are_counted():
    assert feature_bytes(10, 3, 8) == 10 * (4 * 8 * 2 + 8)
