"""What EAGLE and HASS train with beside what every drafter does: feature noise, weighted tokens, scales, a resume."""

from __future__ import annotations

import pytest
import torch
from headsmith.heads import build_drafter
from headsmith.heads.losses import SoftCrossEntropy, TopWeighted
from headsmith.training import train as trainer

from tests.test_drafters import batch_of, randomised
from tests.test_training import assert_same_run, chat_target, crash, fresh_accelerator, make_recipe, stop_at
from tests.tiny import tiny_target

__all__ = ["fresh_accelerator"]  # a fixture: it is used by being here


def test_noise_is_a_share_of_the_features_size_and_only_in_training():
    target = tiny_target()
    drafter = build_drafter("eagle", target, noise=0.1)
    features = batch_of(target, drafter.needs)
    calm = drafter.eval().fuse(features)
    assert torch.equal(calm, drafter.fuse(features))
    assert 0.5 < calm.square().mean().sqrt() < 2
    drafter.train()
    shift = drafter.fuse(features) - calm
    assert shift.abs().max() <= 0.1 + 1e-6
    assert shift.std() == pytest.approx(0.1 / 3**0.5, rel=0.1)
    assert not torch.equal(drafter.fuse(features), drafter.fuse(features))


def test_noise_reaches_the_input_and_never_what_is_to_be_predicted():
    target = tiny_target()
    drafter = randomised("eagle", target, noise=0.0)
    loud = randomised("eagle", target, noise=0.5)
    features = batch_of(target, drafter.needs)
    before = features.final.clone()
    assert not torch.equal(drafter(features, target.teacher()).loss, loud(features, target.teacher()).loss)
    assert torch.equal(features.final, before)


@pytest.mark.parametrize("features", ["online", "memory"])
def test_a_resumed_run_draws_the_noise_of_an_uninterrupted_one(features, tmp_path, monkeypatch):
    overrides = [f"train.features={features}", "drafter.options.steps=2", "drafter.options.top_k_loss=3"]
    trainer.train(make_recipe(tmp_path / "whole", *overrides, method="eagle"), chat_target())
    broken = make_recipe(tmp_path / "broken", *overrides, method="eagle")
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        stop_at(7, patch, crash)
        trainer.train(broken, chat_target())
    torch.manual_seed(99)
    trainer.train(make_recipe(tmp_path / "broken", *overrides, "resume=true", method="eagle"), chat_target())
    assert_same_run(tmp_path / "whole/out", tmp_path / "broken/out")


def test_weighted_cross_entropy_has_the_gradient_of_its_formula():
    torch.manual_seed(0)
    student = torch.randn(300, 11, requires_grad=True)
    teacher = torch.randn(300, 11) * 3
    total, _ = SoftCrossEntropy.apply(student, teacher, teacher.argmax(-1), TopWeighted(0.1, 0.7, 4))
    (found,) = torch.autograd.grad(total, student)
    p = teacher.softmax(-1)
    best = torch.zeros_like(p).scatter_(1, p.topk(4, -1).indices, 1.0)
    expected = -((0.1 + 0.7 * best) * p * student.log_softmax(-1)).sum()
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected, student)[0], atol=1e-6, rtol=1e-4)


def test_with_every_token_among_the_best_the_weights_add_up():
    student, teacher = torch.randn(5, 7), torch.randn(5, 7)
    plain, _ = SoftCrossEntropy.apply(student, teacher, teacher.argmax(-1))
    twice, _ = SoftCrossEntropy.apply(student, teacher, teacher.argmax(-1), TopWeighted(0.5, 1.5, 99))
    torch.testing.assert_close(twice, 2 * plain)


def test_scales_are_powers_of_two_near_the_features_own():
    target = tiny_target()
    drafter = build_drafter("eagle", target)
    for scale in (drafter.feature_scale, drafter.embedding_scale):
        assert torch.equal(scale.log2(), scale.log2().round())
    size = target.embed(torch.arange(97)).square().mean().sqrt() * drafter.embedding_scale
    assert 0.5 < size < 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": -0.1}, r"noise is -0.1, expected 0 or more"),
        ({"logit_weight": -1.0}, r"logit_weight is -1.0, expected 0 or more"),
        ({"top_k_loss": 0}, r"top_k_loss is 0, expected a number of tokens"),
        ({"steps": 0}, r"steps and max_depth are at least 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build_drafter("eagle", tiny_target(), **options)


def test_an_unknown_feedback_is_refused():
    with pytest.raises(ValueError, match="feedback is 'loud', expected raw or normed"):
        build_drafter("eagle3", tiny_target(), feedback="loud")
