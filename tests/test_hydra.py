"""What is particular to Hydra: whom a node's scores depend on, how heads start, and the prefix layer's own cache."""

from __future__ import annotations

import pytest
import torch
from headsmith.heads import build_drafter, load_drafter
from headsmith.heads.drafter import Needs, TargetFeatures
from headsmith.heads.layers import Linear, pack_weight
from headsmith.inference import Past, SpeculativeDecoder

from tests.test_drafters import FakeSession, randomised
from tests.tiny import greedy_reference, random_prompts, tiny_target

NEEDS = Needs(final=True)


def opened(drafter, target, rows, length=20, seed=1):
    """A state, and what it will be shown: features [rows, length] of a random text, and the tokens that follow."""
    ids = torch.randint(2, 97, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    state = drafter.start(FakeSession(target), ids[:, :length], torch.full((rows,), length))
    return state, target.features(ids[:, :length], NEEDS).final, ids[:, 1:]


def shown(drafter, state, final, following, start, counts):
    """Let a drafter observe `counts` positions of each row from `start` [rows] on."""
    counts = torch.tensor(counts)
    index = (start[:, None] + torch.arange(int(counts.max()))).clamp(max=final.shape[1] - 1)
    rows = torch.arange(len(final))[:, None]
    return drafter.observe(state, TargetFeatures(following, final=final[rows, index]), following[rows, index], counts)


@pytest.mark.parametrize("name", ["hydra", "hydra++"])
def test_text_shown_in_parts_is_drafted_from_as_if_shown_at_once(name):
    """Ragged rows, a row that pauses, drafts in between, and a text that is cut back."""
    target = tiny_target()
    drafter = randomised(name, target)
    state, final, following = opened(drafter, target, 2)
    start = torch.zeros(2, dtype=torch.long)
    for counts in ([7, 4], [3, 5], [0, 2], [4, 1]):
        proposal = shown(drafter, state, final, following, start, counts)
        start = start + torch.tensor(counts)
        drafter.expand(state, torch.zeros(2, 3, dtype=torch.long), torch.full((2, 3), 5), torch.ones(2, 3).bool())
    drafter.rewind(state, torch.tensor([9, 20]))
    start = torch.tensor([9, 12])
    proposal = shown(drafter, state, final, following, start, [6, 8])
    for row, seen in enumerate((15, 20)):
        alone, _, _ = opened(drafter, target, 1)
        expected = shown(
            drafter, alone, final[row : row + 1], following[row : row + 1], torch.zeros(1, dtype=torch.long), [seen]
        )
        torch.testing.assert_close(proposal.scores[row], expected.scores[0], atol=1e-5, rtol=1e-5)


def test_siblings_are_followed_by_different_guesses():
    target = tiny_target()
    parents, tokens = torch.zeros(1, 2, dtype=torch.long), torch.tensor([[5, 6]])
    for name, differ in (("medusa", False), ("hydra", True)):
        drafter = randomised(name, target)
        state, final, following = opened(drafter, target, 1)
        shown(drafter, state, final, following, torch.zeros(1, dtype=torch.long), [20])
        scores = drafter.expand(state, parents, tokens, torch.ones(1, 2).bool()).scores[0]
        assert torch.equal(scores[0], scores[1]) != differ


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lm_head", ["own", "shared"])
@pytest.mark.parametrize("prefix", [False, True])
def test_a_new_head_says_what_the_target_says(dtype, lm_head, prefix):
    target = tiny_target(dtype=dtype)
    drafter = build_drafter("hydra", target, prefix_attention=prefix, lm_head=lm_head).to(dtype).eval()
    state, final, following = opened(drafter, target, 2)
    parents = torch.zeros(2, 1, dtype=torch.long)
    scores = [shown(drafter, state, final, following, parents[:, 0], [20, 20]).scores]
    scores.append(drafter.expand(state, parents, parents + 7, parents == 0).scores)
    for found in scores:
        torch.testing.assert_close(found[:, 0], target.logits(final[:, -1]).float().log_softmax(-1))


@pytest.mark.parametrize(("family", "spread"), [("llama", 0.3), ("llama", 1e-3), ("gemma3_text", 0.3)])
def test_inputs_have_a_size_of_about_one_on_any_target(family, spread):
    target = tiny_target(family, initializer_range=spread)
    drafter = build_drafter("hydra", target)
    features = target.features(torch.arange(2, 90)[None], NEEDS)
    for values, scale in (
        (features.final, drafter.feature_scale),
        (target.embed(features.input_ids), drafter.embedding_scale),
    ):
        assert 0.5 < float((values / scale).square().mean().sqrt()) < 2


def test_prefix_attention_takes_its_sizes_from_the_target_or_the_options():
    target = tiny_target()
    attention = build_drafter("hydra", target, prefix_attention=True).prefix_layer.self_attn
    assert (attention.heads, attention.key_heads, attention.dim) == (4, 2, 8)
    drafter = build_drafter("hydra", target, prefix_attention=True, num_attention_heads=2, intermediate_size=16)
    assert drafter.prefix_layer.self_attn.heads == 2 and drafter.prefix_layer.mlp.gate_proj.out_features == 16
    assert build_drafter("hydra", target).needs == Needs(final=True, positions="last")
    assert drafter.needs == Needs(final=True, positions="all")


def test_a_chat_that_goes_on_is_drafted_for_as_a_new_one():
    target = tiny_target()
    decoder, past = SpeculativeDecoder(target, randomised("hydra++", target), tree="dynamic"), Past()
    ids = random_prompts(1, 9)[0]
    for _ in range(3):
        kept = decoder.generate(ids, max_new_tokens=11, do_sample=False, past=past)
        fresh = decoder.generate(ids, max_new_tokens=11, do_sample=False)
        assert kept.answers == fresh.answers == greedy_reference(target, ids, torch.ones_like(ids), 11)
        assert kept.stats.accepted_at == fresh.stats.accepted_at
        ids = torch.cat((kept.sequences[:, :-4], ids[:, :3]), 1)


@pytest.mark.skipif(pack_weight(torch.ones(2, 2, dtype=torch.bfloat16)) is None, reason="nothing is packed here")
def test_every_matrix_is_packed_for_decoding(tmp_path):
    target = tiny_target(dtype=torch.bfloat16)
    made = randomised("hydra++", target)
    made.save_pretrained(tmp_path)
    drafter = load_drafter(tmp_path, target)
    fused = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # packed as one
    parts = [(n, p) for n, p in drafter.named_modules() if isinstance(p, Linear) and not n.endswith(fused)]
    assert parts and all(part._packed is not None for _, part in parts)
    with torch.no_grad():
        scores = []
        for either in (drafter, made.to(torch.bfloat16)):
            state, final, following = opened(either, target, 2)
            scores.append(shown(either, state, final, following, torch.zeros(2, dtype=torch.long), [20, 13]).scores)
    torch.testing.assert_close(scores[0], scores[1], atol=0.2, rtol=0.05)
