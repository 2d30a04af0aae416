"""Self-generation: every prompt answered once, as the target alone answers it, whatever interrupts it."""

import json
import signal
import subprocess
import sys
import time
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from headsmith.heads import Target
from headsmith.inference.engine import Session
from headsmith.inference.verify import NonFiniteLogitsError
from headsmith.training import generate as module
from headsmith.training.conversations import ChatEncoder, load_samples
from headsmith.training.generate import AnswersError, generate, write_answers
from headsmith.training.recipe import DataSection, GenerateSection, Recipe, RecipeError, TrainSection
from headsmith.training.slots import Request, Slots, draw, nucleus
from transformers.generation.logits_process import TopPLogitsWarper

from tests.tiny import tiny_target
from tests.tokenizers_for_tests import CHATML, LLAMA3, build_tokenizer

QUESTION = "how is it that the wind turns the mill when no one asks it to do so"
PROMPTS = [
    {
        "id": f"q{n}",
        "category": "a" if n % 2 else "b",
        "messages": [{"role": "user", "content": QUESTION[: 7 + 5 * n]}],
    }
    for n in range(11)
]


@cache
def target(family="llama", positions=512, eos="e.tz", template=CHATML) -> Target:
    """A tiny target that writes plain letters, some of which end its turn."""
    tokenizer = build_tokenizer(template)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": positions}
    model = deepcopy(tiny_target(family, **sizes, tie_word_embeddings=False).model)
    letters = tokenizer("".join(map(chr, range(32, 127))))["input_ids"]
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        scale = torch.zeros(len(head), 1)
        scale[letters] = 4.0
        head.mul_(scale)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *tokenizer(eos)["input_ids"]]
    return Target(model, tokenizer)


def recipe(folder, prompts=PROMPTS, data=None, seed=0, **options) -> Recipe:
    source = folder / "prompts.jsonl"
    if isinstance(prompts, list):
        source.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    options = {"max_new_tokens": 24, "sampled_fraction": 0.0, "batch": 4, **options}
    section = GenerateSection(prompts=str(source) if isinstance(prompts, list) else prompts, **options)
    data = data or DataSection()
    ends = TrainSection(max_steps=1)
    return Recipe("tiny", str(folder), seed=seed, generate=section, data=data, train=ends)


def run(given: Recipe, on: Target | None = None):
    """Generate, and return the records by id; a doubled id fails here."""
    lines = generate(given, on or target(), progress=False).read_text().splitlines()
    records = {record["id"]: record for record in map(json.loads, lines)}
    assert len(records) == len(lines)
    return records


def reference(on: Target, messages, new):
    """`model.generate` for one prompt: the tokens it adds."""
    text = on.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = on.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    mask = torch.ones_like(ids)
    out = on.model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("batch", [1, 4, 32])
def test_greedy_answers_are_those_of_generate_and_each_prompt_has_one(tmp_path, family, batch):
    on = target(family)
    records = run(recipe(tmp_path, batch=batch), on)
    assert sorted(records) == sorted(prompt["id"] for prompt in PROMPTS)
    reasons = set()
    for prompt in PROMPTS:
        record = records[prompt["id"]]
        tokens = reference(on, prompt["messages"], 24)
        stopped = tokens[-1] in on.model.generation_config.eos_token_id
        content = on.tokenizer.decode(tokens[:-1] if stopped else tokens)
        assert record["messages"] == [*prompt["messages"], {"role": "assistant", "content": content}]
        assert record["finish_reason"] == ("stop" if stopped else "length")
        assert record["completion_tokens"] == len(tokens)
        assert record["temperature"] == 0 and "top_p" not in record
        assert record["category"] == prompt["category"]
        assert record["target"] == on.fingerprint
        reasons.add(record["finish_reason"])
    assert reasons == {"stop", "length"}  # else the test does not say much


def test_an_end_of_turn_on_the_last_token_allowed_is_a_stop(tmp_path):
    first = complete(tmp_path / "first")
    one = next(record for record in first.values() if record["finish_reason"] == "stop")
    (tmp_path / "second").mkdir()
    limited = recipe(tmp_path / "second", max_new_tokens=one["completion_tokens"])
    assert alike({"it": run(limited)[one["id"]]}, {"it": one})


def test_the_answers_can_be_trained_on(tmp_path):
    given = recipe(tmp_path)
    run(given)
    samples, report = load_samples(given.train_paths, target().tokenizer, given.data)
    assert len(samples) == len(PROMPTS) and not report.dropped


def test_slots_are_refilled_and_idle_ones_are_not_computed(tmp_path, monkeypatch):
    rows = []
    forward = Session.forward

    def spy(self, tokens, *args, **kwargs):
        if tokens.shape[1] == 1:  # prompts are longer
            rows.append(tokens.shape[0])
        return forward(self, tokens, *args, **kwargs)

    monkeypatch.setattr(Session, "forward", spy)
    records = run(recipe(tmp_path, batch=4))
    written = sum(record["completion_tokens"] for record in records.values())
    assert sum(rows) == written - len(records)  # the first token of each comes with its prefill
    assert rows[0] == 4 and rows.count(4) > len(rows) / 2 and rows == sorted(rows, reverse=True)


def test_sampled_answers_depend_on_seed_and_id_alone(tmp_path):
    def sampled(name, prompts=PROMPTS, **options):
        folder = tmp_path / name
        folder.mkdir()
        return run(recipe(folder, prompts, sampled_fraction=0.6, top_p=0.9, **options))

    first = sampled("first")
    texts = {identity: record["messages"][-1] for identity, record in first.items()}
    assert 2 < sum(record["temperature"] > 0 for record in first.values()) < 11
    assert {record.get("top_p") for record in first.values()} == {None, 0.9}
    other = sampled("other", PROMPTS[::-1][:7], batch=2)
    assert len(other) == 7
    assert all(record["messages"][-1] == texts[identity] for identity, record in other.items())
    assert {identity: record["messages"][-1] for identity, record in sampled("seed", seed=1).items()} != texts


def test_what_is_drawn_follows_the_law():
    torch.manual_seed(0)
    mass = torch.rand(300).pow(4) * (torch.rand(300) < 0.7)
    grid = (torch.arange(400) + 0.5) / 400
    uniforms = torch.cartesian_prod(grid, grid)
    tokens = draw(mass.expand(len(uniforms), -1), uniforms)
    shares = tokens.bincount(minlength=300) / len(uniforms)
    torch.testing.assert_close(shares, mass / mass.sum(), atol=1e-3, rtol=0)
    assert not shares[mass == 0].any()
    edges = torch.tensor([[0.0, 0.0], [1 - 2**-24, 1 - 2**-24]])
    assert (mass[draw(mass.expand(2, -1), edges)] > 0).all()


@pytest.mark.parametrize("size", [40, 3000])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.999])
def test_the_nucleus_is_that_of_transformers(size, top_p):
    torch.manual_seed(1)
    scores = torch.randn(5, size)
    mass = nucleus(scores.softmax(-1), torch.full((5,), top_p))
    expected = TopPLogitsWarper(top_p)(None, scores).softmax(-1)
    torch.testing.assert_close(mass / mass.sum(-1, keepdim=True), expected)


def alike(found, expected) -> bool:
    """The same records, from prompt files that may lie elsewhere."""
    for record in (*found.values(), *expected.values()):
        record.pop("source")
    return found == expected


def complete(folder, **options):
    folder.mkdir()
    return run(recipe(folder, **options))


@pytest.mark.parametrize("keep", [0, 1, 9, 200, -1])
def test_a_run_that_broke_off_inside_a_line_goes_on_without_loss_or_double(tmp_path, keep, caplog):
    options = {"sampled_fraction": 0.5}
    expected = complete(tmp_path / "whole", **options)
    path = tmp_path / "data" / "answers.jsonl"
    path.parent.mkdir()
    lines = (tmp_path / "whole" / "data" / "answers.jsonl").read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]) + lines[4][:keep])
    summary = write_answers(recipe(tmp_path, **options), target(), progress=False)
    assert (summary.before, summary.records, summary.complete) == (4, 7, True)
    assert path.read_bytes().startswith(b"".join(lines[:4]))
    assert alike(run(recipe(tmp_path, **options)), expected)
    assert ("is answered again" in caplog.text) == (keep != 0)


CHILD = """
import sys
from pathlib import Path
from tests import test_generate as t
import headsmith.training.generate as module
append = module.AnswerFile.append
def slow(self, record):
    append(self, record)
    t.time.sleep(0.05)
module.AnswerFile.append = slow
t.run(t.recipe(Path(sys.argv[1]), sampled_fraction=0.5, batch=2))
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_without_loss_or_double(tmp_path):
    expected = complete(tmp_path / "whole", sampled_fraction=0.5, batch=2)
    path = tmp_path / "data" / "answers.jsonl"
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], cwd=Path(__file__).parent.parent)
    try:
        while not path.is_file() or path.read_bytes().count(b"\n") < 3:
            assert child.poll() is None, "it ended before it could be killed"
            time.sleep(0.005)
        with pytest.raises(AnswersError, match="written by another process"):
            run(recipe(tmp_path))
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    found = len(path.read_bytes().splitlines())
    assert 3 <= found < 11
    assert alike(run(recipe(tmp_path, sampled_fraction=0.5, batch=2)), expected)


def test_a_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path):
    run(recipe(tmp_path))
    path = tmp_path / "data" / "answers.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    broken = b"".join([lines[0], lines[1][:40] + b"\n", *lines[2:]])
    path.write_bytes(broken)
    with pytest.raises(AnswersError, match=r"answers\.jsonl:2 is not a whole JSON object, and not the last"):
        run(recipe(tmp_path))
    assert path.read_bytes() == broken
    path.write_bytes(lines[0] * 2)
    with pytest.raises(AnswersError, match=r"answers\.jsonl:2 repeats the id"):
        run(recipe(tmp_path))


@pytest.mark.parametrize("content", ["dear diary", '{"id": "q1", "messages": []}\n', "[1]\n"])
def test_a_file_of_something_else_is_left_alone(tmp_path, content):
    path = tmp_path / "other.jsonl"
    path.write_text(content)
    with pytest.raises(AnswersError, match=r"set another generate\.output"):
        run(recipe(tmp_path, output=str(path)))
    assert path.read_text() == content


def test_answers_of_another_target_or_template_are_not_continued(tmp_path):
    run(recipe(tmp_path))
    with pytest.raises(AnswersError, match=r"jsonl:1 was written with another target.*remove"):
        run(recipe(tmp_path), target("mistral"))
    twin = Target(target().model, build_tokenizer(LLAMA3))
    with pytest.raises(AnswersError, match=r"another chat template.*set another generate\.output"):
        run(recipe(tmp_path), twin)
    with pytest.raises(AnswersError, match="template_kwargs"):
        run(recipe(tmp_path, data=DataSection(chat_template_kwargs={"date": "today"})))


def test_an_id_that_stands_for_another_prompt_is_not_taken_for_answered(tmp_path):
    run(recipe(tmp_path, PROMPTS[:2]))
    with pytest.raises(AnswersError, match="another prompt under the id 'q0'"):
        run(recipe(tmp_path, [{**PROMPTS[0], "messages": [{"role": "user", "content": "something else"}]}]))


def test_a_prompt_without_room_for_an_answer_is_counted(tmp_path):
    long = {"id": "long", "messages": [{"role": "user", "content": "x" * 100}]}
    fits = {"id": "fits", "messages": [{"role": "user", "content": "x" * 35}]}
    on = target("gpt2", positions=64, eos="")
    summary = write_answers(recipe(tmp_path, [long, fits]), on, progress=False)
    assert dict(summary.dropped) == {"a prompt that fills the target's context of 64 tokens": 1}
    [record] = run(recipe(tmp_path, [fits]), on).values()
    assert record["finish_reason"] == "length"
    assert record["prompt_tokens"] + record["completion_tokens"] == 64


def test_follow_ups_are_asked_once_the_answer_before_them_is_written(tmp_path):
    turns = ["how is it", "and then", "what else is there"]
    on = target()
    [record] = run(recipe(tmp_path, [{"id": "t", "turns": turns}])).values()
    messages = record["messages"]
    assert [m["content"] for m in messages[::2]] == turns[: len(messages) // 2]
    for index in range(1, len(messages), 2):
        tokens = reference(on, messages[:index], 24)
        stopped = tokens[-1] in on.model.generation_config.eos_token_id
        assert messages[index]["content"] == on.tokenizer.decode(tokens[:-1] if stopped else tokens)
        assert stopped or index == len(messages) - 1


def test_a_prompt_that_is_no_prefix_of_its_sample_is_dropped_with_the_reason(tmp_path, monkeypatch):
    tokenize = ChatEncoder.tokenize

    def other(self, texts):
        found = tokenize(self, texts)
        return found if len(texts) == 1 else [[*ids[:3], 7, *ids[3:]] for ids in found]

    monkeypatch.setattr(ChatEncoder, "tokenize", other)
    summary = write_answers(recipe(tmp_path, PROMPTS[:3]), target(), progress=False)
    assert summary.records == 0
    assert dict(summary.dropped) == {"the prompt is tokenised otherwise in front of its answer": 3}
    assert "dropped 3: the prompt is tokenised otherwise" in str(summary)


def test_the_target_asks_itself(tmp_path, monkeypatch):
    # A tiny target writes no question: what it writes stands for one, stopped by the same tokens.
    monkeypatch.setattr(
        module,
        "parse_synthesised",
        lambda text: [{"role": "user", "content": text}] if len(text) > 2 else None,
    )
    options = {"prompts": "self", "sampled_fraction": 0.5, "max_new_tokens": 12}
    records = complete(tmp_path / "one", **options, count=9)
    assert len(records) == 9 and all(identity.startswith("self-0") for identity in records)
    questions = [record["messages"][0]["content"] for record in records.values()]
    assert len(set(questions)) == 9
    assert all(record["source"] == "self" for record in records.values())
    again = complete(tmp_path / "two", **options, count=5)
    shared = records.keys() & again.keys()
    assert shared and all(records[identity] == again[identity] for identity in shared)
    more = run(recipe(tmp_path / "two", **options, count=8))
    assert len(more) == 8 and all(more[identity] == again[identity] for identity in again)


def test_a_target_that_cannot_ask_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "parse_synthesised", lambda text: None)
    monkeypatch.setattr(module, "_FRUITLESS", 20)
    with pytest.raises(AnswersError, match=r"20 questions in a row.*give generate\.prompts a JSONL file"):
        run(recipe(tmp_path, "self", count=3, max_new_tokens=4))


def test_count_and_minutes_end_a_run_and_it_resumes(tmp_path):
    summary = write_answers(recipe(tmp_path, count=3), target(), progress=False)
    assert (summary.records, summary.complete) == (3, True)
    assert len(run(recipe(tmp_path, count=5))) == 5
    summary = write_answers(recipe(tmp_path, minutes=1e-9), target(), progress=False)
    assert (summary.records, summary.complete) == (0, False)
    assert "run the same command to go on" in str(summary)
    assert len(run(recipe(tmp_path))) == len(PROMPTS)


def test_the_summary_counts_what_was_written(tmp_path, capsys):
    given = recipe(tmp_path)
    summary = write_answers(given, target(), progress=True)
    records = [json.loads(line) for line in summary.path.read_text().splitlines()]
    assert summary.records == len(records) == sum(summary.reasons.values())
    assert summary.tokens == summary.computed == sum(record["completion_tokens"] for record in records)
    assert summary.tokens_per_second > 0 and summary.mean_tokens == summary.tokens / 11
    assert "11 records, 11 of them new" in str(summary)


def test_progress_without_a_terminal_is_a_line_now_and_then(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(module, "_LINE_SECONDS", 0.0)
    generate(recipe(tmp_path), target())
    shown = capsys.readouterr().err
    assert " of 11 records, " in shown and "minutes left" in shown and "tokens/s" in shown


def test_penalties_of_the_generation_config_are_not_passed_over_in_silence(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(target().model.generation_config, "repetition_penalty", 1.3)
    run(recipe(tmp_path, PROMPTS[:1]))
    assert "repetition_penalty" in caplog.text


def test_logits_that_are_not_finite_name_the_prompt(tmp_path, monkeypatch):
    monkeypatch.setattr(Session, "logits", lambda self, final: torch.full((len(final), 9), torch.nan))
    with pytest.raises(NonFiniteLogitsError, match="not finite in prompt q"):
        run(recipe(tmp_path))


def test_refusals_say_what_to_do(tmp_path):
    with pytest.raises(RecipeError, match=r"generate\.prompts is null, expected"):
        run(replace(recipe(tmp_path), generate=GenerateSection(prompts=None)))
    with pytest.raises(ValueError, match="without a tokenizer"):
        run(recipe(tmp_path), Target(target().model))
    slots = Slots(Session(target(), 1, 8), 1)
    slots.add([Request("x", [1, 2], 4, frozenset())])
    with pytest.raises(ValueError, match="1 requests for 0 free slots of 1"):
        slots.add([Request("y", [1, 2], 4, frozenset())])
