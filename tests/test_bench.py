"""The benchmark: its baselines, what it says of differences, and where a round's time goes."""

from __future__ import annotations

import copy

import pytest
import torch
from headsmith.heads import Target, build_drafter
from headsmith.inference import bench
from headsmith.inference.assistant import assistant_arguments
from headsmith.inference.certify import CertificationError

from tests.folders import chat_target_folder
from tests.tiny import tiny_target

NEW = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("assistants")


@pytest.fixture(scope="module")
def target(folder):
    return Target.from_pretrained(str(chat_target_folder(folder / "target")), dtype="float32")


def questions(count=2):
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(2, 97, (1, 9 + n), generator=generator) for n in range(count)]
    return [bench.Question(f"q{n}", "ab"[n % 2], prompt) for n, prompt in enumerate(ids)]


def measure(setting, *methods, asked=None):
    baselines = [bench.generate_method(setting), bench.decoder_method(setting, bench.PLAIN, None, "chain")]
    result = bench.run_benchmark(setting, [*baselines, *methods], asked or questions())
    return result, {method["name"]: method for method in result["methods"]}


def scripted(name, setting, change):
    """A method whose answers are plain decoding's, changed."""
    plain = bench.decoder_method(setting, "plain", None, "chain")

    def run(ids):
        answer = plain.run(ids)
        return bench.Answer(answer.seconds, change(ids, answer.tokens))

    return bench.Method(name, "-", run)


def test_assisted_generation_by_a_smaller_model(target, folder):
    small = chat_target_folder(folder / "small", seed=1, num_hidden_layers=2, hidden_size=16, head_dim=4)
    arguments = assistant_arguments(target, str(small))
    drafted = []
    arguments["assistant_model"].register_forward_hook(lambda *_: drafted.append(1))
    setting = bench.Setting(target, NEW)
    _, methods = measure(setting, bench.generate_method(setting, bench.ASSISTANT, **arguments))
    assert arguments["assistant_model"].dtype == target.dtype
    assert drafted and methods["generate+assistant"]["identical"] == 2
    assert methods["generate+assistant"]["tau"] is None and methods["generate+assistant"]["round_parts"] is None


def test_assisted_generation_by_the_targets_first_layers(target):
    arguments = assistant_arguments(target, "early_exit=2")
    assert arguments == {"assistant_early_exit": 2}
    setting = bench.Setting(target, NEW)
    calls = [0] * 4
    for place, layer in enumerate(target.layers):
        layer.register_forward_pre_hook(lambda *_, place=place: calls.__setitem__(place, calls[place] + 1))
    answer = bench.generate_method(setting, bench.ASSISTANT, **arguments).run(questions()[0].input_ids)
    assert answer.tokens == bench.generate_method(setting).run(questions()[0].input_ids).tokens
    assert calls[0] == calls[1] > calls[2] == calls[3]
    assert target.config.num_hidden_layers == 4


@pytest.mark.parametrize("layers", ["0", "4", "-1", "two", ""])
def test_layers_that_cannot_draft_are_refused(target, layers):
    with pytest.raises(ValueError, match=rf"early_exit={layers}: expected a number of layers from 1 to 3"):
        assistant_arguments(target, f"early_exit={layers}")


def test_a_model_that_cannot_exit_early_is_refused_and_left_whole():
    target = tiny_target("gpt2")
    with pytest.raises(ValueError, match="cannot draft with the first layers"):
        assistant_arguments(target, "early_exit=2")
    assert target.config.num_hidden_layers == 4


def test_assistants_of_another_vocabulary_are_refused(target, folder):
    wider = chat_target_folder(folder / "wider", vocab_size=300)
    with pytest.raises(ValueError, match=rf"has 300 rows in its head, .* has {target.vocab_size}"):
        assistant_arguments(target, str(wider))
    other = chat_target_folder(folder / "other", num_hidden_layers=2)
    text = (other / "tokenizer.json").read_text()
    assert "<|eot|>" in text
    (other / "tokenizer.json").write_text(text.replace("<|eot|>", "<|eom|>"))
    with pytest.raises(ValueError, match="another tokenizer"):
        assistant_arguments(target, str(other))
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        assistant_arguments(target, str(folder / "nowhere"))


def test_the_parts_of_a_round_add_up():
    target = tiny_target()
    setting = bench.Setting(target, NEW)
    _, methods = measure(setting, bench.decoder_method(setting, "medusa", build_drafter("medusa", target), "chain"))
    assert methods["generate"]["round_parts"] is None
    parts = methods["medusa"]["round_parts"]
    assert list(parts) == ["draft", "verify", "accept", "rest"]
    assert sum(part["share"] for part in parts.values()) == pytest.approx(1, abs=1e-3)
    for part in parts.values():
        assert 0 < part["share"] < 1 and part["ms"] > 0
    rounds = sum(part["ms"] for part in parts.values()) * methods["medusa"]["verify_forwards"] / 1e3
    assert 0.2 * methods["medusa"]["seconds"] < rounds < methods["medusa"]["seconds"]
    assert methods["plain"]["round_parts"]["draft"]["share"] < parts["draft"]["share"]


@pytest.mark.parametrize("certify", [False, True])
def test_a_difference_is_written_with_its_margin_and_judged_where_asked_for(certify):
    target = tiny_target(dtype=torch.bfloat16)
    setting = bench.Setting(target, NEW, certify=certify)

    def least_likely(ids, tokens):
        before = torch.cat((ids, torch.tensor([tokens[:5]])), 1)
        return [*tokens[:5], int(target.model(before).logits[0, -1].argmin()), *tokens[6:]]

    wrong = scripted("wrong", setting, least_likely)
    short = scripted("short", setting, lambda ids, tokens: tokens[:7])
    result, methods = measure(setting, wrong, short)
    for found in methods["wrong"]["differences"]:
        assert found["token"] == 5 and found["logit_margin"] > 1
        assert (found.get("tie"), "tie_bound" in found) == ((False, True) if certify else (None, False))
    assert [found["logit_margin"] for found in methods["short"]["differences"]] == [None, None]
    if certify:
        wanted = r"wrong \(-\), question q0, new token 5: the logits are [\d.]+ apart, a tie is at most [\d.]+;"
        with pytest.raises(CertificationError, match=wanted) as raised:
            bench.check_certified(result)
        assert "short (-), question q1, new token 7: one of the two texts ends there" in str(raised.value)


def test_a_tie_is_certified():
    """The head gives another token the logits of the one that plain decoding says."""
    asked = questions(1)
    # Changed before a decoder packs the weights.
    target = Target(copy.deepcopy(tiny_target(dtype=torch.bfloat16).model))
    said = bench.generate_method(bench.Setting(target, NEW)).run(asked[0].input_ids).tokens[3]
    twin = (said + 1) % 97
    with torch.no_grad():
        head = target.model.get_output_embeddings().weight
        head[twin] = head[said]
    setting = bench.Setting(target, NEW, certify=True)
    exchanged = scripted("tie", setting, lambda ids, tokens: [twin if t in (said, twin) else t for t in tokens])
    result, methods = measure(setting, exchanged, asked=asked)
    (difference,) = methods["tie"]["differences"]
    assert difference["tie"] and difference["logit_margin"] == 0 < difference["tie_bound"]
    bench.check_certified(result)
