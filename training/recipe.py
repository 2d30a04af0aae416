"""Recipes: one YAML file says what is trained, on what and for how long; strict, typed, frozen.

    recipe = load_recipe("recipes/smollm2-135m-eagle3.yaml", ["train.minutes=2", "seed=1"])

A recipe is a tree of frozen dataclasses. Every key of the file and of the `key=value` overrides has to exist
and to have the right type; what is left out takes the default written here. Paths are relative to the working
directory.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

_OVERRIDE_KEY = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


class RecipeError(ValueError):
    """A recipe cannot be found, read or accepted; the message names file, key and remedy."""


def _check(key: str, value: Any, good: bool, expected: str) -> None:
    if not good:
        raise RecipeError(f"{key} is {value!r}, expected {expected}")


def _one_of(key: str, value: Any, *choices: str | None) -> None:
    names = ", ".join("null" if choice is None else choice for choice in choices)
    _check(key, value, value in choices, f"one of: {names}")


def _positive(section: object, prefix: str, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        _check(f"{prefix}.{name}", value, value is None or value > 0, "a positive number")


def _fraction(section: object, prefix: str, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        _check(f"{prefix}.{name}", value, value is None or 0 <= value <= 1, "a fraction from 0 to 1")


@dataclass(frozen=True)
class DrafterSection:
    """Which heads are trained."""

    method: str = "eagle3"  # a name in headsmith.heads.DRAFTERS, checked there
    options: dict[str, Any] = field(default_factory=dict)  # that drafter's config, by keyword


@dataclass(frozen=True)
class GenerateSection:
    """How the target writes the text that its heads are trained on (`headsmith generate`)."""

    prompts: str | None = "builtin"  # a JSONL file, "builtin", or "self": the target asks, too
    count: int | None = None  # answer only this many prompts; has to be given with "self"
    output: str | None = None  # JSONL of the answers; null: OUTPUT_DIR/data/answers.jsonl
    max_new_tokens: int = 256  # an answer that reaches this is cut and marked finish_reason "length"
    temperature: float = 0.0  # of the plain share of the prompts; 0 is greedy
    sampled_fraction: float = 0.5  # share of the prompts answered at sample_temperature instead
    sample_temperature: float = 0.8
    top_p: float = 1.0  # of the sampled share; below 1 each step sorts the vocabulary, which is slow on a CPU
    batch: int = 32  # slots that are answered at a time
    minutes: float | None = None  # stop after this long; a later call resumes

    def __post_init__(self) -> None:
        _positive(self, "generate", "count", "max_new_tokens", "batch", "minutes")
        _positive(self, "generate", "sample_temperature", "top_p")
        _fraction(self, "generate", "sampled_fraction", "top_p")
        _check("generate.temperature", self.temperature, self.temperature >= 0, "0 (greedy) or more")
        if self.prompts == "self":
            bounded = self.count is not None or self.minutes is not None
            _check("generate.count", self.count, bounded, "a number, or generate.minutes, with prompts: self")


@dataclass(frozen=True)
class DataSection:
    """What is trained on: conversations, and which of their tokens are learned."""

    train: list[str] = field(default_factory=list)  # JSONL files, or one path; empty: the generated answers
    eval: str | None = None  # JSONL held out; null: part of the training rows is held out instead
    eval_fraction: float = 0.02  # that part, when eval is null
    eval_limit: int | None = 64  # at most this many conversations are evaluated; null: all
    max_length: int = 1024  # tokens a sample; longer ones are cut on the right
    train_on: str = "answers"  # "answers": assistant tokens; "all": every token but the first
    min_supervised: int = 1  # samples with fewer learned tokens are dropped
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # e.g. {enable_thinking: false}

    def __post_init__(self) -> None:
        _one_of("data.train_on", self.train_on, "answers", "all")
        _positive(self, "data", "eval_limit", "min_supervised")
        _fraction(self, "data", "eval_fraction")
        _check("data.max_length", self.max_length, self.max_length >= 4, "4 or more")


@dataclass(frozen=True)
class Unroll:
    """A stretch of the run and how many steps the drafter is unrolled in it."""

    until: float  # share of the run, 0 to 1, at which this stretch ends
    steps: int  # unrolled steps (EAGLE); drafters that do not unroll ignore it

    def __post_init__(self) -> None:
        _check("train.unroll[].until", self.until, 0 < self.until <= 1, "a share of the run, above 0")
        _check("train.unroll[].steps", self.steps, self.steps >= 1, "1 or more")


@dataclass(frozen=True)
class TrainSection:
    """The optimisation. The run ends at whichever of minutes, max_steps and epochs comes first."""

    minutes: float | None = None  # of wall-clock time, set-up not counted
    max_steps: int | None = None  # of the optimizer
    epochs: float | None = None
    batch_tokens: int = 4096  # padded tokens a micro-batch and process; samples are bucketed by length
    accumulation: int = 1  # micro-batches an optimizer step
    optimizer: str = "adamw"  # adamw, or muon: Muon for the matrices inside the drafter, AdamW for the rest
    lr: float = 1e-3  # peak of AdamW; small targets want 1e-3, 7B and more 3e-5 to 5e-5
    muon_lr: float = 3e-3  # peak of Muon
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    weight_decay: float = 0.0
    warmup_steps: int | None = None  # null: warmup_fraction counts
    warmup_fraction: float = 0.03  # share of the run
    schedule: str = "cosine"  # cosine, linear or constant, after the warm-up
    min_lr_fraction: float = 0.1  # where cosine and linear end, as a share of lr
    clip: float | None = 0.5  # of the gradient's norm; null: not clipped
    ema: float | None = None  # decay of the averaged weights, which are then the ones saved; null: none
    unroll: list[Unroll] = field(default_factory=list)  # in order; empty: all of the drafter's steps
    features: str = "online"  # target features: "online" each time, or kept in "memory" after the first epoch
    mixed_precision: str | None = "bf16"  # of the drafter's forward: bf16, fp16, or null for float32
    eval_every: int | None = None  # steps; null: only at the end
    save_every: int | None = None  # steps; null: save_minutes counts
    save_minutes: float | None = 10.0  # null with save_every null: only at the end
    keep: int = 2  # newest checkpoints kept
    tracker: str = "none"  # none, wandb or tensorboard
    log_every: int = 10  # steps
    threads: int | None = None  # of torch on a CPU; null: the cores, shared among this machine's processes

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))  # OmegaConf hands over a list
        object.__setattr__(self, "unroll", list(self.unroll))
        _one_of("train.optimizer", self.optimizer, "adamw", "muon")
        _one_of("train.schedule", self.schedule, "cosine", "linear", "constant")
        _one_of("train.features", self.features, "online", "memory")
        _one_of("train.mixed_precision", self.mixed_precision, "bf16", "fp16", None)
        # Accelerate updates the gradient scaler after each optimizer, so the second would divide by it again.
        scaled = (self.optimizer, self.mixed_precision) == ("muon", "fp16")
        _check("train.mixed_precision", self.mixed_precision, not scaled, "bf16 or null with train.optimizer=muon")
        _one_of("train.tracker", self.tracker, "none", "wandb", "tensorboard")
        _positive(self, "train", "minutes", "max_steps", "epochs", "batch_tokens", "accumulation")
        _positive(self, "train", "lr", "muon_lr", "clip", "eval_every", "save_every", "save_minutes", "keep")
        _positive(self, "train", "log_every", "threads")
        _fraction(self, "train", "warmup_fraction", "min_lr_fraction")
        _check("train.warmup_steps", self.warmup_steps, (self.warmup_steps or 0) >= 0, "0 or more, or null")
        _check("train.weight_decay", self.weight_decay, self.weight_decay >= 0, "0 or more")
        _check("train.ema", self.ema, self.ema is None or 0 < self.ema < 1, "a decay between 0 and 1")
        two = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        _check("train.betas", list(self.betas), two, "two numbers from 0 up to, not including, 1")
        ends = [stretch.until for stretch in self.unroll]
        rising = ends == sorted(set(ends)) and (not ends or ends[-1] == 1)
        _check("train.unroll", ends, rising, "`until` values that rise and end at 1.0")

    def unroll_steps(self, progress: float) -> int | None:
        """Unrolled steps at `progress` (0 to 1) of the run; None: all that the drafter has."""
        for stretch in self.unroll:
            if progress < stretch.until:
                return stretch.steps
        return self.unroll[-1].steps if self.unroll else None


@dataclass(frozen=True)
class EvaluateSection:
    """What is decoded with the trained heads at the end of a run."""

    prompts: int = 16  # held-out prompts decoded; 0: none
    new_tokens: int = 64  # a prompt
    tree: str = "dynamic"  # chain, fixed, dynamic, best or calibrated, with options after a colon

    def __post_init__(self) -> None:
        _check("evaluate.prompts", self.prompts, self.prompts >= 0, "0 or more")
        _positive(self, "evaluate", "new_tokens")


@dataclass(frozen=True)
class Recipe:
    """Everything a run depends on; it is saved beside every checkpoint.

    Raises: RecipeError if a value is out of range, or nothing says when training ends.
    """

    target: str  # hub name, folder, or the embedded target's alias
    output_dir: str  # checkpoints, logs, generated data and heads/ go here
    seed: int = 0
    resume: bool = False  # go on from the newest checkpoint in output_dir
    dtype: str = "bfloat16"  # of the frozen target: bfloat16, float16, float32 or auto
    device_map: str | None = None  # as in transformers' from_pretrained; null: one replica a process
    attn_implementation: str | None = None  # as in from_pretrained
    trust_remote_code: bool = False  # run code that comes with the target
    drafter: DrafterSection = field(default_factory=DrafterSection)
    generate: GenerateSection = field(default_factory=GenerateSection)
    data: DataSection = field(default_factory=DataSection)
    train: TrainSection = field(default_factory=TrainSection)
    evaluate: EvaluateSection = field(default_factory=EvaluateSection)

    def __post_init__(self) -> None:
        for key in ("target", "output_dir"):
            _check(key, getattr(self, key), bool(getattr(self, key).strip()), "a name or path")
        _one_of("dtype", self.dtype, "bfloat16", "float16", "float32", "auto")
        ends = (self.train.minutes, self.train.max_steps, self.train.epochs)
        if all(end is None for end in ends):
            raise RecipeError(
                "train.minutes, train.max_steps and train.epochs are all null, expected at least one; "
                "set the one that ends the run"
            )

    @property
    def answers_path(self) -> Path:
        """Where `headsmith generate` writes, and training reads unless `data.train` names something else."""
        return Path(self.generate.output or Path(self.output_dir) / "data" / "answers.jsonl")

    @property
    def train_paths(self) -> list[Path]:
        """The JSONL files trained on."""
        return [Path(path) for path in self.data.train] or [self.answers_path]


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package, without `.yaml`."""
    entries = files("headsmith.recipes").iterdir()
    return sorted(entry.name.removesuffix(".yaml") for entry in entries if entry.name.endswith(".yaml"))


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe and apply `dotted.key=value` overrides, whose values are YAML.

    Args:
        path: a YAML file, or the name of a packaged recipe (`recipe_names()`), with or without `.yaml`.
        overrides: later ones win; a list is replaced as a whole, a mapping is merged.
    Raises:
        RecipeError: missing file, broken YAML, unknown key, wrong type, missing or impossible value.
    """
    overrides = list(overrides)
    source = " ".join([f"{path} with", *overrides]) if overrides else str(path)
    merged = OmegaConf.merge(_read(path), *(_parse_override(text) for text in overrides))
    base = OmegaConf.structured(Recipe)
    for node in (base, *(base[key] for key in base if key not in ("target", "output_dir"))):
        if isinstance(node, DictConfig):
            OmegaConf.set_readonly(node, False)  # frozen dataclasses give read-only nodes
    try:
        config = OmegaConf.merge(base, merged)
        if missing := sorted(OmegaConf.missing_keys(config)):
            example = " ".join(f"{key}=..." for key in missing)
            raise RecipeError(f"required keys are missing: {', '.join(missing)}; add them, or pass {example}")
        recipe = OmegaConf.to_object(config)
    except (OmegaConfBaseException, RecipeError) as error:
        raise RecipeError(f"{source}: {error}") from None
    return cast(Recipe, recipe)


def save_recipe(recipe: Recipe, path: str | Path) -> None:
    """Write the resolved recipe as YAML; `load_recipe` reads the same recipe back."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(OmegaConf.to_yaml(OmegaConf.structured(recipe)), encoding="utf-8")


def _read(path: str | Path) -> DictConfig:
    """The file's checked content, untyped."""
    if not Path(path).is_file():
        return _read_packaged(str(path))
    try:
        content = OmegaConf.load(path)
    except (YAMLError, OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not readable YAML: {error}") from None
    if not isinstance(content, DictConfig):
        raise RecipeError(f"{path} holds a list, expected a mapping such as `target: NAME`")
    return _checked(content, str(path))


def _read_packaged(name: str) -> DictConfig:
    if (stem := name.removesuffix(".yaml")) not in recipe_names():
        raise RecipeError(
            f"no recipe file {name} in {Path.cwd()}; give the path of a YAML file, "
            f"or the name of a packaged recipe: {', '.join(recipe_names()) or 'none installed'}"
        )
    with as_file(files("headsmith.recipes") / f"{stem}.yaml") as path:
        return _read(path)


def _parse_override(text: str) -> DictConfig:
    """`train.lr=1e-3` -> {train: {lr: 0.001}}, checked."""
    source = f"override {text!r}"
    key, equals, value = text.partition("=")
    if not equals or not _OVERRIDE_KEY.fullmatch(key):
        raise RecipeError(f"{source} is not dotted.key=value; write for example train.minutes=2")
    if not value.strip():
        raise RecipeError(f"{source} has no value; write {key}=null to unset it")
    try:
        return _checked(OmegaConf.from_dotlist([text]), source)
    except YAMLError as error:
        problem = getattr(error, "problem", None) or error
        raise RecipeError(f"{source}: the value is not YAML ({problem}); quote it") from None


def _checked(content: DictConfig, source: str) -> DictConfig:
    raw = OmegaConf.to_container(content, resolve=False)
    for key, problem in _problems(raw, Recipe, ""):
        raise RecipeError(f"{source}: {key}{problem}")
    train = OmegaConf.select(content, "data.train")
    if isinstance(train, str):
        content.data.train = [train]
    return content


def _problems(value: Any, hint: Any, key: str) -> Iterator[tuple[str, str]]:
    """Walk plain data beside its type hints and yield (dotted key, what is wrong with it).

    OmegaConf checks too, but its messages give neither the file nor, inside lists, the key.
    """
    if isinstance(value, str) and ("${" in value or value == "???"):
        return  # interpolations are typed once they are resolved
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if (value is None and type(None) in options) or Any in options:
        return
    hint = next(option for option in options if option is not type(None))
    if is_dataclass(hint) and isinstance(value, dict):
        yield from _problems_of_keys(value, hint, key)
    elif get_origin(hint) is tuple and isinstance(value, list) and len(value) != len(get_args(hint)):
        yield key, f" has {len(value)} values, expected {len(get_args(hint))}"
    elif get_origin(hint) in (list, tuple) and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _problems(item, get_args(hint)[0], f"{key}[{index}]")
    elif not _fits(value, hint, key):
        nullable = " or null" if type(None) in options else ""
        found = "a mapping" if isinstance(value, dict) else f"{value!r} ({_type_name(type(value))})"
        yield key, f" is {found}, expected {_type_name(hint)}{nullable}"


def _problems_of_keys(value: dict[Any, Any], section: Any, key: str) -> Iterator[tuple[str, str]]:
    hints = get_type_hints(section)
    known = [entry.name for entry in fields(section)]
    prefix = f"{key}." if key else ""
    for name, item in value.items():
        if name in known:
            yield from _problems(item, hints[name], f"{prefix}{name}")
            continue
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f"did you mean {prefix}{close[0]}? " if close else ""
        level = f"known keys of {key}" if key else "known keys at the top level"
        yield f"unknown key {prefix}{name}", f"; {hint}{level}: {', '.join(known)}"


def _fits(value: Any, hint: Any, key: str) -> bool:
    if hint is str:  # a folder may be called 5; True and False are most likely YAML's reading of yes and no
        return isinstance(value, str | int | float) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if get_origin(hint) is dict:
        return isinstance(value, dict)
    if get_origin(hint) is list:
        return key == "data.train" and isinstance(value, str)  # one path stands for a list of one
    return isinstance(hint, type) and isinstance(value, hint)


def _type_name(hint: Any) -> str:
    """What a type is called in a message to someone who writes YAML."""
    names: dict[Any, str] = {
        str: "a string",
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        types.NoneType: "null",
    }
    if get_origin(hint) in (list, tuple) or hint is list:
        return "a list"
    return names.get(hint, "a mapping of keys")
