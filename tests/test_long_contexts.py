"""Long prompts and answers: memory in blocks, prompts in parts, positions that a drafter does not reach; and times."""

from __future__ import annotations

import pytest
import torch
from headsmith.heads.cache import AHEAD, BLOCK, LayerShape, RaggedTreeCache
from headsmith.inference import SpeculativeDecoder, chain, engine
from headsmith.inference.stats import PARTS

from tests.scripted import ScriptedDrafter
from tests.test_conformance import TREES, decode, setting
from tests.tiny import greedy_reference, random_prompts, tiny_target


def cache(capacity: int, **options) -> RaggedTreeCache:
    return RaggedTreeCache([LayerShape(2, 4, 4)] * 3, 1, capacity, torch.float32, "cpu", **options)


def fill(held: RaggedTreeCache, tokens: int) -> None:
    span = held.begin(slice(None), tokens)
    for layer in range(3):
        held.update(layer, torch.ones(1, 2, tokens, 4), torch.ones(1, 2, tokens, 4), span)
    held.commit(torch.arange(tokens)[None], torch.tensor([tokens]))


def test_memory_is_taken_as_rows_grow_and_not_beyond_the_capacity():
    held = cache(100_000)
    assert held.bytes == 0
    fill(held, 10)
    assert 10 <= held.slots <= 10 + AHEAD + 2 * BLOCK
    for _ in range(40):
        fill(held, 500)
        used = int(held.lengths)
        assert used <= held.slots <= used + max(AHEAD, used / 4) + 2 * BLOCK
    assert held.bytes == held.slots * 3 * 2 * (4 + 4) * 4
    small = cache(50)
    fill(small, 40)
    assert small.slots == BLOCK
    fill(small, 60)  # more than was expected
    assert 100 <= small.slots <= 100 * 5 // 4 + 2 * BLOCK


def test_an_answer_may_be_promised_more_than_memory_holds():
    target, ids, mask, answers, scripts = setting(batch=1, max_position_embeddings=10**9)
    drafter = ScriptedDrafter(scripts, 97)
    out = SpeculativeDecoder(target, drafter, tree="dynamic").generate(
        ids, mask, max_new_tokens=10**8, do_sample=False, eos_token_id=answers[0][9]
    )
    end = answers[0].index(answers[0][9]) + 1
    assert out.answers == [answers[0][:end]]
    assert 0 < out.stats.cache_bytes < 2**21


@pytest.mark.parametrize("forward", ["lean", "generic"])
@pytest.mark.parametrize("size", [1, 4, 7])
def test_a_prompt_run_in_parts_is_the_prompt(monkeypatch, forward, size):
    monkeypatch.setattr(engine, "CHUNK", size)
    target, ids, mask, answers, scripts = setting(batch=3, longest=20)
    found, stats = decode(target, ScriptedDrafter(scripts, 97), TREES["dynamic"], ids, mask, forward=forward)
    assert found == answers and stats.accepted > 0
    assert stats.prefilled == int(mask.sum())


def test_a_window_shorter_than_the_parts_of_a_prompt(monkeypatch):
    monkeypatch.setattr(engine, "CHUNK", 5)
    target, ids, mask, answers, scripts = setting("gemma3_text", batch=2, longest=21)
    assert decode(target, ScriptedDrafter(scripts, 97), TREES["fixed"], ids, mask)[0] == answers


class Limited(ScriptedDrafter):
    """Fails where it is shown or asked for a position at or beyond its limit."""

    max_positions = 32

    def observe(self, state, features, next_tokens, counts):
        proposal = super().observe(state, features, next_tokens, counts)
        asked = [known for known, count in zip(state.known, counts.tolist()) if count]
        assert max(asked) <= self.max_positions
        return proposal

    def expand(self, state, parents, tokens, valid):
        depths = [state.nodes[row][parent][0] + 1 for row, above in enumerate(parents.tolist()) for parent in above]
        assert max(depths) < 4
        return super().expand(state, parents, tokens, valid)


@pytest.mark.parametrize("tree", ["chain4", "fixed", "dynamic", "calibrated"])
def test_a_drafter_that_reaches_less_far_than_the_target(tree):
    """Limit 32: a prompt of 40 is decoded plainly; one of 21 is drafted for up to the limit, then goes on plainly."""
    target = tiny_target()
    prompt = random_prompts(1, 40)[0]
    answer = greedy_reference(target, prompt, torch.ones_like(prompt), 23)
    found, stats = decode(target, Limited([prompt[0].tolist() + answer[0]], 97), TREES[tree], prompt, None)
    assert found == answer and stats.accepted == 0 and stats.forwards == 22

    target, ids, mask, answers, scripts = setting(batch=2, longest=21)
    found, stats = decode(target, Limited(scripts, 97), TREES[tree], ids, mask)
    assert found == answers and stats.accepted > 0
    free, more = decode(target, ScriptedDrafter(scripts, 97), TREES[tree], ids, mask)
    assert free == answers and more.forwards < stats.forwards


def test_prompts_on_both_sides_of_the_limit_in_one_batch():
    target, ids, mask, answers, scripts = setting(batch=3, longest=48)
    found, stats = decode(target, Limited(scripts, 97), chain(3), ids, mask)
    assert found == answers and stats.accepted > 0


def test_times_by_part_add_up():
    import time

    target, ids, mask, _, scripts = setting(batch=2)
    decoder = SpeculativeDecoder(target, ScriptedDrafter(scripts, 97), tree="dynamic")
    decoder.generate(ids, mask, max_new_tokens=23, do_sample=False)
    start = time.perf_counter()
    stats = decoder.generate(ids, mask, max_new_tokens=23, do_sample=False).stats
    whole = time.perf_counter() - start
    assert set(stats.seconds) == set(PARTS) and all(seconds > 0 for seconds in stats.seconds.values())
    assert 0.7 * whole < sum(stats.seconds.values()) <= whole
    before = dict(stats.seconds)
    stats.merge(stats)
    assert stats.seconds["draft"] == 2 * before["draft"]
