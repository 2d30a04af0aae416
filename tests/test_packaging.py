"""The distribution: what is packaged, what may import what, what is heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("heads", "training", "inference", "recipes", "scripts")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Package -> what of ours it may import, and the files that may import more.
ALLOWED = {
    "heads": ({"heads"}, {}),
    "inference": ({"heads", "inference"}, {}),
    "training": ({"heads", "training"}, {"generate.py", "slots.py", "evaluate.py"}),
    "recipes": (set(), {}),
    "scripts": ({"heads", "inference", "training", "scripts"}, {}),
}
# Module that is imported -> distribution that brings it.
DISTRIBUTIONS = {"yaml": "pyyaml"}


def sources(folder):
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path):
    """Absolute names of everything a file imports, function bodies included."""
    folder = path.parent.relative_to(ROOT).parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ["headsmith", *folder[: len(folder) - node.level + 1]] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield module
            if module == "headsmith":
                yield from (f"headsmith.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_follow_the_layers(folder):
    allowed, exceptions = ALLOWED[folder]
    for path in sources(folder):
        ours = {name.split(".")[1] for name in imports(path) if name.startswith("headsmith.")}
        extra = {"inference"} if path.name in exceptions else set()
        assert ours <= allowed | extra, f"{path.relative_to(ROOT)} imports {ours - allowed - extra}"
        tops = {name.split(".")[0] for name in imports(path)}
        assert not tops & {*FOLDERS, "tests"}, f"{path} imports one of our folders without headsmith"


def test_every_package_is_listed():
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    found = {
        "headsmith." + ".".join(init.parent.relative_to(ROOT).parts)
        for folder in FOLDERS
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert listed == found


def test_core_dependencies_are_what_the_core_imports():
    declared = {d.split(">")[0].split("=")[0].split("<")[0].strip() for d in PROJECT["project"]["dependencies"]}
    imported = {name.split(".")[0] for folder in FOLDERS for path in sources(folder) for name in imports(path)}
    imported = {DISTRIBUTIONS.get(name, name) for name in imported if name not in sys.stdlib_module_names}
    # Read by transformers on our behalf: GGUF files, chat templates.
    assert declared == (imported - {"headsmith"}) | {"gguf", "jinja2"}


def test_help_imports_nothing_heavy():
    heavy = "[m for m in sys.modules if m in ('torch', 'transformers', 'omegaconf')]"
    script = f"import sys; import headsmith.scripts.cli; print({heavy})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_wheel_has_everything_and_works_elsewhere(tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-q", "-w", tmp_path, str(ROOT)], check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("headsmith-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "-q", "--target", tmp_path / "site", wheel], check=True)
    script = (
        "import headsmith.heads, headsmith.heads.target, headsmith.training.train, headsmith.inference\n"
        "from headsmith.training.recipe import recipe_names; from headsmith.training.prompts import load_prompts\n"
        "print(headsmith.heads.__file__, len(recipe_names()), len(load_prompts('questions')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    where, recipes, questions = done.stdout.split()
    assert where.startswith(str(tmp_path)) and int(recipes) == 4 and int(questions) == 30
