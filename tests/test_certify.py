"""Certificates: what differs must be a tie of the dtype."""

from __future__ import annotations

import copy

import pytest
import torch
from headsmith.heads import Target, build_drafter
from headsmith.inference import SpeculativeDecoder
from headsmith.inference.certify import CertificationError, certify
from headsmith.inference.verify import verify_greedy

from tests.tiny import random_prompts, tiny_target


def answers(target: Target, new: int = 12) -> tuple[list[torch.Tensor], list[list[int]]]:
    ids, mask = random_prompts(2, 9)
    out = SpeculativeDecoder(target, None).generate(ids, mask, max_new_tokens=new, do_sample=False)
    prompts = [row[kept.bool()] for row, kept in zip(ids, mask)]
    return prompts, out.sequences[:, ids.shape[1] :].tolist()


def changed(texts: list[list[int]], row: int, place: int, token: int) -> list[list[int]]:
    found = [list(text) for text in texts]
    found[row][place] = token
    return found


def with_twin(dtype: torch.dtype):
    """A target of its own in which another token always has the logit of the fourth one it says."""
    target = Target(copy.deepcopy(tiny_target(dtype=dtype).model))
    prompts, plain = answers(target)
    twin = (plain[0][3] + 1) % 97
    with torch.no_grad():
        head = target.model.get_output_embeddings().weight
        head[twin] = head[plain[0][3]]
    return target, prompts, plain, twin


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_answers_are_certified_without_another_forward(dtype, monkeypatch):
    target = tiny_target(dtype=dtype)
    prompts, plain = answers(target)
    monkeypatch.setattr(target, "model", None)
    certificate = certify(target, prompts, plain, plain)
    assert certificate.identical == certificate.rows == 2
    assert str(certificate) == "2 of 2 rows are plain decoding's, token for token"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_that_the_target_would_not_say_is_an_error(dtype):
    target = tiny_target(dtype=dtype)
    prompts, plain = answers(target)
    before = torch.cat((prompts[1], torch.tensor(plain[1][:5])))[None]
    unlikely = int(target.model(input_ids=before).logits[0, -1].argmin())
    with pytest.raises(CertificationError, match=rf"row 1, new token 5: plain decoding says {plain[1][5]}, found"):
        certify(target, prompts, changed(plain, 1, 5, unlikely), plain)


def test_tokens_with_equal_logits_are_a_tie():
    target, prompts, plain, twin = with_twin(torch.bfloat16)
    certificate = certify(target, prompts, changed(plain, 0, 3, twin), plain)
    (difference,) = certificate.differences
    assert certificate.identical == 1 and difference.margin == 0 and difference.bound > 0
    assert (difference.row, difference.token, difference.plain, difference.found) == (0, 3, plain[0][3], twin)
    assert "a tie in row 0, new token 3" in str(certificate)


def test_an_answer_that_ends_early_is_an_error():
    target = tiny_target()
    prompts, plain = answers(target)
    with pytest.raises(CertificationError, match="row 0, new token 8: plain decoding says"):
        certify(target, prompts, [plain[0][:8], plain[1]], plain)


def test_the_bound_is_that_of_the_dtype():
    """The same wrong token: its bound shrinks with the dtype's rounding."""
    bounds = {}
    for dtype in (torch.float32, torch.bfloat16):
        target, prompts, plain, twin = with_twin(dtype)
        (difference,) = certify(target, prompts, changed(plain, 0, 3, twin), plain).differences
        bounds[dtype] = difference.bound
    assert 0 < bounds[torch.float32] < bounds[torch.bfloat16] / 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_certifies_itself(dtype):
    target = tiny_target(dtype=dtype)
    ids, mask = random_prompts(3, 9)
    out = SpeculativeDecoder(target, build_drafter("eagle3", target), tree="chain:depth=3").generate(
        ids, mask, max_new_tokens=20, do_sample=False, certify=True
    )
    assert out.certificate.rows == 3 and out.stats.tree == "chain"
    if dtype == torch.float32:
        assert out.certificate.identical == 3
    with pytest.raises(ValueError, match="do_sample=False"):
        SpeculativeDecoder(target, None).generate(ids, mask, do_sample=True, certify=True)


def test_a_broken_verification_is_found_out(monkeypatch):
    """Every draft token is accepted, right or wrong."""
    target = tiny_target(dtype=torch.bfloat16)
    ids, mask = random_prompts(1, 9)
    drafter = build_drafter("eagle3", target)

    def gullible(tree, choices):
        tokens = tree.tokens.clone()
        parents = tree.parents[:, 1:]
        return verify_greedy(tree, choices.scatter(1, parents, tokens[:, 1:]))

    monkeypatch.setattr("headsmith.inference.acceptance.verify_greedy", gullible)
    with pytest.raises(CertificationError):
        SpeculativeDecoder(target, drafter, tree="chain:depth=3").generate(
            ids, mask, max_new_tokens=20, do_sample=False, certify=True
        )
