"""Verify forwards as one graph: traced once a size, the same text, and how often a round asks the device."""

from __future__ import annotations

import collections
import gc
from typing import Any

import pytest
import torch
from headsmith.heads import build_drafter
from headsmith.heads.cache import RaggedTreeCache
from headsmith.heads.tree import DraftTree
from headsmith.inference import Past, SpeculativeDecoder
from headsmith.inference.compiled import CompiledForward, padded_size
from headsmith.inference.engine import Session, choose_forward
from torch.overrides import TorchFunctionMode

from tests.families import TREE, family_target
from tests.scripted import ScriptedDrafter
from tests.test_conformance import DRAFTERS, NEW, TREES, setting
from tests.tiny import tiny_target


class Traced:
    """A backend that runs what was traced as it is, and counts the graphs."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        gc.collect()  # the hooks of an earlier decoder, taken away half-way, would be another graph
        self.graphs = 0

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.graphs += 1
        return module.forward


def answers_of(decoder, ids, mask, **arguments):
    return decoder.generate(ids, mask, max_new_tokens=NEW, do_sample=False, **arguments)


@pytest.mark.parametrize("forward", ["lean", "generic"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["mixed_rank", "with_features"])
def test_changing_trees_are_one_graph_and_the_text_is_the_same(forward, batch, kind):
    target, ids, mask, answers, scripts = setting(batch=batch)
    backend = Traced()
    drafter = ScriptedDrafter(scripts, 97, **DRAFTERS[kind])
    decoder = SpeculativeDecoder(target, drafter, "dynamic", forward=forward, compile={"backend": backend})
    for _ in range(2):  # the second call finds buffers and graph where they were
        out = answers_of(decoder, ids, mask)
        assert out.answers == answers and out.stats.accepted > 0
    assert backend.graphs == 1
    longer = decoder.generate(ids, mask, max_new_tokens=400, do_sample=False)
    assert [row[:NEW] for row in longer.answers] == answers
    assert backend.graphs == 2  # twice as many slots


def test_sizes_are_filled_up_to_powers_of_two():
    assert [padded_size(n) for n in (1, 2, 3, 8, 9, 33)] == [2, 2, 4, 8, 16, 64]
    target, ids, mask, answers, scripts = setting(batch=2)
    backend = Traced()
    decoder = SpeculativeDecoder(
        target, ScriptedDrafter(scripts, 97), TREES["calibrated"], compile={"backend": backend}
    )
    assert answers_of(decoder, ids, mask).answers == answers
    assert 1 <= backend.graphs <= 4  # of 2, 4, 8 and 16 nodes


def test_a_past_keeps_its_own_buffers():
    target, ids, mask, answers, _ = setting(batch=1)
    decoder = SpeculativeDecoder(target, build_drafter("eagle3", target), "dynamic", compile={"backend": Traced()})
    past = Past()
    assert answers_of(decoder, ids, mask, past=past).answers == answers
    assert answers_of(decoder, (ids + 5) % 97, mask).answers != answers
    longer = torch.cat((ids, torch.tensor(answers), torch.tensor([[9, 8]])), 1)
    kept, fresh = (answers_of(decoder, longer, None, past=p) for p in (past, None))
    assert kept.answers == fresh.answers and kept.stats.prefilled < fresh.stats.prefilled


def test_what_cannot_be_one_graph_is_refused_by_name():
    with pytest.raises(ValueError, match="leave compile out"):
        SpeculativeDecoder(family_target("mamba"), None, compile=True)
    with pytest.raises(ValueError, match="ALiBi"):
        SpeculativeDecoder(family_target("bloom"), None, compile=True)


def test_hooks_go_with_the_decoder():
    target = tiny_target("gemma3_text", seed=3)
    before = [len(layer._forward_pre_hooks) for layer in target.layers]
    drafter = build_drafter("eagle3", target)
    decoder = SpeculativeDecoder(target, drafter, "dynamic", compile={"backend": Traced()})
    decoder.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5)
    assert [len(layer._forward_pre_hooks) for layer in target.layers] != before
    del decoder
    torch._dynamo.reset()
    gc.collect()
    assert [len(layer._forward_pre_hooks) for layer in target.layers] == before


ASKING = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "nonzero")


class Asked(TorchFunctionMode):
    """Counts the calls at which a host would wait for its device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in ASKING:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


def asked(forward: str) -> int:
    """How often one verify forward and its commit ask."""
    target, total = tiny_target(), 8
    runner = choose_forward(target, forward)
    session = Session(target, 2, 64, CompiledForward(runner, (), {"backend": Traced()}))
    session.prefill(torch.randint(2, 97, (2, 6)), torch.tensor([6, 4]))
    parents = torch.arange(-1, total - 1).expand(2, total)
    tokens = torch.randint(2, 97, (2, total))
    tree = DraftTree(tokens, parents, parents + 1, torch.full((2,), total))

    def turn() -> None:
        output = session.forward(tree.tokens, tree.depth, tree.ancestors())
        session.logits(output.final)
        session.commit(torch.tensor([[0, 1], [0, 1]]), torch.tensor([2, 1]))

    turn()  # is traced
    with Asked() as counted:
        turn()
    return sum(counted.counts.values())


@pytest.mark.parametrize("forward", ["lean", "generic"])
def test_nothing_asks_the_device_in_a_forward_or_a_commit(forward):
    assert asked(forward) == 0
    with Asked() as counted:
        bool(torch.ones(1)), torch.ones(2).tolist(), torch.ones(1).item()
    assert sum(counted.counts.values()) >= 3  # the count can see them


@pytest.mark.parametrize("forward", ["lean", "generic"])
def test_a_fixed_cache_gives_what_a_growing_one_does(forward):
    target = tiny_target()
    runner = choose_forward(target, forward)
    ids, lengths = torch.randint(2, 97, (2, 6)), torch.tensor([6, 4])
    tree = DraftTree(
        torch.randint(2, 97, (2, 4)),
        torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 1]]),
        torch.tensor([[0, 1, 1, 2], [0, 1, 2, 2]]),
        torch.tensor([4, 4]),
    )
    found = []
    for fixed in (False, True):
        session = Session(target, 2, 8, runner)
        session.cache = RaggedTreeCache(runner.layer_shapes, 2, 8, torch.float32, "cpu", fixed)
        session.prefill(ids, lengths)
        for _ in range(12):
            output = session.forward(tree.tokens, tree.depth, tree.ancestors())
            session.commit(torch.tensor([[0, 1, 3], [0, 1, 2]]), torch.tensor([3, 2]))
        found.append(output.final)
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", TREE)
def test_families_that_are_one_graph(family):
    """All that verify a tree, but for those named here: ALiBi, code that cannot be traced, experts in a loop."""
    target = family_target(family)
    runner = choose_forward(target, "generic")
    known = ("bloom", "ctrl", "falcon (ALiBi)", "longcat_flash", "mpt")
    backend = Traced()
    capture = () if family in ("hrm_text", "longcat_flash") else (0, 2)  # these have no list of layers

    def decode() -> None:
        compiled = CompiledForward(runner, capture, {"backend": backend})
        session = Session(target, 2, 64, compiled)
        plain = Session(target, 2, 64, runner)
        plain.capture = session.capture = capture
        ids, lengths = torch.randint(2, 97, (2, 9)), torch.tensor([9, 6])
        session.prefill(ids, lengths)
        plain.prefill(ids, lengths)
        for parents in ([[-1, 0, 0, 1], [-1, 0, 1, 1]], [[-1, 0, 1, 2], [-1, 0, 0, 0]]):
            above = torch.tensor(parents)
            tree = DraftTree(torch.randint(2, 97, (2, 4)), above, above, torch.tensor([4, 4]))
            tree.depth = tree.ancestors().sum(2) - 1
            found, expected = (s.forward(tree.tokens, tree.depth, tree.ancestors()) for s in (session, plain))
            torch.testing.assert_close(found.final, expected.final, atol=1e-4, rtol=1e-4)
            if capture:
                torch.testing.assert_close(found.hidden, expected.hidden, atol=1e-4, rtol=1e-4)
            for each in (session, plain):
                each.commit(torch.tensor([[0, 1], [0, 1]]), torch.tensor([2, 1]))

    with torch.inference_mode():
        if family in known:
            with pytest.raises((ValueError, torch._dynamo.exc.TorchDynamoException)):
                decode()
        else:
            decode()
            assert backend.graphs == 1


@pytest.mark.slow
def test_the_default_backend_compiles_it():
    target, ids, mask, answers, scripts = setting(batch=1)
    torch._dynamo.reset()
    decoder = SpeculativeDecoder(target, ScriptedDrafter(scripts, 97), "dynamic", compile=True)
    out = answers_of(decoder, ids, mask)
    assert out.answers == answers and out.stats.accepted > 0
