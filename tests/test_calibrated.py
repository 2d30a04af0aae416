"""The cost-aware tree: the plan that pays most, what it learns from rounds, and when it gives up."""

from __future__ import annotations

import json
import logging
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from headsmith.heads import build_drafter
from headsmith.heads.drafter import DraftState
from headsmith.inference import CalibratedTree, SpeculativeDecoder, costs
from headsmith.inference.calibrated_tree import SAMPLES, SELDOM, STAKE
from headsmith.inference.costs import CostModel, calibrate, cost_model
from headsmith.inference.engine import choose_forward

from tests.test_trees import PathDrafter, naive_dynamic, paths_of
from tests.tiny import random_prompts, tiny_target


def model(node: float, observe: float = 0.0, expand: float = 0.0) -> CostModel:
    """A step of plain decoding costs 1; every further node, the first and every other level as much as is said."""
    return CostModel((1, 2, 32), (1.0, 1.0 + node, 1.0 + 31 * node), observe, expand)


def build(builder: CalibratedTree, drafter: PathDrafter, active: torch.Tensor | None = None, context: int = 100):
    builder._measured = builder.costs or builder._measured
    builder._session = SimpleNamespace(lengths=torch.full((drafter.batch,), context), compiled=None)
    if builder._costs is None:
        builder._price(0)
    active = torch.ones(drafter.batch, dtype=torch.bool) if active is None else active
    state = DraftState(None, drafter.batch)
    return builder.build(drafter, state, drafter.first(), torch.arange(drafter.batch), active)


def probability(drafter: PathDrafter, path: tuple[int, ...], row: int = 0) -> float:
    return math.exp(sum(float(drafter.scores(row, path[:i])[path[i]]) for i in range(len(path))))


@pytest.mark.parametrize("sharp", [1.0, 2.0, 5.0])
@pytest.mark.parametrize("node", [0.0, 0.03, 0.1, 0.3])
def test_the_size_is_that_of_most_expected_tokens_a_second(node, sharp):
    """Against every size of the tree that EAGLE-2 would draft with the same passes."""
    drafter = PathDrafter(1, sharp)
    tree = build(CalibratedTree(nodes=16, depth=4, top_k=3, costs=model(node, 0.1, 0.05)), drafter)
    found = set(paths_of(tree, 0))
    depth = drafter.calls + 1
    rates = {}
    for size in range(1, 17):
        chosen = naive_dynamic(drafter, 0, size, depth, 3)
        rates[len(chosen) + 1] = (1 + sum(probability(drafter, path) for path in chosen)) / (
            1 + node * len(chosen) + 0.1 + 0.05 * drafter.calls
        )
    best = max(rates, key=rates.get)
    assert rates[len(found)] == pytest.approx(rates[best])
    assert found - {()} == naive_dynamic(drafter, 0, len(found), depth, 3)


def test_dear_nodes_give_no_tree_and_free_ones_the_largest():
    assert build(CalibratedTree(costs=model(5.0)), PathDrafter(2)).size == 1
    tree = build(CalibratedTree(nodes=20, costs=model(0.0)), PathDrafter(2))
    assert tree.counts.tolist() == [20, 20]


def test_dearer_nodes_behind_a_long_text_give_a_smaller_tree():
    """Each token of context adds a thousandth to the price of a node."""
    near = CostModel((1, 32), (1.0, 1.0), 0.0, 0.0, 0, CostModel((1, 32), (0.0, 31e-3), 0.0, 0.0))
    sizes = [build(CalibratedTree(costs=near), PathDrafter(1), context=context).size for context in (0, 20, 2000)]
    assert sizes[0] == 32 > sizes[1] > sizes[2] == 1


def test_dear_levels_are_not_drafted_and_free_ones_are():
    dear, free = PathDrafter(1, 8.0), PathDrafter(1, 8.0)
    build(CalibratedTree(costs=model(0.02, expand=3.0)), dear)
    build(CalibratedTree(costs=model(0.02, expand=0.0)), free)
    assert dear.calls == 0 and free.calls >= 2


def test_an_unsure_drafter_gets_a_small_tree():
    sizes = [build(CalibratedTree(costs=model(0.05)), PathDrafter(1, sharp)).size for sharp in (0.1, 1.5, 4.0)]
    assert sizes[0] < sizes[1]


def test_rows_that_take_no_part_have_no_nodes_and_count_for_nothing():
    active = torch.tensor([True, False, True])
    builder = CalibratedTree(costs=model(0.02))
    tree = build(builder, PathDrafter(3), active)
    assert (tree.counts > 0).tolist() == active.tolist()
    foreseen = sum(probability(PathDrafter(3), path, row) for row in (0, 2) for path in paths_of(tree, row)[1:])
    assert builder._verified.sum() == pytest.approx(foreseen, rel=1e-4)


def rounds(
    builder: CalibratedTree, accepted: int, count: int, slower: float = 1.0, plain: float = 1.0
) -> tuple[int, int]:
    """Rounds that accept so many each and take `slower` times what was planned; a plain step takes `plain`.

    Returns how many were drafted and how many were plain ones, until the builder gave up.
    """
    drafter, done = PathDrafter(1, 4.0), [0, 0]
    while sum(done) < count and builder.pays:
        build(builder, drafter)
        plan = builder._plan
        seconds = {"draft": 0.0, "verify": plan.seconds * slower if plan else plain}
        builder.learn(torch.tensor([accepted + 1 if plan else 1]), torch.tensor([True]), seconds)
        done[plan is None] += 1
    return done[0], done[1]


def measured(costs: CostModel) -> CalibratedTree:
    """A builder that has measured these costs, and corrects them by its rounds."""
    builder = CalibratedTree()
    builder._measured = costs
    return builder


def test_trust_in_the_drafter_follows_what_the_target_accepts():
    builder = CalibratedTree(costs=model(0.01), fallback=False)
    before = build(builder, PathDrafter(1, 4.0)).size
    rounds(builder, 0, 200)
    assert builder._trust()[0] < 0.2
    assert build(builder, PathDrafter(1, 4.0)).size < before
    good = CalibratedTree(costs=model(0.01))
    build(good, PathDrafter(1, 4.0))
    foreseen = good._verified[0]
    rounds(good, 1, 200)
    assert good._trust()[0] == pytest.approx(1 / foreseen, rel=0.1)


def test_a_call_loses_no_more_than_the_stake():
    """A round that accepts nothing takes 1.5 plain steps and so loses half of one."""
    builder = CalibratedTree(costs=model(0.0, observe=0.5))
    assert rounds(builder, 0, 100) == (STAKE / 0.5 + 1, 0)
    assert not builder.pays


def test_what_a_call_gained_is_not_lost_to_a_bad_passage():
    builder = CalibratedTree(costs=model(0.01, observe=0.5))
    rounds(builder, 3, 40)
    drafted, _ = rounds(builder, 0, 20)
    assert builder.pays and drafted == 20


def test_rounds_slower_than_measured_are_noticed():
    builder = measured(model(0.01, observe=0.1))
    rounds(builder, 1, 100)
    assert builder.pays
    drafted, _ = rounds(builder, 1, 300, slower=3.0)
    assert not builder.pays and drafted < 64 + 3 * SELDOM


def test_plain_steps_faster_than_measured_are_noticed():
    """A drafted round of 2 tokens takes 1.6 plain steps as they were measured, and 2.7 as they are."""
    builder = measured(model(0.0, observe=0.6))
    drafted, plain = rounds(builder, 1, 300, plain=0.6)
    assert not builder.pays and plain <= SAMPLES
    assert drafted < SELDOM * SAMPLES + 32
    as_measured = measured(model(0.0, observe=0.6))
    assert rounds(as_measured, 1, 300)[0] > 280 and as_measured.pays


def test_a_machine_that_is_slower_as_a_whole_changes_nothing():
    builder = measured(model(0.0, observe=0.2))
    rounds(builder, 1, 100)
    rounds(builder, 1, 60, slower=3.0, plain=3.0)
    assert builder.pays
    assert builder._plain() == pytest.approx(3.0)
    before = builder.round_costs().predicted_ratio(2)
    rounds(builder, 1, 60, slower=3.0, plain=3.0)
    assert builder.round_costs().predicted_ratio(2) == pytest.approx(before, rel=0.05)


def test_a_clear_gain_is_seldom_doubted_and_given_costs_are_not():
    drafted, plain = rounds(measured(model(0.0)), 2, 640)
    assert drafted + plain == 640 and SAMPLES <= plain <= SAMPLES + 10
    assert rounds(CalibratedTree(costs=model(0.0, observe=0.9)), 1, 100, plain=0.1) == (100, 0)


def test_a_round_that_is_disturbed_counts_as_any_other():
    builder = measured(model(0.0, observe=0.2))
    rounds(builder, 1, 40)
    rounds(builder, 1, 1, slower=500.0)
    rounds(builder, 1, 40)
    assert builder.pays and builder._plain() == pytest.approx(1.0)


def answer(tree, **arguments):
    target = tiny_target()
    ids, mask = random_prompts(2, 9)
    drafter = build_drafter("eagle3", target)
    decoder = SpeculativeDecoder(target, drafter, tree=tree)
    out = decoder.generate(ids, mask, max_new_tokens=60, do_sample=False, eos_token_id=96, **arguments)
    plain = SpeculativeDecoder(target, None).generate(ids, mask, max_new_tokens=60, do_sample=False, eos_token_id=96)
    return out, plain


def test_where_speculation_does_not_pay_the_rest_is_plain_and_that_is_said_once(caplog):
    tree = CalibratedTree(costs=model(0.5, observe=0.5))
    with caplog.at_level(logging.WARNING, "headsmith"):
        out, plain = answer(tree)
        assert torch.equal(out.sequences, plain.sequences)
        answer(tree)
    assert not tree.pays
    assert len([r for r in caplog.records if "does not pay" in r.message]) == 1


def test_with_fallback_forbidden_it_goes_on_drafting():
    tree = CalibratedTree(costs=model(0.5, observe=0.5), fallback=False)
    out, plain = answer(tree)
    assert tree.pays and torch.equal(out.sequences, plain.sequences)


def test_costs_are_measured_once_and_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(costs, "cache_folder", lambda: tmp_path)
    target = tiny_target()
    drafter, forward = build_drafter("eagle3", target), choose_forward(target)
    first = cost_model(target, drafter, 1, forward)
    assert first.plain > 0 and first.observe > 0 and first.expand >= 0
    assert np.all(np.diff(first.verify_times(48)) >= 0)
    (file,) = (tmp_path / "costs").iterdir()
    target.__dict__.pop("_costs")
    assert cost_model(target, drafter, 1, forward) == first
    assert cost_model(target, drafter, 2, forward) != first  # another batch is another measurement
    target.__dict__.pop("_costs")
    file.write_text(json.dumps({"nodes": [1]}))
    assert cost_model(target, drafter, 1, forward) != first  # what cannot be read is measured anew
    assert calibrate(target, drafter, 1, forward) == cost_model(target, drafter, 1, forward)


def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(costs, "cache_folder", lambda: tmp_path / "file")
    target = tiny_target()
    with caplog.at_level(logging.WARNING, "headsmith"):
        assert cost_model(target, build_drafter("prompt_lookup", target), 1, choose_forward(target)).plain > 0
    assert "are not kept" in caplog.text


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="nodes >= 2"):
        CalibratedTree(nodes=1)
