"""The `headsmith` command: what a user types, and what they are told when it cannot work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from headsmith.heads import build_drafter
from headsmith.inference.certify import CertificationError
from headsmith.scripts.cli import COMMANDS, main

from tests.folders import chat_target_folder


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """A tiny target folder, heads of both methods for it, and a question file."""
    from headsmith.heads import Target

    folder = tmp_path_factory.mktemp("cli")
    target = Target.from_pretrained(str(chat_target_folder(folder / "target")))
    for method in ("medusa", "eagle3"):
        build_drafter(method, target).save_pretrained(folder / method / "heads")
    rows = [
        {"id": f"q{i}", "category": "ab"[i % 2], "turns": [f"What is {i} plus {i}?", "And doubled?"]} for i in range(4)
    ]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def headsmith(*arguments, cwd="/", **environment):
    return subprocess.run(
        [sys.executable, "-m", "headsmith.scripts.cli", *map(str, arguments)],
        capture_output=True, text=True, cwd=cwd, env={**os.environ, "COLUMNS": "160", **environment},
    )  # fmt: skip


def test_help_names_every_command():
    done = headsmith("--help")
    assert done.returncode == 0
    for name in COMMANDS:
        assert name in done.stdout
        assert headsmith(name, "--help").returncode == 0


def test_bench_writes_its_figures_and_prints_a_table(setting):
    done = headsmith(
        "bench", "--target", setting / "target", "--heads", setting / "medusa", "--heads", setting / "eagle3",
        "--questions", setting / "questions.jsonl", "--limit", 3, "--new-tokens", 12, "--dtype", "float32",
        "--threads", 1, "--json", setting / "out" / "bench.json", "--assistant", "early_exit=2", "--certify",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads((setting / "out" / "bench.json").read_text())
    assert result["questions"] == 3 and result["machine"]["threads"] == 1
    names = [(m["name"], m["tree"]) for m in result["methods"]]
    assert names[:5] == [
        ("generate", "-"), ("plain", "plain"), ("generate+lookup", "-"), ("generate+assistant", "-"),
        ("prompt_lookup", "chain:depth=3"),
    ]  # fmt: skip
    assert result["assistant"] == "early_exit=2"
    assert names[5:] == [(m, t) for m in ("medusa", "eagle3") for t in ("chain:depth=3", "calibrated")]
    for method in result["methods"]:
        assert method["identical"] == 3 and method["differences"] == []
        assert method["tokens"] > 0 and method["seconds"] > 0
        assert set(method["by_category"]) == {"a", "b"}
    assert result["methods"][1]["ratio_plain"] == 1.0 and result["methods"][0]["ratio_generate"] == 1.0
    assert "eagle3" in done.stdout and "× plain" in done.stdout
    parts = r"draft [\d.]+ ms, verify [\d.]+, accept [\d.]+, rest [\d.]+ \([\d.]+ %\)"
    for name, tree in names[4:]:
        assert re.search(f"^{name}, {tree}: {parts}$", done.stdout, re.MULTILINE)
    assert not re.search("^(generate|plain).*draft", done.stdout, re.MULTILINE)


def test_calibrate_says_what_rounds_cost_and_keeps_it(setting):
    home = setting / "home"
    given = ["--target", setting / "target", "--heads", setting / "eagle3"]
    done = headsmith("calibrate", *given, HEADSMITH_HOME=str(home))
    assert done.returncode == 0, done.stderr
    assert "T(1) = " in done.stdout and "T(32) = " in done.stdout and "pay where τ is above" in done.stdout
    assert len(list((home / "costs").glob("*.json"))) == 1


def test_decode_streams_the_same_answer_with_and_without_heads(setting):
    plain = headsmith("decode", "--target", setting / "target", "--prompt", "Hello", "--new-tokens", 8)
    heads = headsmith(
        "decode", "--target", setting / "target", "--heads", setting / "eagle3", "--prompt", "Hello", "--new-tokens", 8,
        "--stats",
    )  # fmt: skip
    assert plain.returncode == heads.returncode == 0, heads.stderr
    assert plain.stdout == heads.stdout
    assert "verify forwards, τ" in heads.stderr and "calibrated tree" in heads.stderr


def test_decode_certifies_its_answer(setting):
    given = ["decode", "--target", setting / "target", "--prompt", "Hello", "--new-tokens", 8, "--certify"]
    done = headsmith(*given, "--heads", setting / "eagle3", "--tree", "chain")
    assert done.returncode == 0, done.stderr
    assert "[1 of 1 rows are plain decoding's, token for token]" in done.stderr
    sampled = headsmith(*given, "--temperature", 1)
    assert sampled.returncode == 2 and "error: certify compares with greedy decoding" in sampled.stderr


def run_here(arguments, monkeypatch):
    """The command in this process, where its parts can be broken; returns the exit code."""
    monkeypatch.setattr(sys, "argv", ["headsmith", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "160")
    try:
        main()
    except SystemExit as end:
        return end.code
    return 0


def test_an_answer_that_cannot_be_certified_is_a_message_not_a_traceback(setting, monkeypatch, capsys):
    def wrong(*_):
        raise CertificationError("not plain decoding's answer in row 0, new token 3")

    monkeypatch.setattr("headsmith.inference.decoder.certify_answers", wrong)
    given = ["decode", "--target", setting / "target", "--prompt", "Hello", "--new-tokens", 8, "--certify"]
    assert run_here(given, monkeypatch) == 2
    assert capsys.readouterr().err.endswith("error: not plain decoding's answer in row 0, new token 3\n")


@pytest.mark.parametrize("certify", [True, False])
def test_bench_fails_after_writing_where_a_text_is_not_plain_decodings(setting, certify, monkeypatch, capsys, tmp_path):
    from headsmith.inference import bench

    made = bench.decoder_method

    def wrong(setting, name, *rest):
        method = made(setting, name, *rest)
        if name == "prompt_lookup":
            run = method.run
            method.run = lambda ids: bench.Answer(1.0, run(ids).tokens[:-1])
        return method

    monkeypatch.setattr(bench, "decoder_method", wrong)
    given = ["bench", "--target", setting / "target", "--questions", setting / "questions.jsonl", "--limit", 2]
    given += ["--new-tokens", 6, "--json", tmp_path / "bench.json"]
    assert run_here([*given, *["--certify"] * certify], monkeypatch) == 2 * certify
    printed = capsys.readouterr()
    assert "prompt_lookup" in printed.out
    assert len(json.loads((tmp_path / "bench.json").read_text())["methods"][3]["differences"]) == 2
    message = "prompt_lookup (chain:depth=3), question q0, new token 5: one of the two texts ends there"
    assert (f"error: not plain decoding's answers: {message}" in printed.err) == certify


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode", "--target", "{f}/none", "--prompt", "x"], "is not a folder"),
        (["decode", "--target", "{f}/target", "--heads", "{f}/none", "--prompt", "x"], "no heads in"),
        (
            ["decode", "--target", "{f}/target", "--prompt", "x", "--tree", "bush"],
            "known are chain, fixed, dynamic",
        ),
        (["bench", "--target", "{f}/target", "--questions", "{f}/none.jsonl"], "none.jsonl"),
        (["bench", "--target", "{f}/target", "--assistant", "early_exit=4"], "a number of layers from 1 to 3"),
        (
            ["decode", "--target", "{f}/target", "--heads", "{f}/medusa", "--prompt", "x", "--tree", "best:nodes=8"],
            "expected teacher_forced.top_k in evaluation.json",
        ),
        (["generate", "{f}/none.yaml"], "no recipe file"),
        (["generate", "smollm2-135m-medusa", "train.minuts=3"], "did you mean train.minutes"),
        (["target", "{f}"], "is not an empty folder"),
        (["target", "{f}/new", "--model", "gemma"], "known are smollm2-135m-instruct, gemma-3-270m"),
    ],
)
def test_what_a_user_can_mend_is_a_message_not_a_traceback(setting, arguments, message):
    done = headsmith(*[a.format(f=setting) for a in arguments])
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
