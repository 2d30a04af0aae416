"""The `headsmith` command: what a user types, and what they are told when it cannot work."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from headsmith.heads import build_drafter
from headsmith.scripts.cli import COMMANDS

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
        "--threads", 1, "--json", setting / "out" / "bench.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads((setting / "out" / "bench.json").read_text())
    assert result["questions"] == 3 and result["machine"]["threads"] == 1
    names = [(m["name"], m["tree"]) for m in result["methods"]]
    assert names[:4] == [
        ("generate", "-"), ("plain", "plain"), ("generate+lookup", "-"), ("prompt_lookup", "chain:depth=3")
    ]  # fmt: skip
    assert names[4:] == [(m, t) for m in ("medusa", "eagle3") for t in ("chain:depth=3", "calibrated")]
    for method in result["methods"]:
        assert method["identical"] == 3 and method["differences"] == []
        assert method["tokens"] > 0 and method["seconds"] > 0
        assert set(method["by_category"]) == {"a", "b"}
    assert result["methods"][1]["ratio_plain"] == 1.0 and result["methods"][0]["ratio_generate"] == 1.0
    assert "eagle3" in done.stdout and "× plain" in done.stdout


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
        (["generate", "{f}/none.yaml"], "no recipe file"),
        (["generate", "smollm2-135m-medusa", "train.minuts=3"], "did you mean train.minutes"),
        (["target", "{f}"], "is not an empty folder"),
    ],
)
def test_what_a_user_can_mend_is_a_message_not_a_traceback(setting, arguments, message):
    done = headsmith(*[a.format(f=setting) for a in arguments])
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
