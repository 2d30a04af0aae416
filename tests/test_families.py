"""Every family of causal LMs decodes exactly: by a tree, by root paths, plainly, or handed over to its own generate().

`python -m tests.test_families` writes docs/families.md anew.
"""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from headsmith.heads.drafter import Needs
from headsmith.heads.target.locate import UnsupportedTargetError
from headsmith.heads.target.probe import probe
from headsmith.inference import DynamicTree, FixedTree, SpeculativeDecoder, chain
from headsmith.inference.engine import Session
from headsmith.inference.generic import GenericForward

from tests.families import FAMILIES, GENERATE, PATHS, PLAIN, TREE, family_target, model_type
from tests.scripted import ScriptedDrafter
from tests.tiny import greedy_reference, random_prompts, tiny_target

DOCS = Path(__file__).parents[1] / "docs" / "families.md"
FALLS_BACK = ".*(decodes plainly|is handed over).*"
QUICK_PATHS = {"deepseek_v32", "gpt_neo", "lfm2", "lfm3", "qwen3_5_text"}
NEW = 22
LONGEST = 11
DYNAMIC = DynamicTree(total=7, depth=3, top_k=3)
FIXED = FixedTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (1, 0, 0)))


def setting(family, batch=3):
    target = family_target(family)
    ids, mask = random_prompts(batch, LONGEST)
    answers = greedy_reference(target, ids, mask, NEW)
    scripts = [ids[row][mask[row].bool()].tolist() + answers[row] for row in range(batch)]
    return target, ids, mask, answers, scripts


def decode(decoder, ids, mask):
    out = decoder.generate(ids, mask, max_new_tokens=NEW, do_sample=False)
    return out.sequences[:, ids.shape[1] :].tolist(), out.stats


def quick(families, slow):
    """Parameters of a test, some of them for -m slow: recurrent layers take seconds on a CPU."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in families]


@pytest.mark.parametrize("family", quick([*TREE, *PATHS], set(PATHS) - QUICK_PATHS))
def test_a_family_decodes_a_branching_tree_exactly(family):
    target, ids, mask, answers, scripts = setting(family)
    assert len({token for answer in answers for token in answer}) > 8, "answers that repeat a few tokens show no error"
    # Right at every level, and as often the second best child as the best.
    drafter = ScriptedDrafter(scripts, 97, rank=lambda row, level: (row + level) % 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=FALLS_BACK)
        decoder = SpeculativeDecoder(target, drafter, tree=DYNAMIC, forward="generic")
    assert not decoder.fallback
    assert decoder.forward.drive.path == ("tree" if family in TREE else "paths")
    found, stats = decode(decoder, ids, mask)
    assert found == answers
    assert stats.accepted > 0
    # Right for one level or two, so that every round also drops what it drafted.
    partly = ScriptedDrafter(scripts, 97, right=lambda row, level: level <= 1 + row % 2)
    found, stats = decode(SpeculativeDecoder(target, partly, tree=FIXED, forward="generic"), ids, mask)
    assert found == answers
    assert stats.accepted > 0


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_windows_shorter_than_the_tree_are_measured_in_positions(family):
    """Deep nodes behind siblings: their ancestors are further off in positions than in slots."""
    target = tiny_target(family, sliding_window=3, head_dim=8, num_hidden_layers=6, initializer_range=0.15)
    ids, mask = random_prompts(3, LONGEST)
    answers = greedy_reference(target, ids, mask, NEW)
    scripts = [ids[row][mask[row].bool()].tolist() + answer for row, answer in enumerate(answers)]
    drafter = ScriptedDrafter(scripts, 97, rank=lambda row, level: 2 if level == 1 else 0)
    tree = FixedTree(((0,), (1,), (2,), (2, 0), (2, 0, 0), (2, 0, 0, 0), (2, 0, 0, 0, 0)))
    decoder = SpeculativeDecoder(target, drafter, tree=tree, forward="generic")
    assert isinstance(decoder.forward, GenericForward)  # a wrong mask would be noticed by the probe, and not be used
    found, stats = decode(decoder, ids, mask)
    assert found == answers
    assert stats.forwards == math.ceil((NEW - 1) / 6)


@pytest.mark.parametrize("family", ["gemma3_text", "bloom", "deepseek_v3", "gpt_oss", "gpt_neo", "lfm2"])
@pytest.mark.parametrize("depth", [2, 5])
def test_a_perfect_chain_takes_the_fewest_forwards(family, depth):
    target, ids, mask, answers, scripts = setting(family, batch=1)
    drafter = ScriptedDrafter([scripts[0] + [3] * 8], 97)
    found, stats = decode(SpeculativeDecoder(target, drafter, tree=chain(depth), forward="generic"), ids, mask)
    assert found == answers
    assert stats.forwards == math.ceil((NEW - 1) / (depth + 1))


@pytest.mark.parametrize("family", [*PLAIN, *GENERATE])
def test_a_family_that_takes_no_draft_says_so_once_and_decodes_exactly(family):
    target, ids, mask, answers, scripts = setting(family)
    with pytest.warns(UserWarning, match=FALLS_BACK) as warned:
        decoder = SpeculativeDecoder(target, ScriptedDrafter(scripts, 97), tree=DYNAMIC)
        found, stats = decode(decoder, ids, mask)
    assert [w for w in warned if decoder.fallback in str(w.message)] == [w for w in warned if w.category is UserWarning]
    assert decoder.forward.drive.path == ("plain" if family in PLAIN else "generate")
    assert found == answers
    assert stats.accepted == 0 and stats.committed == 3 * (NEW - 1)
    assert stats.tree == ("plain" if family in PLAIN else "generate")


def test_plain_decoding_that_was_asked_for_is_no_fallback():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=FALLS_BACK)
        assert not SpeculativeDecoder(family_target("jamba"), None).fallback


def test_handing_over_keeps_eos_scores_streams_and_seeds():
    target, ids, mask, answers, _ = setting("rwkv")
    with pytest.warns(UserWarning, match="handed over"):
        decoder = SpeculativeDecoder(target, None)
    eos = answers[0][4]
    expected = greedy_reference(target, ids, mask, NEW, eos_token_id=eos)
    out = decoder.generate(ids, mask, max_new_tokens=NEW, eos_token_id=eos, pad_token_id=0, output_logits=True)
    longest = max(map(len, expected))
    assert out.sequences[:, LONGEST:].tolist() == [row + [0] * (longest - len(row)) for row in expected]
    assert len(out.logits) == longest and out.scores is None
    chosen = torch.stack(out.logits, 1).argmax(-1)
    assert all(chosen[row, : len(answer)].tolist() == answer for row, answer in enumerate(expected))
    drawn = [
        decoder.generate(
            ids, mask, max_new_tokens=NEW, do_sample=True, generator=torch.Generator().manual_seed(seed)
        ).sequences.tolist()
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(ValueError, match="a streamer shows one row"):
        decoder.generate(ids, mask, streamer=object())
    with pytest.raises(UnsupportedTargetError, match=r"only be driven by its own generate\(\)"):
        Session(target, 1, 8)


@pytest.mark.parametrize("family", ["gpt_neo", "lfm2", "mpt"])
def test_features_of_the_accepted_path_are_the_targets_own(family):
    target, ids, mask, _, scripts = setting(family)
    needs = Needs(layers=(0, 2), final=True)
    got = [[] for _ in scripts]

    class Spy(ScriptedDrafter):
        def observe(self, state, features, next_tokens, counts):
            for row, count in enumerate(counts.tolist()):
                got[row].append((features.hidden[row, :count], features.final[row, :count]))
            return super().observe(state, features, next_tokens, counts)

    drafter = Spy(scripts, 97, needs=needs, rank=lambda row, level: (row + level) % 2)
    decode(SpeculativeDecoder(target, drafter, tree=DYNAMIC), ids, mask)
    for row, script in enumerate(scripts):
        hidden, final = (torch.cat(parts) for parts in zip(*got[row]))
        whole = target.features(torch.tensor([script]), needs)
        torch.testing.assert_close(hidden, whole.hidden[0, : len(hidden)], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(final, whole.final[0, : len(final)], atol=2e-5, rtol=1e-4)


def test_a_row_of_path_caches_can_be_moved_and_used_anew():
    target, ids, _, _, _ = setting("lfm2")
    session = Session(target, 2, 32)
    session.prefill(ids[:1, :3], torch.tensor([3]), rows=slice(0, 1))
    session.prefill(ids[:1], torch.tensor([9]), rows=slice(1, 2))
    session.cache.move(1, 0)
    assert session.lengths.tolist() == [9, 9]
    session.prefill(ids[:1], torch.tensor([9]), rows=slice(1, 2))
    output = session.forward(ids[:1, 9:].expand(2, 2))
    whole = target.features(ids[:1], Needs(final=True)).final[0, 9:]
    torch.testing.assert_close(output.final, whole.expand(2, 2, -1), atol=2e-5, rtol=1e-4)


def test_the_probe_sees_a_window_that_is_longer_than_its_prompts(monkeypatch):
    config = {"head_dim": 8, "query_pre_attn_scalar": 8, "initializer_range": 0.1, "num_hidden_layers": 6}
    assert probe(tiny_target("gemma3_text", sliding_window=64, **config)).path == "tree"
    target = tiny_target("gemma3_text", sliding_window=65, **config)
    assert set(target.config.layer_types) == {"sliding_attention", "full_attention"}
    monkeypatch.setattr("headsmith.heads.target.probe.mask_kinds", lambda config: ("one tensor",))
    drive = probe(target)
    assert drive.path == "paths" and "standard deviations" in drive.reason
    assert target.config.sliding_window == 65


def test_another_attention_is_used_within_our_forwards_only(monkeypatch):
    monkeypatch.setattr("headsmith.heads.target.probe.TREE_ATTENTION", ("eager",))
    target = tiny_target("gemma", head_dim=8, seed=3)
    used = []
    hook = target.layers[0].register_forward_hook(lambda *_: used.append(target.config._attn_implementation))
    session = Session(target, 1, 8)
    assert session.runner.drive.attention == "eager"
    used.clear()
    session.prefill(torch.tensor([[5, 6, 7]]), torch.tensor([3]))
    hook.remove()
    assert used == ["eager"] and target.config._attn_implementation == "sdpa"


def test_targets_of_the_lean_forward_are_not_probed_and_others_once(monkeypatch):
    calls = []
    monkeypatch.setattr("headsmith.heads.target.probe._probe", lambda target: calls.append(target))
    SpeculativeDecoder(tiny_target("llama", head_dim=8), None)
    assert not calls
    target = family_target("gemma")
    monkeypatch.undo()
    assert probe(target) is probe(target)


def table() -> str:
    """docs/families.md as the probe finds it now."""
    lines = [
        "<!-- Written by `python -m tests.test_families`; tests/test_families.py fails where it is out of date. -->",
        "# Families of targets",
        "",
        "What the probe finds for tiny models of the causal-LM families of transformers "
        f"{transformers.__version__}: {len(TREE)} verify a draft tree in one forward, {len(PATHS)} its root paths as "
        f"batch rows, {len(PLAIN)} decode plainly, {len(GENERATE)} are handed over to their own `generate()`. "
        "A family that is not listed is probed all the same.",
        "",
        "| family | `model_type` | mask | attention | path | why not a tree |",
        "|---|---|---|---|---|---|",
    ]
    for family in FAMILIES:
        drive = probe(family_target(family))
        mask = (drive.mask or "") + (", ALiBi at logical positions" if drive.alibi else "")
        # How far off varies with the machine; the warning says it.
        reason = re.sub(r" by [\d.e-]+ standard deviations", "", drive.reason).replace("|", "\\|")
        lines.append(f"| {family} | `{model_type(family)}` | {mask} | {drive.attention} | {drive.path} | {reason} |")
    return "\n".join(lines) + "\n"


def test_the_documented_families_are_what_the_probe_finds():
    written = DOCS.read_text()
    if f"transformers {transformers.__version__}:" not in written:
        pytest.skip(f"docs/families.md is of another release than transformers {transformers.__version__}")
    assert written == table(), "out of date; write it anew with: python -m tests.test_families"


if __name__ == "__main__":
    DOCS.parent.mkdir(exist_ok=True)
    DOCS.write_text(table())
