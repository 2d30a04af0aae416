"""The drafter protocol and the decoder, driven by scripted drafters: identity, forwards, ragged rows, stops."""

from __future__ import annotations

import math

import pytest
import torch
from headsmith.heads.drafter import Drafter, Needs
from headsmith.heads.prompt_lookup import PromptLookup
from headsmith.inference import CalibratedTree, DynamicTree, FixedTree, SpeculativeDecoder, chain
from headsmith.inference.costs import CostModel

from tests.scripted import ScriptedDrafter
from tests.tiny import FAMILIES, LEAN, greedy_reference, random_prompts, tiny_target

NEW = 23
CHEAP = CostModel((1, 32), (1.0, 1.1), 0.0, 0.0)
TREES = {
    "chain1": chain(1),
    "chain4": chain(4),
    "fixed": FixedTree(((0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (1, 1, 0), (1, 1, 1), (0, 0, 0))),
    "dynamic": DynamicTree(total=8, depth=4, top_k=3),
    "dynamic_wide": DynamicTree(total=24, depth=3, top_k=4),
    "calibrated": CalibratedTree(nodes=16, depth=4, top_k=3, fallback=False, costs=CHEAP),
}
DRAFTERS = {
    "perfect": {},
    "second_best": {"rank": lambda row, level: 1},
    "mixed_rank": {"rank": lambda row, level: (row + level) % 2},
    "wrong": {"right": lambda row, level: False},
    "right_for_2_levels": {"right": lambda row, level: level <= 2},
    "ragged_stop": {"stops": lambda row, level: level > 1 + row % 3},
    "no_continuation": {"stops": lambda row, level: True},
    "reduced_vocabulary": {"draft_ids": torch.arange(0, 97, 2)},
    "with_features": {"needs": Needs(layers=(0, 2, 4), final=True)},
}


def setting(family="llama", batch=3, longest=11, new=NEW, **changes):
    target = tiny_target(family, **changes)
    ids, mask = random_prompts(batch, longest)
    answers = greedy_reference(target, ids, mask, new)
    scripts = [ids[r][mask[r].bool()].tolist() + answers[r] for r in range(batch)]
    return target, ids, mask, answers, scripts


def decode(target, drafter, tree, ids, mask, new=NEW, forward="auto", **arguments):
    decoder = SpeculativeDecoder(target, drafter, tree=tree, forward=forward)
    out = decoder.generate(ids, mask, max_new_tokens=new, do_sample=False, **arguments)
    assert torch.equal(out.sequences[:, : ids.shape[1]], ids)
    return out.sequences[:, ids.shape[1] :].tolist(), out.stats


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("batch", [1, 3])
def test_every_drafter_and_tree_gives_the_greedy_text(kind, tree, batch):
    target, ids, mask, answers, scripts = setting(batch=batch)
    drafter = ScriptedDrafter(scripts, 97, **DRAFTERS[kind])
    assert isinstance(drafter, Drafter)
    found, stats = decode(target, drafter, TREES[tree], ids, mask)
    assert found == answers
    assert stats.committed == batch * (NEW - 1)
    # A chain only takes the best child; row 0 of "mixed_rank" has the right token second at the first level.
    second = kind == "second_best" or (kind == "mixed_rank" and batch == 1)
    never = kind in ("wrong", "no_continuation") or (second and tree.startswith("chain"))
    assert (stats.accepted == 0) == never
    if never:
        assert stats.forwards == NEW - 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("forward", ["lean", "generic"])
def test_every_family_decodes_a_branching_tree_exactly(family, forward):
    if forward == "lean" and family not in LEAN:
        with pytest.raises(ValueError, match="cannot use the lean forward"):
            SpeculativeDecoder(tiny_target(family), None, forward="lean").generate(torch.ones(1, 3, dtype=torch.long))
        return
    target, ids, mask, answers, scripts = setting(family)
    drafter = ScriptedDrafter(scripts, 97, **DRAFTERS["mixed_rank"])
    found, stats = decode(target, drafter, TREES["dynamic"], ids, mask, forward=forward)
    assert found == answers
    assert stats.accepted > 0


@pytest.mark.parametrize("depth", [1, 2, 4, 7])
@pytest.mark.parametrize("new", [1, 2, 9, 24])
def test_a_perfect_chain_takes_the_fewest_forwards_and_a_wrong_one_the_most(depth, new):
    target, ids, mask, answers, scripts = setting(batch=1, new=new + 8)
    answers = [answers[0][:new]]
    found, stats = decode(target, ScriptedDrafter(scripts, 97), chain(depth), ids, mask, new)
    assert found == answers
    assert stats.forwards == math.ceil((new - 1) / (depth + 1))
    found, stats = decode(target, ScriptedDrafter(scripts, 97, **DRAFTERS["wrong"]), chain(depth), ids, mask, new)
    assert found == answers
    assert stats.forwards == new - 1


@pytest.mark.parametrize("batch", [1, 4])
def test_plain_decoding_and_prompt_lookup_on_the_same_engine(batch):
    target, ids, mask, answers, _ = setting(batch=batch)
    found, stats = decode(target, None, "chain", ids, mask)
    assert found == answers and stats.tree == "plain" and stats.accepted == 0
    ids = torch.cat((ids, ids), 1)
    mask = torch.cat((mask, mask), 1)
    if batch == 1:
        answers = greedy_reference(target, ids, mask, NEW)
        for tree in TREES.values():
            found, stats = decode(target, PromptLookup(), tree, ids, mask)
            assert found == answers


def test_prompt_lookup_finds_a_repetition():
    target = tiny_target()
    ids = torch.tensor([[5, 6, 7, 8, 9, 5, 6]])
    drafter = PromptLookup(longest=2)
    state = drafter.start(None, ids, torch.tensor([7]))
    proposal = drafter.observe(state, None, torch.tensor([[6, 7, 8, 9, 5, 6, 7]]), torch.tensor([7]))
    assert proposal.ids[0, 0, 0] == 8
    proposal = drafter.expand(state, torch.tensor([[0]]), torch.tensor([[8]]), torch.tensor([[True]]))
    assert proposal.ids[0, 0, 0] == 9
    repeated = torch.tensor([[5, 6, 7, 8] * 6])
    answer = greedy_reference(target, repeated, torch.ones_like(repeated), NEW)
    assert decode(target, drafter, chain(3), repeated, None)[0] == answer


@pytest.mark.parametrize("k", [1, 3, 8, 9])
@pytest.mark.parametrize("tree", ["chain4", "dynamic"])
def test_eos_inside_a_round_ends_the_row_there(k, tree):
    target, ids, mask, answers, scripts = setting(batch=3)
    eos = [answers[0][k], answers[1][k + 2]]
    expected = greedy_reference(target, ids, mask, NEW, eos_token_id=eos)
    found, _ = decode(target, ScriptedDrafter(scripts, 97), TREES[tree], ids, mask, eos_token_id=eos, pad_token_id=0)
    longest = max(len(row) for row in expected)
    assert found == [row + [0] * (longest - len(row)) for row in expected]


def test_left_and_right_padding_are_one():
    target, ids, mask, answers, scripts = setting(batch=3)
    flipped = torch.zeros_like(ids), torch.zeros_like(mask)
    for row in range(3):
        n = int(mask[row].sum())
        flipped[0][row, :n] = ids[row][mask[row].bool()]
        flipped[1][row, :n] = 1
    found, _ = decode(target, ScriptedDrafter(scripts, 97), "dynamic", *flipped)
    assert found == answers


def test_the_drafter_sees_every_committed_token_once_and_in_order():
    target, ids, mask, _, scripts = setting(batch=2)
    drafter = ScriptedDrafter(scripts, 97, **DRAFTERS["right_for_2_levels"])
    decode(target, drafter, TREES["dynamic"], ids, mask)
    for row in range(2):
        seen = drafter.state.observed[row]
        assert len(seen) > len(scripts[row]) - 8
        assert seen == scripts[row][: len(seen)]


def test_features_of_the_accepted_path_are_the_targets_own():
    """What observe is given equals an ordinary forward over the same text."""
    target, ids, mask, _answers, scripts = setting(batch=2)
    needs = Needs(layers=(0, 2, 4), final=True)
    got = [[], []]

    class Spy(ScriptedDrafter):
        def observe(self, state, features, next_tokens, counts):
            for row, count in enumerate(counts.tolist()):
                got[row].append((features.hidden[row, :count], features.final[row, :count]))
            return super().observe(state, features, next_tokens, counts)

    decode(target, Spy(scripts, 97, needs=needs, **DRAFTERS["mixed_rank"]), TREES["dynamic"], ids, mask)
    for row in range(2):
        hidden = torch.cat([h for h, _ in got[row]])
        final = torch.cat([f for _, f in got[row]])
        whole = target.features(torch.tensor([scripts[row]]), needs)
        torch.testing.assert_close(hidden, whole.hidden[0, : len(hidden)], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(final, whole.final[0, : len(final)], atol=2e-5, rtol=1e-4)
        states = target.model(torch.tensor([scripts[row]]), output_hidden_states=True).hidden_states
        torch.testing.assert_close(whole.hidden[0, :, 1], states[2][0])
        torch.testing.assert_close(whole.final[0], states[-1][0])


def test_the_cache_grows_without_changing_the_text():
    target, ids, mask, answers, scripts = setting(batch=2, new=300)
    found, _ = decode(target, ScriptedDrafter(scripts, 97), TREES["chain4"], ids, mask, new=300)
    assert found == answers


def test_streaming_hands_out_every_token():
    target, ids, mask, answers, scripts = setting(batch=1)

    class Streamer:
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.ended = True

    streamer = Streamer()
    decode(target, ScriptedDrafter(scripts, 97), "chain", ids, mask, streamer=streamer)
    assert streamer.tokens == ids[0].tolist() + answers[0] and streamer.ended
    with pytest.raises(ValueError, match="a streamer shows one row"):
        decode(target, None, "chain", ids.repeat(2, 1), None, streamer=streamer)


def test_refusals_name_what_they_refuse():
    target, ids, mask, _, _scripts = setting(batch=1)
    refused = {"num_beams": 4, "guidance_scale": 1.5, "prompt_lookup_num_tokens": 3, "output_attentions": True}
    for name, value in refused.items():
        with pytest.raises(ValueError, match=name):
            decode(target, None, "chain", ids, mask, **{name: value})
    with pytest.raises(TypeError, match="not_an_argument"):
        decode(target, None, "chain", ids, mask, not_an_argument=1)
    with pytest.raises(ValueError, match="positions"):
        decode(target, None, "chain", ids, mask, new=600)
    with pytest.raises(ValueError, match="known are chain, fixed, dynamic"):
        SpeculativeDecoder(target, None, tree="bush")
    with pytest.raises(ValueError, match="no tokens"):
        decode(target, None, "chain", ids, torch.zeros_like(ids))
    with pytest.raises(ValueError, match="holes"):
        holes = torch.ones_like(ids)
        holes[0, 3] = 0
        decode(target, None, "chain", ids, holes)


def test_the_target_is_frozen():
    target = tiny_target()
    assert not any(p.requires_grad for p in target.model.parameters())
    assert not target.model.training
