"""Costs as the work grows: what a forward has to do, the law that is fitted to its times, and costs at a context."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from headsmith.heads import build_drafter
from headsmith.inference import cost_table, costs
from headsmith.inference.cost_table import Law, Sizes, Work, fit_law, measure_table, non_negative_fit, report
from headsmith.inference.costs import CostModel, Round, cost_model, measured_contexts, timed
from headsmith.inference.engine import choose_forward
from headsmith.scripts import calibrate

from tests.tiny import tiny_target

GRID = list(itertools.product((256, 1024, 4096), (1, 2, 8), (1, 8, 64)))
SMOL = Sizes(parameters=134_000_000, weight_bytes=268_000_000, token_bytes=23_040, token_operations=69_120)


def tiny_sizes(family: str = "llama", **changes) -> Sizes:
    target = tiny_target(family, **changes)
    return Sizes.of(target, choose_forward(target).layer_shapes)


def test_sizes_of_a_tiny_target_are_those_counted_by_hand():
    """Hidden 32, 4 heads of 8 on 2 key heads, MLP 48, 4 layers, 97 tokens, fp32."""
    attention = 32 * 32 + 2 * 32 * 16 + 32 * 32  # queries, keys and values, output
    layer = attention + 3 * 32 * 48 + 2 * 32  # MLP, two norms
    parameters = 4 * layer + 32 + 97 * 32  # last norm, head
    expected = Sizes(parameters, 4 * parameters, token_bytes=4 * 2 * 2 * 8 * 4, token_operations=4 * 4 * 4 * 8)
    assert tiny_sizes() == expected
    # The head is the embedding: read once, and multiplied with all the same.
    assert tiny_sizes(tie_word_embeddings=True) == expected


def test_sizes_in_bfloat16_are_half_the_bytes_and_all_of_the_operations():
    whole, half = tiny_sizes(), tiny_sizes(dtype=torch.bfloat16)
    assert (2 * half.weight_bytes, 2 * half.token_bytes) == (whole.weight_bytes, whole.token_bytes)
    assert (half.parameters, half.token_operations) == (whole.parameters, whole.token_operations)


def test_looked_up_positions_are_no_work():
    """GPT-2: MLP of 4 · 32 with biases, full heads, LayerNorms with biases; 512 learned positions."""
    layer = (32 * 96 + 96) + (32 * 32 + 32) + (32 * 128 + 128) + (128 * 32 + 32) + 4 * 32
    sizes = tiny_sizes("gpt2")
    assert sizes.parameters == 4 * layer + 2 * 32 + 97 * 32
    assert sizes.token_bytes == 4 * 4 * 2 * 8 * 4


def test_work_of_a_forward():
    work = Sizes(parameters=10, weight_bytes=20, token_bytes=3, token_operations=7).work(context=100, batch=2, nodes=5)
    assert work == Work(bytes=20 + 3 * 2 * 100, products=2 * 10 * 2 * 5, attention=7 * 2 * 5 * 100)


@pytest.mark.parametrize(
    "law",
    [
        Law(2e-3, 1 / 30e9, 1 / 900e9, 1 / 400e9),
        Law(0.0, 1 / 6e9, 1 / 600e9, 1 / 200e9),  # no fixed part
        Law(2e-3, 1 / 30e9, 0.0, 1 / 400e9),  # products hidden behind the reading
    ],
)
def test_the_fit_recovers_the_constants_that_made_the_times(law):
    works = [SMOL.work(*one) for one in GRID]
    found = fit_law(works, [law.seconds(work) for work in works])
    for name in ("fixed", "byte", "product", "attention"):
        assert getattr(found, name) == pytest.approx(getattr(law, name), rel=1e-6, abs=1e-18), name


def test_the_fit_is_relative_and_never_below_zero():
    rng = np.random.default_rng(0)
    from scipy.optimize import nnls

    for _ in range(50):
        columns = rng.normal(size=(12, 4))
        found = non_negative_fit(columns)
        expected, rest = nnls(columns, np.ones(12))
        assert np.allclose(found, expected, atol=1e-9)
        assert np.linalg.norm(columns @ found - 1) == pytest.approx(rest)
    works = [Work(0, 0, 0), Work(0, 0, 0)]
    # Of 1 s and 3 s the constant c with the least (c/1 - 1)² + (c/3 - 1)² is 1.2, where the mean is 2.
    assert fit_law(works, [1.0, 3.0]).fixed == pytest.approx(1.2)


def test_a_law_is_said_in_units_that_people_know():
    assert str(Law(2.34e-3, 1 / 30e9, 1 / 900e9, 0.0)).split("; ") == [
        "2.3 ms a forward",
        "bytes at 30 GB/s",
        "products with weights at 900 GFLOP/s",
        "attention at no limit seen in GFLOP/s",
    ]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_line_for_each_combination_beside_the_law(family):
    target = tiny_target(family)
    drafter = build_drafter("eagle3", target)
    table = measure_table(target, drafter, choose_forward(target), (16, 64), (1, 3), (1, 4), repeats=1)
    asked = set(itertools.product((16, 64), (1, 3), (1, 4)))
    assert {(line.context, line.batch, line.nodes) for line in table.lines} == asked and len(table.lines) == len(asked)
    for line in table.lines:
        work = table.sizes.work(line.context, line.batch, line.nodes)
        assert line.measured > 0 and line.expected == pytest.approx(table.law.seconds(work))
    assert [(d.context, d.batch) for d in table.drafting] == [(16, 1), (64, 1), (16, 3), (64, 3)]
    median, worst = table.errors()
    ratios = [abs(1 / line.ratio - 1) for line in table.lines]
    assert (median, worst) == (pytest.approx(np.median(ratios)), pytest.approx(max(ratios)))


def test_each_time_is_of_the_forward_that_its_line_names(monkeypatch):
    """Times that the forwards' own shapes make up come back in the lines, and the law explains them."""
    target = tiny_target()
    forward = choose_forward(target)
    law, sizes = Law(1e-3, 1e-9, 1e-9, 1e-9), Sizes.of(target, forward.layer_shapes)

    def verify(self, tree):
        assert len(set(self.session.lengths.tolist())) == 1
        return int(self.session.lengths[0]), len(tree.tokens), tree.size

    monkeypatch.setattr(Round, "verify", verify)
    monkeypatch.setattr(
        cost_table, "timed", lambda parts, *_: {n: law.seconds(sizes.work(*part())) for n, part in parts.items()}
    )
    table = measure_table(target, None, forward, (16, 64, 256), (1, 3), (1, 4, 16))
    assert table.errors()[1] < 1e-6 and table.drafting == []
    assert table.law.attention == pytest.approx(law.attention, rel=1e-6)


def test_combinations_beyond_the_positions_are_skipped_and_said():
    target = tiny_target()  # 512 positions
    table = measure_table(target, None, choose_forward(target), (64, 508), (1,), (1, 4, 5), repeats=1)
    assert len(table.lines) == 5 and table.skipped == [(508, 1, 5)]
    assert "    508      1      5  skipped: beyond the target's positions" in report(table)
    short = build_drafter("eagle3", target, max_positions=100)
    table = measure_table(target, short, choose_forward(target), (64, 97), (1,), (1,), repeats=1)
    assert [draft.context for draft in table.drafting] == [64] and len(table.lines) == 2
    with pytest.raises(ValueError, match="has 512 positions, too few for a context of 600 and 2 nodes; name shorter"):
        measure_table(target, None, choose_forward(target), (600, 4096), (1,), (2,))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_round_stands_behind_its_context_without_running_it(family):
    target = tiny_target(family)
    forward = choose_forward(target)
    drafter = build_drafter("eagle3", target)
    state = torch.get_rng_state()
    setting = Round(target, drafter, 2, forward, 100, 8)
    assert torch.equal(torch.get_rng_state(), state)  # sampling goes on as if nothing had been measured
    assert setting.session.lengths.tolist() == [100, 100] and setting.session.forwards == 0
    assert setting.state.cache.lengths.tolist() == [100, 100]
    output = setting.session.forward(setting.tokens[:, :1]).final
    kept = setting.session.cache
    assert bool(output.isfinite().all())
    kept.rewind(torch.tensor([1, 1]))
    assert not torch.allclose(setting.session.forward(setting.tokens[:, :1]).final, output)  # it did attend to them


def test_costs_stand_on_the_line_through_both_contexts():
    near = CostModel((1, 8), (10.0, 12.0), 3.0, 2.0, context=100)
    far = CostModel((1, 8), (20.0, 42.0), 4.0, 1.0, context=1100)
    costs = near.with_growth(far)
    middle = costs.at(600)
    assert middle.verify == pytest.approx((15.0, 27.0)) and middle.plain == pytest.approx(15.0)
    assert middle.observe == pytest.approx(3.5)
    assert middle.expand == 2.0  # a dip is noise
    dip = near.with_growth(CostModel((1, 8), (9.0, 13.0), 3.0, 2.0, context=1100))
    assert dip.at(1100).verify == pytest.approx((10.0, 13.0))
    coarse = CostModel((1, 4, 8), (10.0, 11.0, 12.0), 3.0, 2.0, context=100).with_growth(far)
    assert coarse.at(1100).verify == pytest.approx((20.0, 11.0 + 10 + 20 * 3 / 7, 42.0))
    assert costs.at(50) is costs and near.at(5000) is near
    assert middle.at(1100).verify == pytest.approx(far.verify) and costs.at(2100).verify == pytest.approx((30.0, 72.0))


def test_measured_costs_grow_with_the_context_and_are_kept_whole(monkeypatch, tmp_path):
    monkeypatch.setattr(costs, "cache_folder", lambda: tmp_path)
    target = tiny_target()
    drafter, forward = build_drafter("eagle3", target), choose_forward(target)

    def by_context(parts, *_):
        return {(context, part): context + (part if isinstance(part, int) else 0) for context, part in parts}

    monkeypatch.setattr(costs, "timed", by_context)
    first = cost_model(target, drafter, 1, forward)
    assert measured_contexts(target, drafter, 1, forward) == (192, 448)
    assert first.context == 192 and first.verify == tuple(192 + n for n in costs.SIZES)
    assert first.at(448).verify == pytest.approx(tuple(448 + n for n in costs.SIZES))
    target.__dict__.pop("_costs")
    assert cost_model(target, drafter, 1, forward) == first
    (file,) = (tmp_path / "costs").iterdir()
    target.__dict__.pop("_costs")
    file.write_text(json.dumps({"nodes": [1], "verify": [1.0], "observe": 1.0, "expand": 1.0}))  # an earlier release's
    assert cost_model(target, drafter, 1, forward) == first


def test_only_the_short_context_where_the_long_one_does_not_fit():
    target = tiny_target()
    drafter, forward = build_drafter("prompt_lookup", target), choose_forward(target)
    assert measured_contexts(target, drafter, 1, forward) == (192, 448)
    short = build_drafter("eagle3", target, max_positions=300)
    assert measured_contexts(target, short, 1, forward) == (150,)
    row = 4 * 2 * 2 * 8 * 4
    assert measured_contexts(target, drafter, costs.ROOM // row // 400, forward) == (192, 400)
    assert measured_contexts(target, drafter, costs.ROOM // row // 300, forward) == (192,)
    recurrent = tiny_target("mamba", state_size=4, expand=2, num_attention_heads=None)
    assert measured_contexts(recurrent, drafter, 1, choose_forward(recurrent)) == (192,)
    with pytest.raises(ValueError, match="verifies no tree in one forward"):
        measure_table(recurrent, None, choose_forward(recurrent))


def test_the_parts_take_turns():
    order = []
    timed({name: lambda name=name: order.append(name) for name in "ab"}, 2)
    assert order == ["a", "b"] * 3


def run(*arguments: str):
    return CliRunner().invoke(calibrate.command, ["--target", "t", *arguments])


def test_the_command_prints_the_table_and_writes_it(monkeypatch, tmp_path):
    target = tiny_target()
    monkeypatch.setattr(calibrate, "open_target", lambda *_: target)
    monkeypatch.setattr(calibrate, "open_heads", lambda *_: build_drafter("eagle3", target))
    given = ("--table", "--contexts", "16,64", "--batches", "1,2", "--sizes", "1,8", "--json", str(tmp_path / "t.json"))
    done = run("--heads", "h", *given)
    assert done.exit_code == 0, done.output
    assert "measured / expected" in done.output and "error of the law: median" in done.output
    written = json.loads((tmp_path / "t.json").read_text())
    assert len(written["lines"]) == 8 and len(written["drafting"]) == 4 and written["forward"] == "lean"
    assert run(*given).output.count("first level") == 0  # without heads nothing is drafted


def test_the_command_refuses_what_it_cannot_use():
    assert "'1,x' is not a list of positive integers such as 1,2,8" in run("--table", "--sizes", "1,x").output
    assert "is not a list of positive integers" in run("--table", "--batches", "0").output
    assert "--json writes the table; add --table" in run("--json", "x.json").output
