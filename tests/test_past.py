"""A past kept between calls: the same text as without, and only what is new is run."""

from __future__ import annotations

import pytest
import torch
from headsmith.heads import build_drafter
from headsmith.inference import Past, SpeculativeDecoder
from headsmith.inference.engine import Session

from tests.families import family_target
from tests.scripted import ScriptedDrafter
from tests.tiny import greedy_reference, random_prompts, tiny_target

NEW = 11
TURN = [7, 8, 9]


def grown(ids: torch.Tensor, answers: list[list[int]], cut: int = 0) -> torch.Tensor:
    """The prompts of a next turn: the text so far, less `cut` tokens, and what the user says then."""
    rows = [row.tolist() + answer for row, answer in zip(ids, answers)]
    return torch.tensor([row[: len(row) - cut] + TURN for row in rows])


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "prompt_lookup", "none"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("cut", [0, 4, 16])
def test_turns_of_a_chat_are_those_of_fresh_calls(kind, batch, cut):
    target = tiny_target()
    drafter = None if kind == "none" else build_drafter(kind, target)
    decoder, past = SpeculativeDecoder(target, drafter, tree="dynamic"), Past()
    ids = random_prompts(batch, 9)[0].clamp(min=2)
    for turn in range(3):
        out = decoder.generate(ids, max_new_tokens=NEW, do_sample=False, past=past)
        fresh = decoder.generate(ids, max_new_tokens=NEW, do_sample=False)
        assert out.answers == fresh.answers == greedy_reference(target, ids, torch.ones_like(ids), NEW)
        assert fresh.stats.prefilled == ids.numel()
        if turn:
            # The last shared token is run again, and tokens of the last round, which the drafter had not seen.
            most = len(TURN) + 1 + (0 if drafter is None else decoder.builder.depth + 1)
            assert out.stats.prefilled <= batch * most
        ids = grown(ids, out.answers, cut)


def test_a_drafter_drafts_the_same_with_a_past_as_without():
    """What it is shown must be what it would have seen: with a script, every draft after the turn is right, too."""
    target = tiny_target()
    ids = random_prompts(1, 9)[0]
    first = greedy_reference(target, ids, torch.ones_like(ids), NEW)
    longer = grown(ids, first)
    whole = longer[0].tolist() + greedy_reference(target, longer, torch.ones_like(longer), NEW)[0]
    drafter = build_drafter("eagle3", target)
    decoder, past = SpeculativeDecoder(target, drafter, tree="dynamic"), Past()
    decoder.generate(ids, max_new_tokens=NEW, do_sample=False, past=past)
    seen = []
    observe = drafter.observe
    drafter.observe = lambda state, *given: seen.append(observe(state, *given)) or seen[-1]
    decoder.generate(longer, max_new_tokens=NEW, do_sample=False, past=past)
    kept = [proposal.scores for proposal in seen]
    seen.clear()
    out = decoder.generate(longer, max_new_tokens=NEW, do_sample=False)
    assert out.sequences[0].tolist() == whole
    assert len(kept) == len(seen)
    for mine, fresh in zip(kept, seen):
        torch.testing.assert_close(mine, fresh.scores, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next", "mamba"])
def test_targets_that_cannot_go_back_read_the_prompt_again(family):
    target = tiny_target(family) if family == "gemma3_text" else family_target(family)
    decoder, past = SpeculativeDecoder(target, None), Past()
    ids = random_prompts(2, 9)[0].clamp(min=2)
    for cut in (0, 4):
        out = decoder.generate(ids, max_new_tokens=NEW, do_sample=False, past=past)
        assert out.answers == greedy_reference(target, ids, torch.ones_like(ids), NEW)
        ids = grown(ids, out.answers, cut)


def test_another_text_another_batch_another_decoder():
    target = tiny_target()
    decoder, past = SpeculativeDecoder(target, build_drafter("eagle3", target)), Past()
    ids = random_prompts(2, 9)[0]
    decoder.generate(ids, max_new_tokens=NEW, do_sample=False, past=past)
    other = (ids + 1) % 97
    out = decoder.generate(other, max_new_tokens=NEW, do_sample=False, past=past)
    assert out.stats.prefilled == other.numel()
    assert out.answers == greedy_reference(target, other, torch.ones_like(other), NEW)
    with pytest.raises(ValueError, match="holds 2 rows, the prompts are 1"):
        decoder.generate(ids[:1], max_new_tokens=NEW, past=past)
    with pytest.raises(ValueError, match="another target or drafter"):
        SpeculativeDecoder(target, None).generate(ids, max_new_tokens=NEW, past=past)


def test_a_drafter_that_cannot_be_rewound_begins_anew():
    target = tiny_target()
    ids = random_prompts(1, 9)[0]
    answer = greedy_reference(target, ids, torch.ones_like(ids), NEW)
    past = Past()
    decoder = SpeculativeDecoder(target, ScriptedDrafter([ids[0].tolist() + answer[0]], 97), tree="chain")
    assert decoder.generate(ids, max_new_tokens=NEW, do_sample=False, past=past).answers == answer
    again = decoder.generate(ids, max_new_tokens=NEW, do_sample=False, past=past)
    assert again.answers == answer and again.stats.prefilled == 9 and again.stats.accepted > 0


def test_an_interrupted_call_leaves_nothing_wrong_behind():
    target = tiny_target()
    decoder, past = SpeculativeDecoder(target, build_drafter("eagle3", target)), Past()
    ids = random_prompts(1, 9)[0]
    out = decoder.generate(ids, max_new_tokens=NEW, do_sample=False, past=past)

    def stop(*given):
        raise KeyboardInterrupt

    longer = grown(ids, out.answers)
    with pytest.raises(KeyboardInterrupt):
        decoder.generate(longer, max_new_tokens=NEW, do_sample=False, past=past, logits_processor=[stop])
    again = decoder.generate(longer, max_new_tokens=NEW, do_sample=False, past=past)
    assert again.answers == greedy_reference(target, longer, torch.ones_like(longer), NEW)


def test_a_session_is_cut_back_where_its_cache_can_be():
    target = tiny_target()
    session = Session(target, 2, 16)
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    session.prefill(ids, torch.tensor([4, 4]))
    assert session.rewind(torch.tensor([2, 9])).tolist() == [2, 4]
    output = session.extend(ids[:, 2:], torch.tensor([2, 2]), rows=slice(0, 2))
    assert session.lengths.tolist() == [4, 6]
    whole = target.model(ids[:1]).logits[0, 2:]
    torch.testing.assert_close(session.logits(output.final[0]), whole, atol=2e-5, rtol=1e-4)
