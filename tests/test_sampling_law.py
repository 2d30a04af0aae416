"""Sampled decoding follows exactly the target's own law: χ² over the joint law of three tokens, through the decoder."""

from __future__ import annotations

import pytest
import torch
from headsmith.heads import build_drafter
from headsmith.inference import DynamicTree, FixedTree, SpeculativeDecoder, chain, decoder

from tests.laws import chi_square_p_value, count_sequences, joint_law, processed
from tests.tiny import tiny_target

VOCAB, LENGTH, ROWS, RUNS = 8, 3, 2048, 204_800
PATHS = ((0,), (1,), (0, 0), (0, 1), (1, 0))
SETTINGS = {
    "chain, fixed children": ("medusa", chain(2), {"temperature": 0.7, "top_p": 0.9}),
    "chain, sampled": ("eagle3", chain(2, sampled=True), {"temperature": 0.7, "top_p": 0.9}),
    "tree, fixed children": ("eagle3", FixedTree(PATHS), {"temperature": 1.3, "top_p": 0.8}),
    "tree, sampled": ("medusa", FixedTree(PATHS, sampled=True), {"temperature": 0.7, "top_p": 0.9}),
    "dynamic tree": ("eagle3", DynamicTree(6, 2, 3), {"temperature": 0.7, "top_p": 0.9}),
    "plain": (None, "chain", {"temperature": 0.7, "top_p": 0.9}),
}


@pytest.fixture(scope="module")
def target():
    return tiny_target(
        dtype=torch.float64, vocab_size=VOCAB, num_hidden_layers=3, hidden_size=16, intermediate_size=16, seed=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip


def exact_law(target, prompt, temperature, top_p):
    """The law of the next three tokens, from ordinary forwards over every prefix."""
    conditionals = []
    for length in range(LENGTH):
        prefixes = torch.cartesian_prod(*[torch.arange(VOCAB)] * length) if length else torch.zeros(1, 0)
        prefixes = prefixes.long().view(VOCAB**length, length)
        ids = torch.cat((prompt.expand(len(prefixes), -1), prefixes), 1)
        logits = target.model(input_ids=ids).logits[:, -1]
        conditionals.append(processed(logits, temperature, top_p).view(*[VOCAB] * length, VOCAB))
    return joint_law(conditionals)


def sample(target, prompt, method, tree, arguments, runs=RUNS):
    drafter = None
    if method is not None:
        torch.manual_seed(0)
        drafter = build_drafter(
            method,
            target,
            draft_vocab_size=VOCAB - 2,
            **({"layers": (0, 1, 2)} if method == "eagle3" else {}),
        )
        drafter.to(torch.float64)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    speculative = SpeculativeDecoder(target, drafter, tree=tree)
    generator = torch.Generator().manual_seed(11)
    counts, accepted = torch.zeros(VOCAB**LENGTH), 0
    for _ in range(runs // ROWS):
        out = speculative.generate(
            prompt.expand(ROWS, -1),
            max_new_tokens=LENGTH,
            do_sample=True,
            top_k=0,
            generator=generator,
            **arguments,
        )
        counts += count_sequences(out.sequences[:, prompt.shape[1] :], VOCAB)
        accepted += out.stats.accepted
    return counts, accepted


@pytest.mark.parametrize("name", SETTINGS)
def test_the_decoder_emits_the_targets_law(name, target):
    method, tree, arguments = SETTINGS[name]
    prompt = torch.tensor([[1, 3, 5, 2]])
    counts, accepted = sample(target, prompt, method, tree, arguments)
    assert int(counts.sum()) == RUNS >= 200_000
    assert (accepted > RUNS / 50) == (method is not None)
    assert chi_square_p_value(counts, exact_law(target, prompt, **arguments)) > 1e-4


def test_a_bonus_from_the_raw_softmax_is_found_out(target, monkeypatch):
    """The released bug of METHODS: accepted with the processed law, the bonus drawn from the unprocessed one."""
    true = decoder.verify_lossless

    def raw_bonus(tree, probs, uniforms):
        verified = true(tree, probs, uniforms)
        raw = probs.pow(0.7) / probs.pow(0.7).sum(-1, keepdim=True)  # undoes temperature 0.7 where top-p is off
        last = verified.path.gather(1, (verified.counts - 1).clamp(min=0)[:, None])
        rows = raw[torch.arange(len(raw))[:, None], last][:, 0]
        verified.bonus = torch.multinomial(rows, 1)[:, 0]
        return verified

    monkeypatch.setattr(decoder, "verify_lossless", raw_bonus)
    prompt, arguments = torch.tensor([[1, 3, 5, 2]]), {"temperature": 0.7, "top_p": 1.0}
    counts, _ = sample(target, prompt, "eagle3", chain(2), arguments, runs=40_960)
    assert chi_square_p_value(counts, exact_law(target, prompt, **arguments)) < 1e-6


def test_a_seed_gives_the_same_text_again(target):
    prompt = torch.tensor([[1, 3, 5, 2]])
    texts = [
        SpeculativeDecoder(target, None).generate(
            prompt, max_new_tokens=12, do_sample=True, generator=torch.Generator().manual_seed(seed)
        ).sequences.tolist()
        for seed in (4, 4, 5)
    ]  # fmt: skip
    assert texts[0] == texts[1] != texts[2]
