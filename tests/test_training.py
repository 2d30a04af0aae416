"""The trainer: what a step learns from, exact resume, checkpoints, what is logged, and every refusal."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from headsmith.heads import DRAFTERS, Target, build_drafter, load_drafter
from headsmith.heads.checkpoint import CheckpointError
from headsmith.heads.drafter import HeadLoss, Needs
from headsmith.heads.medusa import Medusa
from headsmith.training import loop, tracking
from headsmith.training import train as trainer
from headsmith.training.conversations import ConversationError, Sample
from headsmith.training.ema import EMA
from headsmith.training.evaluate import decoded, held_out_prompts
from headsmith.training.features import (
    Batch,
    Batches,
    FeatureMemoryError,
    MemoryFeatures,
    OnlineFeatures,
)
from headsmith.training.loop import Interrupted, rate_factor, run_progress
from headsmith.training.optimizers import make_optimizers
from headsmith.training.recipe import RecipeError, TrainSection, load_recipe
from headsmith.training.state import TrainState
from headsmith.training.tracking import NonFiniteLossError, Window
from safetensors.torch import load_file

from tests.scripted import ScriptedDrafter
from tests.tiny import greedy_reference, tiny_target
from tests.tokenizers_for_tests import build_tokenizer

METHODS = ("medusa", "eagle3")
TOKENIZER = build_tokenizer()
VOCAB = len(TOKENIZER)
LAUNCH = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_machines: 1
num_processes: 2
mixed_precision: 'no'
main_process_port: 0
"""


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Accelerate keeps its state in the process."""
    torch.set_num_threads(1)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def chat_target(dtype: torch.dtype = torch.float32) -> Target:
    target = tiny_target(vocab_size=VOCAB, dtype=dtype)
    target.tokenizer = TOKENIZER
    return target


def write_conversations(path: Path, count: int = 14, word: str = "ab") -> Path:
    rows = [
        {
            "id": f"row{n}",
            "messages": [
                {"role": "user", "content": f"say {n}"},
                {"role": "assistant", "content": word * (1 + n % 5) + "."},
            ],
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_recipe(folder: Path, *overrides: str, method: str = "medusa"):
    """A run of 10 steps, 5 to 6 micro-batches an epoch, which unrolls further half-way."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "chats.jsonl"
    if not data.exists():
        write_conversations(data)
    path = folder / "recipe.yaml"
    path.write_text(
        f"""
target: tiny
output_dir: {folder}/out
dtype: float32
drafter: {{method: {method}, options: {{draft_vocab_size: 200}}}}
data: {{train: {data}, eval_fraction: 0.1}}
train:
  max_steps: 10
  batch_tokens: 128
  accumulation: 2
  ema: 0.9
  log_every: 3
  save_every: 5
  unroll: [{{until: 0.5, steps: 1}}, {{until: 1.0, steps: 2}}]
evaluate: {{prompts: 0}}
"""
    )
    return load_recipe(path, overrides)


def session_for(recipe, target: Target | None = None) -> trainer.Session:
    torch.manual_seed(recipe.seed)
    return trainer.set_up(recipe, trainer.make_accelerator(recipe), target or chat_target())


def random_samples(lengths, seed: int = 0) -> list[Sample]:
    generator = np.random.default_rng(seed)
    samples = []
    for number, length in enumerate(lengths):
        mask = np.zeros(length, dtype=bool)
        mask[length // 3 :] = True
        samples.append(Sample(generator.integers(2, 97, length).astype(np.int32), mask, str(number)))
    return samples


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by name: weights, optimizer, averages, window."""
    found = dict(load_file(folder / "model.safetensors"))

    def walk(name, value):
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                walk(f"{name}.{key}", item)
        elif isinstance(value, int | float) and not name.endswith(".seconds"):
            found[name] = torch.tensor(value, dtype=torch.float64)

    for file in sorted(folder.glob("*.bin")) + sorted(folder.glob("custom_*.pkl")):
        walk(file.name, torch.load(file, weights_only=True))
    return found


def assert_same_run(one: Path, other: Path) -> None:
    """Bit for bit: the last checkpoint, the heads, and the log but for its clocks."""
    newest = sorted(one.glob("checkpoints/step-*"))[-1].name
    mine, theirs = state_of(one / "checkpoints" / newest), state_of(other / "checkpoints" / newest)
    assert mine.keys() == theirs.keys() and len(mine) > 10
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name
    heads = [load_file(run / "heads" / "model.safetensors") for run in (one, other)]
    assert all(torch.equal(value, heads[1][name]) for name, value in heads[0].items())
    assert without_clocks(read_log(one)) == without_clocks(read_log(other))


def without_clocks(log: list[dict]) -> list[dict]:
    return [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_s")} for line in log]


def read_log(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


# ---- batches ----


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_sample_is_seen_once_an_epoch_and_ranks_have_as_many_batches(world, accumulation):
    samples = random_samples(np.random.default_rng(1).integers(4, 60, 53))
    for epoch in range(3):
        seen, sizes = [], []
        for rank in range(world):
            batches = Batches(samples, 128, 5, rank, world, accumulation)
            steps = list(batches.steps(epoch))
            sizes.append([len(step.batches) for step in steps])
            for batch in (batch for step in steps for batch in step.batches):
                longest = max(len(samples[row]) for row in batch.rows)
                assert longest * len(batch.rows) <= 128
                assert batch.filler or batch.tokens == sum(len(samples[row]) for row in batch.rows)
                seen += [] if batch.filler else batch.rows
        assert sorted(seen) == list(range(53))
        assert all(size == sizes[0] for size in sizes) and set(sizes[0]) == {accumulation}
        assert steps[-1].share == 1.0
        assert sum(step.tokens for step in steps) == sum(len(sample) for sample in samples)


def test_five_samples_in_batches_of_two_over_two_ranks():
    samples = random_samples([8] * 5)
    plans = [list(Batches(samples, 16, rank=rank, world=2).steps(0)) for rank in range(2)]
    assert [len(plan) for plan in plans] == [2, 2]
    rows = [row for plan in plans for step in plan for b in step.batches if not b.filler for row in b.rows]
    assert sorted(rows) == [0, 1, 2, 3, 4]
    assert sum(batch.filler for plan in plans for step in plan for batch in step.batches) == 1


def test_batches_are_of_like_lengths():
    samples = random_samples(np.random.default_rng(0).integers(4, 120, 400))
    plan = Batches(samples, 512).plan(0)
    padded = sum(max(len(samples[row]) for row in batch.rows) * len(batch.rows) for batch in plan)
    assert padded < 1.1 * sum(len(sample) for sample in samples)
    longest = [max(len(samples[row]) for row in batch.rows) for batch in plan]
    assert longest != sorted(longest)  # not from short to long, or the end would only know long ones


def test_a_plan_is_a_function_of_seed_and_epoch_and_can_be_entered_anywhere():
    samples = random_samples(np.random.default_rng(1).integers(4, 60, 53))
    batches = Batches(samples, 128, seed=5, accumulation=2)
    assert batches.plan(0) == Batches(samples, 128, seed=5, accumulation=2).plan(0)
    assert batches.plan(0) != batches.plan(1)
    assert batches.plan(0) != Batches(samples, 128, seed=6, accumulation=2).plan(0)
    whole = list(batches.steps(3))
    assert list(batches.steps(3, start=2)) == whole[2:]
    assert list(batches.steps(3, start=len(whole))) == []


def test_two_ranks_and_two_micro_batches_make_the_same_step():
    samples = random_samples(np.random.default_rng(1).integers(4, 60, 53))
    alone = list(Batches(samples, 128, accumulation=2).steps(0))
    ranks = [list(Batches(samples, 128, rank=rank, world=2).steps(0)) for rank in range(2)]
    assert [step.batches for step in alone] == [a.batches + b.batches for a, b in zip(*ranks)]
    assert [step.supervised for step in alone] == [step.supervised for step in ranks[0]]


def test_a_sample_longer_than_a_batch_is_a_batch_of_its_own():
    plan = Batches(random_samples([100, 8, 8]), 16).plan(0)
    assert sorted(batch.rows for batch in plan) in ([(0,), (1, 2)], [(0,), (2, 1)])


@pytest.mark.parametrize("method", METHODS)
def test_supervised_positions_are_those_the_first_level_is_compared_at(method):
    target = tiny_target()
    samples = random_samples([9, 5, 17, 12])
    samples[1].loss_mask[:] = True  # also where nothing can be predicted from
    drafter = build_drafter(method, target)
    batch = Batches(samples, 100).plan(0)[0]
    loss = drafter(OnlineFeatures(target, samples, drafter.needs)(batch), target.teacher(drafter.draft_ids))
    assert int(loss.count[0]) == batch.supervised == sum(s.loss_mask[2:].sum() for s in samples)


# ---- features ----


@pytest.mark.parametrize("make", [OnlineFeatures, MemoryFeatures])
def test_features_of_a_padded_batch_are_those_of_single_samples(make):
    target, needs = tiny_target(), Needs(layers=(0, 2, 4), final=True)
    samples = random_samples([5, 11, 8])
    features = make(target, samples, needs)(Batch((0, 1, 2), 1, 1))
    assert features.input_ids.shape == (3, 11) and features.hidden.shape == (3, 11, 3, 32)
    for row, sample in enumerate(samples):
        ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
        alone = target.features(ids, needs, with_top=True)
        kept = len(sample)
        torch.testing.assert_close(features.hidden[row, :kept], alone.hidden[0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(features.final[row, :kept], alone.final[0], atol=1e-5, rtol=1e-4)
        learned = torch.tensor([*sample.loss_mask[1:], False])  # whether the token after it is
        assert torch.equal(features.top[row, :kept], torch.where(learned, alone.top[0], -1))
        assert torch.equal(features.input_ids[row, :kept], ids[0])
        assert features.loss_mask[row].tolist() == sample.loss_mask.tolist() + [False] * (11 - kept)
        assert not features.loss_mask[row, kept:].any()


@pytest.mark.parametrize("method", METHODS)
def test_online_and_kept_features_give_the_same_gradient(method):
    target, samples = tiny_target(), random_samples([5, 11, 8, 9])
    drafter = build_drafter(method, target)
    needs, teacher = drafter.needs, target.teacher(drafter.draft_ids)
    batch = Batches(samples, 100).plan(0)[0]
    kept = MemoryFeatures(target, samples, needs)
    found = []
    for source in (OnlineFeatures(target, samples, needs), kept, kept):  # the second time out of memory
        drafter.zero_grad()
        drafter(source(batch), teacher).total(batch.supervised).backward()
        found.append([parameter.grad.clone() for parameter in drafter.parameters()])
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, atol=1e-5, rtol=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(found[1], found[2]))


def test_features_are_kept_in_the_targets_dtype_and_the_target_runs_once_a_sample(monkeypatch):
    target, samples = tiny_target(dtype=torch.bfloat16), random_samples([5, 11])
    calls = []
    features = target.features
    monkeypatch.setattr(target, "features", lambda *a, **k: calls.append(a) or features(*a, **k))
    kept = MemoryFeatures(target, samples, Needs(layers=(1,), final=True))
    for _ in range(3):
        assert kept(Batch((0, 1), 1, 1)).hidden.dtype == torch.bfloat16
    assert sum(len(ids) for ids, *_ in calls) == 2


def test_kept_features_do_not_depend_on_the_order_they_are_asked_for():
    target = tiny_target()
    samples = random_samples([400, 390, 5, 11, 700, 701, 702, 12, 1500])
    sources = [MemoryFeatures(target, samples, Needs(layers=(1,), final=True)) for _ in range(2)]
    orders = (range(9), reversed(range(9)))
    found = [{i: source(Batch((i,), 1, 1)) for i in order} for source, order in zip(sources, orders)]
    for i in range(9):
        assert torch.equal(found[0][i].hidden, found[1][i].hidden)
        assert torch.equal(found[0][i].final, found[1][i].final)
    groups = {group for group in sources[0]._groups}
    assert len(groups) > 1 and sorted(i for group in groups for i in group) == list(range(9))


def test_a_launched_process_gets_its_share_of_the_cores(monkeypatch):
    before = torch.get_num_threads()
    try:
        monkeypatch.setattr(trainer, "available_cores", lambda: 6)
        for processes, threads in {"1": 6, "2": 3, "12": 1}.items():
            monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
            trainer.share_cores()
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_features_that_do_not_fit_into_memory_are_refused_with_both_sizes(monkeypatch):
    target, samples = tiny_target(), random_samples([50] * 4)
    needs = Needs(layers=(0, 2, 4), final=True)
    size = 200 * (4 * 32 * 4 + 8)
    assert MemoryFeatures(target, samples, needs, copies=2).bytes == 2 * size
    memory = type("Memory", (), {"available": size - 1})
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    with pytest.raises(FeatureMemoryError, match=r"need 0\.00 GB .* are free; set train.features=online"):
        MemoryFeatures(target, samples, needs)


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_with_nothing_to_learn_gives_zero_connected_to_the_graph(method):
    target, samples = tiny_target(), random_samples([9, 12])
    drafter = build_drafter(method, target)
    filler = Batches(samples, 12, accumulation=3).plan(0)[-1]
    assert filler.filler and filler.supervised == 0
    features = OnlineFeatures(target, samples, drafter.needs)(filler)
    loss = drafter(features, target.teacher(drafter.draft_ids)).total(5)
    loss.backward()
    assert loss.item() == 0.0
    gradients = [parameter.grad for parameter in drafter.parameters()]
    assert all(grad is not None and not grad.any() for grad in gradients)


# ---- a step ----


def gradient_of_first_step(recipe, samples, monkeypatch) -> list[torch.Tensor]:
    """What the optimizer is handed in the first step of a run."""
    session = session_for(recipe)
    run = session.run
    run.batches = trainer.make_batches(recipe, run.accelerator, samples)
    run.features = OnlineFeatures(session.target, samples, session.drafter.needs)
    found: list[torch.Tensor] = []

    def step():
        if run.accelerator.sync_gradients:
            found.extend(parameter.grad.clone() for parameter in session.drafter.parameters())
            raise Interrupted

    monkeypatch.setattr(run.optimizers[0], "step", step)
    with pytest.raises(Interrupted):
        loop.fit(run)
    AcceleratorState._reset_state(reset_partial_state=True)
    return found


@pytest.mark.parametrize("method", METHODS)
def test_splitting_a_batch_into_micro_batches_leaves_the_gradient_as_it_is(method, tmp_path, monkeypatch):
    """Mean-of-means would weigh the short micro-batch too heavily: the halves differ 3 to 1 in tokens."""
    samples = random_samples([30, 30, 10, 10])
    common = ["train.clip=null", "train.mixed_precision=null", "train.unroll=[]"]
    split = make_recipe(tmp_path, *common, "train.batch_tokens=60", "train.accumulation=2", method=method)
    whole = make_recipe(tmp_path, *common, "train.batch_tokens=120", "train.accumulation=1", method=method)
    halves = Batches(samples, 60, accumulation=2).plan(0)
    assert sorted(batch.tokens for batch in halves) == [20, 60]
    one = gradient_of_first_step(whole, samples, monkeypatch)
    two = gradient_of_first_step(split, samples, monkeypatch)
    assert any(grad.abs().max() > 1e-4 for grad in one)
    torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("method", METHODS)
def test_every_parameter_changes_after_one_step(method, optimizer, tmp_path):
    options = ["train.max_steps=1", "train.unroll=[]", f"train.optimizer={optimizer}"]
    recipe = make_recipe(tmp_path, *options, method=method)
    session = session_for(recipe)
    before = {name: value.clone() for name, value in session.drafter.named_parameters()}
    loop.fit(session.run)
    assert session.run.state.step == 1
    assert [name for name, value in session.drafter.named_parameters() if torch.equal(value, before[name])] == []


def test_weights_are_fp32_masters_and_move_under_small_steps_also_after_a_resume(tmp_path):
    recipe = make_recipe(tmp_path, "dtype=bfloat16", "resume=true", method="eagle3")
    session = session_for(recipe, chat_target(torch.bfloat16))
    for sitting in range(2):
        assert {parameter.dtype for parameter in session.drafter.parameters()} == {torch.float32}
        norm = next(value for name, value in session.drafter.named_parameters() if "norm" in name)
        before = norm.detach().clone()
        (optimizer,) = session.run.optimizers
        for group in optimizer.param_groups:
            group["lr"] = 1e-5
        for _ in range(100):
            norm.grad = torch.full_like(norm, 0.01)
            optimizer.step()
        assert torch.allclose(before - norm, torch.full_like(norm, 1e-3), rtol=0.05)
        session.run.state.step = 100 * (sitting + 1)
        loop.save(session.run)
        AcceleratorState._reset_state(reset_partial_state=True)
        session = session_for(recipe, chat_target(torch.bfloat16))
        assert session.run.state.step == 100 * (sitting + 1)


def test_the_target_is_neither_trained_nor_saved(tmp_path):
    recipe = make_recipe(tmp_path, method="eagle3")
    target = chat_target()
    frozen = {name: value.clone() for name, value in target.model.state_dict().items()}
    session = session_for(recipe, target)
    optimised = {id(p) for one in session.run.optimizers for group in one.param_groups for p in group["params"]}
    assert optimised == {id(p) for p in session.drafter.parameters() if p.requires_grad}
    assert not optimised & {id(p) for p in target.model.parameters()}
    loop.fit(session.run)
    folder = loop.save(session.run)
    assert load_file(folder / "model.safetensors").keys() == session.drafter.state_dict().keys()
    # Weights, two moments of Adam, the average; the rest is small.
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size < 4 * 4 * sum(p.numel() for p in session.drafter.parameters()) + 100_000
    assert all(torch.equal(value, frozen[name]) for name, value in target.model.state_dict().items())


def test_only_matrices_decay():
    train = TrainSection(max_steps=1, weight_decay=0.1)
    (optimizer,) = make_optimizers(build_drafter("eagle3", tiny_target()), train)
    matrices, others = optimizer.param_groups
    assert matrices["weight_decay"] == 0.1 and all(p.dim() > 1 for p in matrices["params"])
    assert others["weight_decay"] == 0.0 and all(p.dim() <= 1 for p in others["params"])


@pytest.mark.parametrize("method", METHODS)
def test_muon_has_every_matrix_but_the_output_layers(method):
    drafter = build_drafter(method, tiny_target())
    adamw, muon = make_optimizers(drafter, TrainSection(max_steps=1, optimizer="muon", lr=1e-4, muon_lr=2e-3))
    names = {id(value): name for name, value in drafter.named_parameters()}
    (group,) = muon.param_groups
    inner = {names[id(value)] for value in group["params"]}
    assert inner == {n for n, p in drafter.named_parameters() if p.dim() == 2 and "lm_head" not in n}
    others = [names[id(value)] for group in adamw.param_groups for value in group["params"]]
    assert len(others) == len(set(others)) and inner.isdisjoint(others)
    assert inner | set(others) == set(names.values())
    loop.set_learning_rate([adamw, muon], TrainSection(max_steps=1, schedule="constant"), 9, 0.9)
    assert [adamw.param_groups[0]["lr"], group["lr"]] == [1e-4, 2e-3]


def test_muon_refuses_the_gradient_scaler():
    with pytest.raises(RecipeError, match=r"train.mixed_precision is 'fp16', expected bf16 or null with"):
        TrainSection(max_steps=1, optimizer="muon", mixed_precision="fp16")


# ---- schedule ----


def test_learning_rate_warms_up_and_follows_the_schedule():
    def train(**changes):
        return TrainSection(**{"max_steps": 100, "warmup_fraction": 0.1, "min_lr_fraction": 0.1, **changes})

    assert rate_factor(train(), 0, 0.0) == pytest.approx(0.1)
    assert rate_factor(train(schedule="constant"), 5, 0.05) == pytest.approx(0.55)
    assert rate_factor(train(schedule="constant"), 50, 0.5) == 1.0
    assert rate_factor(train(schedule="linear"), 50, 0.5) == pytest.approx(0.55)
    assert rate_factor(train(), 50, 0.5) == pytest.approx(0.55)
    assert rate_factor(train(), 25, 0.25) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert rate_factor(train(), 100, 1.0) == pytest.approx(0.1)
    assert rate_factor(train(warmup_steps=0, schedule="constant"), 0, 0.0) == 1.0
    assert rate_factor(train(warmup_steps=4, schedule="constant"), 2, 0.9) == pytest.approx(0.55)


def test_progress_is_that_of_the_nearest_limit():
    place = TrainState(step=30, epoch=1, share=0.5)
    assert run_progress(TrainSection(max_steps=100), place, 60.0) == 0.3
    assert run_progress(TrainSection(max_steps=100, epochs=2.0), place, 60.0) == 0.75
    assert run_progress(TrainSection(max_steps=100, minutes=1.0), place, 60.0) == 1.0


def test_a_run_ends_after_its_epochs(tmp_path):
    session = session_for(make_recipe(tmp_path, "train.max_steps=null", "train.epochs=2"))
    loop.fit(session.run)
    tokens = sum(len(sample) for sample in session.data.train)
    assert session.run.state.tokens == 2 * tokens


def test_a_run_ends_after_its_minutes(tmp_path, monkeypatch):
    """Time that passed before a resume counts."""
    session = session_for(make_recipe(tmp_path, "train.max_steps=null", "train.minutes=2"))
    now = [0.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: now.append(now[-1] + 30.0) or now[-1])
    session.run.state.seconds = 60.0
    loop.fit(session.run)
    assert 1 <= session.run.state.step <= 2 and session.run.state.seconds >= 120


# ---- averaged weights ----


def test_averaged_weights_equal_the_formula():
    module = torch.nn.Linear(3, 2)
    ema = EMA(module, 0.5)
    expected = module.weight.detach().clone()
    for step in range(20):
        with torch.no_grad():
            module.weight += 1.0
        ema.update()
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * module.weight.detach()
    weight = module.weight.detach().clone()
    with ema.applied():
        torch.testing.assert_close(module.weight.detach(), expected)
    assert torch.equal(module.weight, weight)


def test_without_a_decay_the_weights_are_shown_as_they_are():
    module = torch.nn.Linear(3, 2)
    ema = EMA(module, None)
    ema.update()
    weight = module.weight.detach().clone()
    with ema.applied():
        assert torch.equal(module.weight, weight)


def test_the_averaged_weights_are_put_back_after_an_error():
    module = torch.nn.Linear(3, 2)
    ema = EMA(module, 0.5)
    weight = module.weight.detach().clone()
    with torch.no_grad():
        module.weight += 1
    with pytest.raises(KeyError), ema.applied():
        raise KeyError
    assert torch.equal(module.weight, weight + 1)


def test_the_heads_hold_the_averaged_weights(tmp_path):
    heads = trainer.train(make_recipe(tmp_path), chat_target())
    saved = load_file(heads / "model.safetensors")
    checkpoint = state_of(tmp_path / "out/checkpoints/step-000010")
    averages = [value for name, value in checkpoint.items() if ".average." in name]
    assert int(checkpoint["custom_checkpoint_2.pkl.step"]) == 10  # one update a step
    weights = [value for name, value in saved.items() if name != "draft_ids"]
    assert len(averages) == len(weights) and not torch.equal(
        saved["lm_heads.0.weight"], checkpoint["lm_heads.0.weight"]
    )
    drafter = load_drafter(heads, chat_target())
    for parameter, average in zip(drafter.parameters(), averages):
        assert torch.equal(parameter, average)


# ---- resume ----


class NoisyMedusa(Medusa):
    """Medusa with dropout, so that a resume has to bring back the random state."""

    method = "noisy"

    def forward(self, features, teacher, steps=None):
        features.final = F.dropout(features.final, 0.1, self.training)
        return super().forward(features, teacher, steps)


def stop_at(step: int, monkeypatch, action) -> None:
    """Do something in the middle of the run, once the step has been taken."""
    after = loop.after_step

    def spy(run, *rest):
        if run.state.step == step:
            action()
        after(run, *rest)

    monkeypatch.setattr(loop, "after_step", spy)


def crash():
    raise MemoryError


@pytest.mark.parametrize(("features", "optimizer"), [("online", "adamw"), ("memory", "muon")])
@pytest.mark.parametrize("method", [*METHODS, "noisy"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(method, features, optimizer, tmp_path, monkeypatch):
    """Killed at step 7, so steps 6 and 7 are run again from the checkpoint of step 5, in the next epoch."""
    monkeypatch.setitem(DRAFTERS, "noisy", NoisyMedusa)
    overrides = [f"train.features={features}", f"train.optimizer={optimizer}", "train.mixed_precision=bf16"]
    trainer.train(make_recipe(tmp_path / "whole", *overrides, method=method), chat_target())
    broken = make_recipe(tmp_path / "broken", *overrides, method=method)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        stop_at(7, patch, crash)
        trainer.train(broken, chat_target())
    assert [line["step"] for line in read_log(tmp_path / "broken/out")] == [3, 6]
    with (tmp_path / "broken/out/log.jsonl").open("a") as log:
        log.write('{"step": 7, "lo')  # killed while it wrote
    torch.manual_seed(99)
    trainer.train(make_recipe(tmp_path / "broken", *overrides, "resume=true", method=method), chat_target())
    assert_same_run(tmp_path / "whole/out", tmp_path / "broken/out")
    assert [line["step"] for line in read_log(tmp_path / "broken/out")] == [3, 6, 9, 10]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_saves_says_how_to_go_on_and_does(number, tmp_path, monkeypatch):
    handler = signal.getsignal(number)
    trainer.train(make_recipe(tmp_path / "whole"), chat_target())
    with monkeypatch.context() as patch, pytest.raises(Interrupted, match=r"step 4; go on with resume=true"):
        patch.setattr(loop, "advance", signalled(4, number, loop.advance))
        trainer.train(make_recipe(tmp_path / "broken"), chat_target())
    assert signal.getsignal(number) == handler
    assert not (tmp_path / "broken/out/heads").exists()
    trainer.train(make_recipe(tmp_path / "broken", "resume=true"), chat_target())
    assert_same_run(tmp_path / "whole/out", tmp_path / "broken/out")


def signalled(step: int, number: int, advance):
    """`advance` of the loop, with a signal before the given step is counted."""

    def spy(place, *rest):
        if place.step == step - 1:
            os.kill(os.getpid(), number)
        advance(place, *rest)

    return spy


def test_the_command_line_ends_with_130_when_interrupted(tmp_path, monkeypatch, capsys):
    make_recipe(tmp_path)
    monkeypatch.setattr(trainer, "load_target", lambda *a: chat_target())
    monkeypatch.setattr(loop, "advance", signalled(2, signal.SIGTERM, loop.advance))
    assert trainer.main([str(tmp_path / "recipe.yaml")]) == 130
    assert "resume=true" in capsys.readouterr().err


def test_a_second_signal_stops_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt), loop.stop_requests() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_set()
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_finished_run_can_be_resumed_and_prolonged(tmp_path):
    trainer.train(make_recipe(tmp_path), chat_target())
    trainer.train(make_recipe(tmp_path, "resume=true"), chat_target())
    assert json.loads((tmp_path / "out/heads/training.json").read_text())["steps"] == 10
    trainer.train(make_recipe(tmp_path, "resume=true", "train.max_steps=12"), chat_target())
    assert json.loads((tmp_path / "out/heads/training.json").read_text())["steps"] == 12


def test_the_draft_vocabulary_of_the_checkpoint_is_kept(tmp_path, monkeypatch):
    """A resume loads it, whatever would be chosen today."""
    trainer.train(make_recipe(tmp_path), chat_target())

    def other(method, target, **options):
        drafter = build_drafter(method, target, **options)
        drafter.draft_ids += 3
        return drafter

    monkeypatch.setattr(trainer, "build_drafter", other)
    session = session_for(make_recipe(tmp_path, "resume=true"))
    assert torch.equal(session.drafter.draft_ids, torch.arange(200))
    feature = torch.randn(4, 32)
    expected = session.target.logits(feature)[:, :200]
    torch.testing.assert_close(session.run.teacher.logits(feature), expected)


def test_resume_without_a_checkpoint_starts_anew_and_says_so(tmp_path, capsys):
    trainer.train(make_recipe(tmp_path, "resume=true"), chat_target())
    assert "no checkpoint in" in capsys.readouterr().out


def test_checkpoints_are_not_overwritten(tmp_path):
    trainer.train(make_recipe(tmp_path), chat_target())
    with pytest.raises(CheckpointError, match=r"holds checkpoints up to step-000010; set resume=true .* or choose"):
        trainer.train(make_recipe(tmp_path), chat_target())


@pytest.mark.parametrize(
    ("key", "override"),
    [
        ("drafter.options", "drafter.options={draft_vocab_size: 100}"),
        ("seed", "seed=1"),
        ("train.batch_tokens", "train.batch_tokens=64"),
        ("train.accumulation", "train.accumulation=1"),
        ("train.ema", "train.ema=null"),
    ],
)
def test_a_resume_with_another_recipe_is_refused(key, override, tmp_path):
    trainer.train(make_recipe(tmp_path), chat_target())
    with pytest.raises(CheckpointError, match=rf"another run: {re.escape(key)} found .*, expected .*; restore"):
        trainer.train(make_recipe(tmp_path, "resume=true", override), chat_target())


def test_a_resume_with_other_data_drafter_or_target_is_refused(tmp_path):
    trainer.train(make_recipe(tmp_path), chat_target())
    with pytest.raises(CheckpointError, match=r"drafter\.method found 'eagle3', expected 'medusa'"):
        trainer.train(make_recipe(tmp_path, "resume=true", method="eagle3"), chat_target())
    other = tiny_target(seed=1, vocab_size=VOCAB)
    other.tokenizer = TOKENIZER
    with pytest.raises(CheckpointError, match="target found"):
        trainer.train(make_recipe(tmp_path, "resume=true"), other)
    write_conversations(tmp_path / "chats.jsonl", word="cd")
    with pytest.raises(CheckpointError, match="data found"):
        trainer.train(make_recipe(tmp_path, "resume=true"), chat_target())


# ---- checkpoints ----


def test_the_newest_are_kept_and_half_written_ones_are_never_picked(tmp_path):
    recipe = make_recipe(tmp_path, "train.save_every=2", "train.keep=3")
    trainer.train(recipe, chat_target())
    root = tmp_path / "out/checkpoints"
    assert sorted(path.name for path in root.iterdir()) == ["step-000006", "step-000008", "step-000010"]
    left_over = root / ".step-000012.k1ll3d" / "new"
    left_over.mkdir(parents=True)
    (root / "step-12-mine").mkdir()
    checkpoints = session_for(make_recipe(tmp_path, "resume=true")).run.checkpoints
    assert checkpoints.newest().name == "step-000010"
    assert not left_over.parent.exists() and (root / "step-12-mine").exists()
    recipes = load_recipe(root / "step-000010/recipe.yaml")
    assert recipes == recipe


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.bin", "identity.json", "custom_checkpoint_0.pkl"])
def test_a_damaged_checkpoint_is_named(file, tmp_path):
    trainer.train(make_recipe(tmp_path), chat_target())
    folder = tmp_path / "out/checkpoints/step-000010"
    (folder / file).write_bytes((folder / file).read_bytes()[:20])
    with pytest.raises(CheckpointError, match=r"step-000010 cannot be read: .*; delete it to go on from the one"):
        trainer.train(make_recipe(tmp_path, "resume=true"), chat_target())


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("No space left")])
def test_a_full_disk_leaves_earlier_checkpoints_as_they_are(error, tmp_path, monkeypatch):
    save = Accelerator.save_state

    def full(self, folder, **options):
        if self.step > 15:  # micro-batches: the second checkpoint
            Path(folder, "model.safetensors").write_bytes(b"half")
            raise error
        return save(self, folder, **options)

    monkeypatch.setattr(Accelerator, "save_state", full)
    with pytest.raises(
        CheckpointError,
        match=r"step-000010: the disk is full \([\d,]+ bytes needed, [\d,]+ free\); free some.*unchanged",
    ):
        trainer.train(make_recipe(tmp_path), chat_target())
    root = tmp_path / "out/checkpoints"
    assert [path.name for path in root.iterdir()] == ["step-000005"]
    monkeypatch.undo()
    trainer.train(make_recipe(tmp_path, "resume=true"), chat_target())


def test_too_little_space_is_found_before_anything_is_written(tmp_path, monkeypatch):
    session = session_for(make_recipe(tmp_path))
    session.run.checkpoints.size = 1 << 60
    with pytest.raises(CheckpointError, match=r"disk is full \(1,152,921,504,606,846,976 bytes needed"):
        loop.save(session.run)
    assert list((tmp_path / "out/checkpoints").iterdir()) == []


def test_a_loss_that_is_not_finite_names_the_step_and_saves_nothing(tmp_path, monkeypatch):
    calls = []
    online = OnlineFeatures.__call__

    def broken(self, batch):
        features = online(self, batch)
        calls.append(batch)
        if len(calls) == 15:  # two micro-batches a step: the eighth step
            features.final = features.final * math.nan
        return features

    monkeypatch.setattr(OnlineFeatures, "__call__", broken)
    with pytest.raises(NonFiniteLossError, match=r"norm is nan at step 7, expected a finite number; lower train.lr"):
        trainer.train(make_recipe(tmp_path), chat_target())
    assert [path.name for path in (tmp_path / "out/checkpoints").iterdir()] == ["step-000005"]
    weights = load_file(tmp_path / "out/checkpoints/step-000005/model.safetensors")
    assert all(torch.isfinite(value).all() for value in weights.values())
    assert not (tmp_path / "out/heads").exists()


def test_a_loss_that_stays_bad_is_found_where_the_gradient_is_not_looked_at():
    window = Window(Accelerator(cpu=True))
    loss = head_loss([10], [5], [5])
    loss.loss *= math.nan
    window.add(loss)
    with pytest.raises(NonFiniteLossError, match=r"add up to \[nan\], expected finite numbers; lower train.lr"):
        window.collect()


# ---- what is reported ----


def test_the_log_has_the_means_of_the_whole_window(tmp_path, monkeypatch):
    """Accuracy over every micro-batch since the last line, under a name that says what it is."""
    seen: list[HeadLoss] = []
    add = Window.add
    monkeypatch.setattr(Window, "add", lambda self, loss: seen.append(loss) or add(self, loss))
    recipe = make_recipe(tmp_path, "train.log_every=5", "data.eval_fraction=0", method="eagle3")
    trainer.train(recipe, chat_target())
    log = read_log(tmp_path / "out")
    assert [line["step"] for line in log] == [5, 10]
    for line, window in zip(log, (seen[:10], seen[10:20])):
        levels = len(window[0].loss)
        assert len(line["loss"]) == levels == (1 if line["step"] == 5 else 2)
        for level in range(levels):
            count = sum(float(loss.count[level]) for loss in window)
            hits = sum(float(loss.hits[level, 0]) for loss in window)
            loss_sum = sum(float(loss.loss[level].detach()) for loss in window)
            assert line["teacher_forced_top1"][level] == pytest.approx(hits / count, abs=1e-5)
            assert line["loss"][level] == pytest.approx(loss_sum / count, rel=1e-4)
    assert log[-1].keys() >= {"step", "epoch", "progress", "lr", "tokens_per_s", "seconds"}
    assert log[-1]["progress"] == 1.0
    assert not any("accept" in key and "conditional" not in key for line in log for key in line)


def head_loss(count, joint, hits) -> HeadLoss:
    levels = len(count)
    return HeadLoss(
        torch.arange(1.0, levels + 1), torch.ones(levels), torch.tensor(count),
        torch.tensor(hits)[:, None].expand(-1, 10), torch.tensor(joint),
    )  # fmt: skip


def test_a_window_whose_levels_grow_keeps_each_level_to_its_own_positions():
    window = Window(Accelerator(cpu=True))
    window.add(head_loss([100], [50], [50]))
    window.add(head_loss([10, 8], [6, 3], [6, 4]))
    window.add(head_loss([10], [5], [5]))
    means = window.means()
    assert means["teacher_forced_top1"] == [round(61 / 120, 5), 0.5]
    assert means["conditional_acceptance"] == [round(61 / 120, 5), 0.5]
    assert means["projected_chain_tau"] == round(1 + 61 / 120 + 61 / 240, 4)
    assert window.top_k()[1] == [0.5] * 10
    assert means["loss"] == [round(3 / 120, 5), round(2 / 8, 5)]


def test_an_empty_window_reports_nothing():
    assert Window(Accelerator(cpu=True)).means() == {}


def test_evaluation_says_what_was_forced_and_what_was_decoded(tmp_path, capsys):
    evaluate = "evaluate={prompts: 2, new_tokens: 8, tree: 'best:nodes=4'}"
    recipe = make_recipe(tmp_path, evaluate, "train.eval_every=4", method="eagle3")
    heads = trainer.train(recipe, chat_target())
    found = json.loads((tmp_path / "out/evaluation.json").read_text())
    assert found["teacher_forced"].keys() == {
        "loss", "teacher_forced_top1", "conditional_acceptance", "projected_chain_tau", "top_k",
    }  # fmt: skip
    assert found["decoded"]["prompts"] == 1 and found["decoded"]["acceptance_length"] >= 1
    assert found["decoded"]["tree"] == "fixed"
    assert load_drafter(heads, chat_target()).ranks == found["teacher_forced"]["top_k"]
    assert [line["step"] for line in read_log(tmp_path / "out") if "held_out" in line] == [4, 8]
    assert "teacher-forced" in capsys.readouterr().out
    record = json.loads((heads / "training.json").read_text())
    target = chat_target()
    assert record["target_fingerprint"] == target.fingerprint and record["steps"] == 10
    assert record["recipe"]["train"]["max_steps"] == 10 and record["tokens"] > 0


def test_decoded_counts_what_a_perfect_drafter_brings():
    target = tiny_target()
    prompt = torch.tensor([5, 6, 7, 8])
    answer = greedy_reference(target, prompt[None], torch.ones(1, 4), 13)[0]
    found = decoded(target, ScriptedDrafter([prompt.tolist() + answer], 97), [prompt], "chain:depth=3", 13)
    assert found["acceptance_length"] == 4.0 and found["forwards"] == 3 and found["tokens"] == 12
    assert found["accepted_at_depth"] == [1.0, 1.0, 1.0]
    assert decoded(target, ScriptedDrafter([[]], 97), [torch.ones(510, dtype=torch.long)], "chain", 13) == {}


@pytest.mark.parametrize("train_on", ["answers", "all"])
def test_held_out_prompts_end_with_the_generation_prompt(train_on, tmp_path):
    recipe = make_recipe(tmp_path, f"data.train_on={train_on}", "data.eval_fraction=0.5", "evaluate.prompts=3")
    data = trainer.load_data(recipe, chat_target())
    assert len(data.prompts) == 3 and len(data.held_out) == 7
    for prompt in data.prompts:
        text = TOKENIZER.decode(prompt)
        assert re.fullmatch(r"<\|im_start\|>user\nsay \d+<\|im_end\|>\n<\|im_start\|>assistant\n", text), text


def test_one_prompt_a_conversation():
    samples = random_samples([9, 9, 9])
    samples = [Sample(s.input_ids, s.loss_mask, row) for s, row in zip(samples, ("a", "a", "b"))]
    prompts = held_out_prompts(samples, 5)
    assert [prompt.tolist() for prompt in prompts] == [
        samples[0].input_ids[:3].tolist(),
        samples[2].input_ids[:3].tolist(),
    ]


def test_held_out_files_are_limited_by_conversations(tmp_path):
    held_out = write_conversations(tmp_path / "held.jsonl", 9)
    recipe = make_recipe(tmp_path, f"data.eval={held_out}", "data.eval_limit=4")
    data = trainer.load_data(recipe, chat_target())
    assert len(data.train) == 14 and [sample.row_id for sample in data.held_out] == [
        "row0",
        "row1",
        "row2",
        "row3",
    ]


def test_tensorboard_gets_every_level(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer.train(
        make_recipe(tmp_path, "train.tracker=tensorboard", "train.eval_every=5", method="eagle3"),
        chat_target(),
    )
    events = EventAccumulator(str(tmp_path / "out/headsmith")).Reload()
    assert {"loss/0", "loss/1", "teacher_forced_top1/1", "lr", "held_out/top_k/1/9"} <= set(events.Tags()["scalars"])


# ---- refusals ----


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.mixed_precision=fp16", "fp16, which needs a GPU; set it to bf16 or null"),
        ("drafter.method=hydrangea", "unknown drafter 'hydrangea'; known are draft_model, eagle, eagle3"),
        ("drafter.options={heads: 3}", "its options are"),
        ("drafter.options={draft_vocab_size: 0}", "draft_vocab_size is 0, expected 1 to"),
    ],
)
def test_recipes_that_cannot_be_trained_are_refused(override, message, tmp_path):
    with pytest.raises(RecipeError, match=re.escape(message)):
        trainer.train(make_recipe(tmp_path, override), chat_target())


def test_a_drafter_without_weights_is_refused(tmp_path):
    recipe = load_recipe("smollm2-135m-eagle3", ["drafter.method=prompt_lookup"])
    recipe = replace(recipe, drafter=replace(recipe.drafter, options={}))
    with pytest.raises(RecipeError, match="prompt_lookup, which has no weights and needs no training"):
        trainer.new_drafter(recipe, chat_target())


def test_a_missing_tracker_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"wandb is not installed; pip install 'headsmith\[wandb\]'"):
        trainer.train(make_recipe(tmp_path, "train.tracker=wandb"), chat_target())


def test_a_run_that_holds_everything_out_is_refused(tmp_path):
    with pytest.raises(ConversationError, match="0 samples are left to train on after 14 were held out"):
        trainer.train(make_recipe(tmp_path, "data.eval_fraction=1.0"), chat_target())


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "2"}, "runs 1 process\\(es\\), expected 2"),
        ({"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1"}, "expected 2 or more"),
        ({"ACCELERATE_USE_FSDP": "true"}, "asks for FSDP, expected MULTI_GPU"),
    ],
)
def test_a_launch_that_runs_something_else_is_refused(environment, message, tmp_path, monkeypatch):
    accelerator = Accelerator(cpu=True)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(trainer.LaunchError, match=message):
        trainer.check_launch(accelerator)


def test_processes_that_read_different_data_are_refused(monkeypatch):
    Accelerator(cpu=True)
    trainer.check_same_data("a")
    monkeypatch.setattr(trainer, "gather_object", lambda found: [*found, "b"])
    with pytest.raises(trainer.LaunchError, match=r"fingerprints a, b\), expected the same"):
        trainer.check_same_data("a")


def test_the_command_line_says_what_is_wrong_without_a_traceback(tmp_path, capsys):
    make_recipe(tmp_path)
    recipe = str(tmp_path / "recipe.yaml")
    for arguments, message in (
        (["nowhere.yaml"], "no recipe file nowhere.yaml"),
        ([recipe, "train.speed=9"], "unknown key train.speed"),
        ([recipe, "target=./nowhere"], "the target './nowhere' is not a folder"),
        ([recipe, f"target={tmp_path}"], "cannot be loaded"),
    ):
        assert trainer.main(arguments) == 2
        found = capsys.readouterr().err
        assert found.startswith("error: ") and message in found and "Traceback" not in found
        AcceleratorState._reset_state(reset_partial_state=True)


# ---- processes ----


def save_target(folder: Path) -> Path:
    """A target in a folder, for processes of their own."""
    target = chat_target()
    target.model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def launch(folder: Path, *overrides: str, processes: int = 1, code: str | None = None) -> subprocess.Popen:
    """Start a run in the background; `code` runs in place of the command, with the recipe in sys.argv."""
    recipe = folder / "recipe.yaml"
    target = f"target={save_target(folder / 'target')}"
    start = ["-c", code] if code else ["-m", "headsmith.training.train"]
    if processes > 1:
        config = folder / "launch.yaml"
        config.write_text(LAUNCH)
        start = [
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            str(config),
            "-m",
            "headsmith.training.train",
        ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, *start, str(recipe), target, *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def finish(process: subprocess.Popen, code: int = 0) -> str:
    output = process.communicate(timeout=300)[0]
    assert process.returncode == code, output
    return output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_resumes_bit_for_bit(tmp_path):
    """SIGKILL leaves no time for anything; it comes while the third checkpoint is being written."""
    killed = """
import os, signal, sys
from headsmith.heads import checkpoint
from headsmith.training import state, train
from accelerate import Accelerator
save = Accelerator.save_state
def half(self, folder, **options):
    save(self, folder, **options)
    if self.step > 10:
        os.kill(os.getpid(), signal.SIGKILL)
Accelerator.save_state = half
train.main(sys.argv[1:])
"""
    overrides = ["train.save_every=2", "evaluate.prompts=0"]
    for name in ("whole", "killed"):
        make_recipe(tmp_path / name, method="eagle3")
    finish(launch(tmp_path / "whole", *overrides))
    finish(launch(tmp_path / "killed", *overrides, code=killed), -signal.SIGKILL)
    root = tmp_path / "killed/out/checkpoints"
    assert sorted(path.name[:11] for path in root.iterdir()) == [".step-00000", "step-000002", "step-000004"]
    finish(launch(tmp_path / "killed", *overrides, "resume=true"))
    assert_same_run(tmp_path / "whole/out", tmp_path / "killed/out")
    assert not list(root.glob(".*"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_train_as_one_does(tmp_path):
    """The same batches on two ranks and in two micro-batches: the same weights, up to the order of sums.

    The data are uneven: one rank has a filler in every epoch. A resume is exact on two ranks, too.
    """
    common = ["train.mixed_precision=null", "train.batch_tokens=75"]
    for name in ("one", "two", "resumed"):
        recipe = make_recipe(tmp_path / name, *common, method="eagle3")
    plan = Batches(trainer.load_data(recipe, chat_target()).train, 75, world=2).plan(0)
    assert [batch.filler for batch in plan] == [False] * 7 + [True]
    finish(launch(tmp_path / "one", *common, "train.accumulation=2"))
    assert "2 process(es)" in finish(launch(tmp_path / "two", *common, "train.accumulation=1", processes=2))
    mine, theirs = (load_file(tmp_path / name / "out/heads/model.safetensors") for name in ("one", "two"))
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], atol=1e-5, rtol=1e-3)
    logs = [read_log(tmp_path / name / "out") for name in ("one", "two")]
    for line, other in zip(*logs, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-3)
        assert line["epoch"] == other["epoch"]
    shutil.copytree(tmp_path / "two/out", tmp_path / "resumed/out")
    for folder in ("checkpoints/step-000010", "heads"):
        shutil.rmtree(tmp_path / "resumed/out" / folder)
    overrides = [*common, "train.accumulation=1", "resume=true"]
    assert "going on from" in finish(launch(tmp_path / "resumed", *overrides, processes=2))
    assert_same_run(tmp_path / "two/out", tmp_path / "resumed/out")
