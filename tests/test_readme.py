"""What the README tells people to type exists."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
from headsmith.scripts.cli import COMMANDS
from headsmith.training.recipe import load_recipe, recipe_names

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
LINES = [line for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) for line in block.splitlines() if line]


def test_commands_and_their_options_exist():
    called = [shlex.split(line, comments=True) for line in LINES if line.startswith("headsmith ")]
    assert {words[1] for words in called} >= {"generate", "preview", "bench", "decode"}
    for words in called:
        assert words[1] in COMMANDS
        command = import_module(f"headsmith.scripts.{words[1]}").command
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known


def test_scripts_and_files_exist():
    named = set(re.findall(r"\b(?:scripts|tests|heads|recipes|training|inference)/[\w./-]+\.\w+", README))
    assert "scripts/quickstart.sh" in named
    for name in named:
        assert (ROOT / name).is_file(), name


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_listed_and_loads(name):
    assert f"`{name}`" in README
    assert load_recipe(name).target


def test_the_recipe_shown_loads(tmp_path):
    (shown,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "my.yaml").write_text(shown)
    recipe = load_recipe(tmp_path / "my.yaml")
    assert recipe.drafter.method == "eagle3" and recipe.train.minutes == 60
