"""What users of speculative decoding are known to run into, and the test that holds each.

| what goes wrong | held by |
|---|---|
| 21. an EOS or stop string accepted inside a round is passed over; EOS lists; more tokens than asked for | \
test_conformance: test_eos_inside_a_round_ends_the_row_there, \
test_a_perfect_chain_takes_the_fewest_forwards_and_a_wrong_one_the_most; \
test_generate_contract: test_every_row_is_single_row_generate (eos_list, stop_strings) |
| 22. the nodes of a tree get positions by their place in it, not by their depth | \
test_conformance: test_every_family_decodes_a_branching_tree_exactly |
| 23. sliding-window caches are cropped wrongly | \
test_families: test_windows_shorter_than_the_tree_are_measured_in_positions, \
test_a_family_decodes_a_branching_tree_exactly |
| 24. rows of unequal length disturb each other, padding counts as text | \
test_conformance: test_every_drafter_and_tree_gives_the_greedy_text (batch 3), test_left_and_right_padding_are_one |
| 25. the first draft token is committed unverified | \
test_conformance: test_every_drafter_and_tree_gives_the_greedy_text (wrong) |
| 26. the drafter has fewer positions than the context | \
test_long_contexts: test_a_drafter_that_reaches_less_far_than_the_target |
| 27. top-p at a low temperature divides by nothing | \
test_27_a_low_temperature_with_top_p_is_sampled_within_the_nucleus, \
test_27_next_to_no_temperature_is_greedy |
| 28. penalties, biases and bans are passed over in silence | \
test_generate_contract: test_every_row_is_single_row_generate, test_a_refusal_names_the_field_and_a_remedy, \
test_every_field_of_a_generation_config_is_honoured_refused_or_indifferent |
| 29. another kernel shape flips a near-tie, and text departs from plain decoding | \
test_certify: test_a_token_that_the_target_would_not_say_is_an_error, test_a_broken_verification_is_found_out; \
exact in fp32: test_conformance |
| 30. logits that are not finite | test_30_logits_that_are_not_finite_are_named_by_row |
| 31. a drafter of another target, vocabulary or hidden size | test_31_heads_of_another_target_are_refused_at_load |
| 32. decoding is slower than plain decoding, and nobody says so | \
test_32_a_method_that_is_slower_is_printed_as_it_is; \
test_calibrated: test_where_speculation_does_not_pay_the_rest_is_plain_and_that_is_said_once |
"""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from headsmith.heads import CheckpointError, Target, build_drafter, load_drafter
from headsmith.inference import DynamicTree, FixedTree, SpeculativeDecoder, bench, chain
from headsmith.inference.verify import NonFiniteLogitsError
from headsmith.scripts.bench import show

from tests.laws import processed
from tests.tiny import greedy_reference, random_prompts, tiny_target

NEW = 16
PATHS = ((0,), (1,), (0, 0), (1, 0), (0, 0, 0))
TREES = {
    "plain": None,
    "chain": chain(3),
    "chain, sampled": chain(3, sampled=True),
    "fixed, sampled": FixedTree(PATHS, sampled=True),
    "dynamic": DynamicTree(8, 3, 3),
}


def sampled(target, tree, ids, mask, seed=0, **warpers):
    """Answers [B][NEW] with new Medusa heads, which guess the token after the next as they guess the next."""
    torch.manual_seed(0)
    drafter = None if TREES[tree] is None else build_drafter("medusa", target).to(target.dtype)
    decoder = SpeculativeDecoder(target, drafter, tree=TREES[tree] or "chain")
    generator = torch.Generator().manual_seed(seed)
    out = decoder.generate(ids, mask, max_new_tokens=NEW, do_sample=True, top_k=0, generator=generator, **warpers)
    return out.answers


@pytest.mark.parametrize("tree", TREES)
def test_27_a_low_temperature_with_top_p_is_sampled_within_the_nucleus(tree):
    target = tiny_target()
    ids, mask = random_prompts(3, 9)
    for seed in range(3):
        for row, answer in enumerate(sampled(target, tree, ids, mask, seed, temperature=0.1, top_p=0.9)):
            prompt = ids[row][mask[row].bool()]
            text = torch.cat((prompt, torch.tensor(answer)))[None]
            law = processed(target.model(text).logits[0, len(prompt) - 1 : -1], 0.1, 0.9)
            assert torch.isfinite(law).all() and (law[torch.arange(NEW), answer] > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tree", TREES)
def test_27_next_to_no_temperature_is_greedy(tree, dtype):
    """At 1e-5 a logit of 1 is 100,000: too large for a half-precision quotient."""
    target = tiny_target(dtype=dtype)
    ids, mask = random_prompts(3, 9)
    answers = sampled(target, tree, ids, mask, temperature=1e-5, top_p=0.9)
    assert [len(answer) for answer in answers] == [NEW] * 3
    if dtype == torch.float32:  # the others have ties, of which each may be drawn
        assert answers == greedy_reference(target, ids, mask, NEW)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("tree", TREES)
def test_30_logits_that_are_not_finite_are_named_by_row(tree, sample):
    target = Target(copy.deepcopy(tiny_target().model))
    ids, mask = random_prompts(3, 9)
    ids[1, -2] = 96
    assert 96 not in ids[[0, 2]]
    with torch.no_grad():
        target.model.get_input_embeddings().weight[96] = torch.nan
    drafter = None if TREES[tree] is None else build_drafter("medusa", target)
    decoder = SpeculativeDecoder(target, drafter, tree=TREES[tree] or "chain")
    with pytest.raises(NonFiniteLogitsError, match="row 1"):
        decoder.generate(ids, mask, max_new_tokens=NEW, do_sample=sample)


OTHERS = {
    "hidden size": ({"hidden_size": 64, "head_dim": 16}, "hidden_size 32, .* has 64"),
    "vocabulary": ({"vocab_size": 101}, "vocab_size 97, .* has 101"),
    "layers": ({"num_hidden_layers": 5}, "num_layers 4, .* has 5"),
    "weights": ({"seed": 5}, r"weights [0-9a-f]{16}\), .* has other weights \([0-9a-f]{16}\)"),
}


@pytest.mark.parametrize("method", ["medusa", "eagle3"])
@pytest.mark.parametrize("other", OTHERS)
def test_31_heads_of_another_target_are_refused_at_load(other, method, tmp_path: Path):
    changes, message = OTHERS[other]
    build_drafter(method, tiny_target()).save_pretrained(tmp_path / "heads")
    with pytest.raises(CheckpointError, match=message):
        load_drafter(tmp_path, tiny_target(**changes))
    if other != "weights":  # only other weights of the same sizes may be insisted on
        with pytest.raises(CheckpointError, match=message):
            load_drafter(tmp_path, tiny_target(**changes), any_target=True)


def test_32_a_method_that_is_slower_is_printed_as_it_is(capsys, monkeypatch):
    """Half as fast as both baselines."""
    monkeypatch.setenv("COLUMNS", "160")

    def method(name, seconds):
        return bench.Method(name, "-", lambda ids: bench.Answer(seconds, [1, 2, 3, 4]))

    methods = [method("generate", 1.0), method("plain", 1.0), method("slow", 2.0), method("slowest", 300.0)]
    asked = [bench.Question(str(n), "any", torch.tensor([[3, n]])) for n in range(3)]
    result = bench.run_benchmark(bench.Setting(tiny_target()), methods, asked)
    show(result)
    rows = {cells[0]: cells for line in capsys.readouterr().out.splitlines() if (cells := re.findall(r"[\w./]+", line))}
    assert rows["slow"][1:4] == ["2.0", "0.50", "0.50"]
    assert rows["slowest"][1:4] == ["0.0", "0.00", "0.00"]
    assert rows["plain"][1:4] == ["4.0", "1.00", "1.00"]
