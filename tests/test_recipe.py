"""Recipes are strict: what is wrong is named with its file, key and remedy."""

import dataclasses
import re
from pathlib import Path

import pytest
from headsmith.training.recipe import (
    Recipe,
    RecipeError,
    TrainSection,
    Unroll,
    load_recipe,
    recipe_names,
    save_recipe,
)

SMALL = "target: some-model\noutput_dir: out\ntrain: {max_steps: 2}\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def test_a_recipe_is_a_tree_of_frozen_dataclasses(file):
    recipe = load_recipe(file, ["train.betas=[0.9, 0.99]", "drafter.options={steps: 3}"])
    assert isinstance(recipe, Recipe) and isinstance(recipe.train, TrainSection)
    assert recipe.train.betas == (0.9, 0.99) and recipe.drafter.options == {"steps": 3}
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.train.lr = 1.0


@pytest.mark.parametrize(
    "override, value",
    [
        ("train.lr=1e-4", 1e-4),
        ("train.lr=1", 1.0),
        ("train.minutes=null", None),
        ("data.train=a.jsonl", ["a.jsonl"]),
        ("data.train=[a.jsonl, b.jsonl]", ["a.jsonl", "b.jsonl"]),
        ("resume=true", True),
        ("generate.output=${output_dir}/answers.jsonl", "out/answers.jsonl"),
        ("drafter.options.nested.size=8", {"nested": {"size": 8}}),
    ],
)
def test_overrides_are_yaml(file, override, value):
    found = load_recipe(file, [override])
    for name in override.split("=")[0].split(".")[:2]:
        found = getattr(found, name)
    assert found == value and type(found) is type(value)


def test_later_overrides_win_and_lists_are_replaced(file):
    recipe = load_recipe(file, ["seed=1", "seed=2", "train.unroll=[{until: 1, steps: 3}]"])
    assert recipe.seed == 2 and recipe.train.unroll == [Unroll(1.0, 3)]


def test_a_saved_recipe_reads_back_the_same(file, tmp_path):
    recipe = load_recipe(file, ["train.unroll=[{until: 0.5, steps: 1}, {until: 1.0, steps: 3}]", "data.train=x"])
    save_recipe(recipe, tmp_path / "run" / "recipe.yaml")
    assert load_recipe(tmp_path / "run" / "recipe.yaml") == recipe


@pytest.mark.parametrize(
    "override, message",
    [
        (
            "train.lrr=1",
            r"override 'train.lrr=1': unknown key train.lrr; did you mean train.lr\? known keys of train",
        ),
        (
            "trian.lr=1",
            r"unknown key trian; did you mean train\? known keys at the top level: target, output_dir",
        ),
        ("train.unroll=[{until: 1, stps: 1}]", r"unknown key train.unroll\[0\].stps; did you mean .*steps\?"),
        ("train.lr=fast", r"train.lr is 'fast' \(a string\), expected a number$"),
        ("seed=1.5", r"seed is 1.5 \(a number\), expected a whole number"),
        ("seed=true", r"seed is True \(true or false\), expected a whole number"),
        ("train.threads=all", r"train.threads is 'all' .* expected a whole number or null"),
        ("train.unroll=[{until: x, steps: 1}]", r"train.unroll\[0\].until is 'x' .* expected a number"),
        ("train.unroll=[{until: 0.5}]", r"small.yaml with .*missing: train.unroll\[0\].steps"),
        ("train.betas=[0.9]", r"train.betas has 1 values, expected 2"),
        ("train=3", r"train is 3 \(a whole number\), expected a mapping"),
        ("train.mixed_precision=no", r"mixed_precision is False .* expected a string or null"),
        ("train.lr=-1", r"small.yaml with train.lr=-1: train.lr is -1.0, expected a positive number"),
        ("train.schedule=cos", r"train.schedule is 'cos', expected one of: cosine, linear, constant"),
        (
            "train.unroll=[{until: 0.5, steps: 1}]",
            r"train.unroll is \[0.5\], expected `until` values that rise",
        ),
        ("train.max_steps=null", r"minutes, train.max_steps and train.epochs are all null.*set the one"),
        ("generate.prompts=self", r"generate.count is None, expected a number"),
        ("train.lr", r"override 'train.lr' is not dotted.key=value; write for example"),
        ("train..lr=1", r"is not dotted.key=value"),
        ("train.lr=", r"has no value; write train.lr=null"),
        ("data.train=[a", r"override 'data.train=\[a': the value is not YAML .*quote it"),
    ],
)
def test_errors_name_source_key_and_remedy(file, override, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(file, [override])


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "target: a\ntrain: {max_steps: 1}",
            r"bad.yaml: required keys are missing: output_dir; .*output_dir=\.\.\.",
        ),
        ("targett: a", r"bad.yaml: unknown key targett; did you mean target\?"),
        ("[1, 2]", r"bad.yaml holds a list, expected a mapping"),
        ("target: [a", r"bad.yaml is not readable YAML.*line 1"),
        (SMALL + "target: b\n", r"not readable YAML.*duplicate key target"),
    ],
)
def test_bad_files_are_named(tmp_path, text, message):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(RecipeError, match=re.compile(message, re.DOTALL)):
        load_recipe(tmp_path / "bad.yaml")


def test_a_missing_file_lists_the_packaged_recipes():
    with pytest.raises(RecipeError, match=r"no recipe file nowhere.yaml in .*smollm2-135m-eagle3"):
        load_recipe("nowhere.yaml")


@pytest.mark.parametrize("name", recipe_names())
def test_packaged_recipes_load_by_name_and_open_with_their_launch_command(name):
    assert load_recipe(name) == load_recipe(f"{name}.yaml")
    first = (Path(__file__).parents[1] / "recipes" / f"{name}.yaml").read_text().splitlines()[0]
    assert first == f"# accelerate launch -m headsmith.training.train recipes/{name}.yaml"


def test_answers_are_trained_on_unless_data_is_given(file):
    assert load_recipe(file).train_paths == [Path("out/data/answers.jsonl")]
    assert load_recipe(file, ["generate.output=a.jsonl"]).train_paths == [Path("a.jsonl")]
    assert load_recipe(file, ["generate.output=a.jsonl", "data.train=b.jsonl"]).train_paths == [Path("b.jsonl")]


def test_unrolled_steps_follow_the_share_of_the_run():
    train = TrainSection(unroll=[Unroll(0.25, 1), Unroll(1.0, 3)])
    assert [train.unroll_steps(progress) for progress in (0.0, 0.24, 0.25, 1.0)] == [1, 1, 3, 3]
    assert TrainSection().unroll_steps(0.5) is None
