"""Drafters that are language models themselves: a model of its own, and the target's first layers."""

from __future__ import annotations

import math

import pytest
import torch
from headsmith.heads import Target, build_drafter
from headsmith.heads.early_exit import first_layers
from headsmith.heads.target.locate import UnsupportedTargetError
from headsmith.inference import CalibratedTree, DynamicTree, FixedTree, Past, SpeculativeDecoder, chain
from headsmith.inference import engine as engine_module
from headsmith.inference.engine import Session
from headsmith.scripts.bench import _untrained

from tests.families import family_target
from tests.laws import chi_square_p_value, count_sequences
from tests.scripted import ScriptedDrafter
from tests.test_sampling_law import LENGTH, exact_law
from tests.tiny import greedy_reference, random_prompts, tiny_target
from tests.tokenizers_for_tests import build_tokenizer

NEW = 26
TREES = {
    "chain": chain(4),
    "fixed": FixedTree(((0,), (1,), (0, 0), (1, 0), (1, 1), (0, 0, 0))),
    "dynamic": DynamicTree(10, 5, 4),
    "calibrated": CalibratedTree(fallback=False),
}


def decode(target, drafter, tree, ids, mask=None, **arguments):
    decoder = SpeculativeDecoder(target, drafter, tree=tree)
    return decoder.generate(ids, mask, max_new_tokens=NEW, do_sample=False, **arguments)


@pytest.mark.parametrize("depth", [1, 4, 7])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_target_as_its_own_draft_model_is_never_wrong(depth, family):
    target = tiny_target(family)
    ids, _ = random_prompts(1, 12)
    out = decode(target, build_drafter("draft_model", target, model=target), chain(depth), ids)
    assert out.answers == greedy_reference(target, ids, torch.ones_like(ids), NEW)
    # The first token comes with the prompt, and every forward gives one more than it was shown.
    assert out.stats.forwards == math.ceil((NEW - 1) / (depth + 1))


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("model", ["llama", "gpt2", "gemma3_text"])
def test_another_model_changes_no_token(tree, model):
    target = tiny_target()
    ids, mask = random_prompts(3, 12)
    drafter = build_drafter("draft_model", target, model=tiny_target(model, seed=5))
    assert decode(target, drafter, TREES[tree], ids, mask).answers == greedy_reference(target, ids, mask, NEW)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3", "gpt2"])
@pytest.mark.parametrize("layers", [None, 3])
def test_the_first_layers_change_no_token_and_are_right_at_times(family, layers):
    target = tiny_target(family, seed=1)
    ids, mask = random_prompts(3, 12)
    drafter = build_drafter("early_exit", target, layers=layers)
    assert drafter.model.num_layers == len(drafter.model.layers) == (layers or 1)
    out = decode(target, drafter, TREES["dynamic"], ids, mask)
    assert out.answers == greedy_reference(target, ids, mask, NEW)
    assert out.stats.accepted > 0


class Following:
    """Shows a draft model the true text, and holds every score along it against a fresh forward of that model."""

    def __init__(self, drafter, text: list[int], wide: bool) -> None:
        self.drafter, self.wide = drafter, wide
        ids = torch.tensor([text])
        self.expected = drafter.model.model(ids).logits[0].float().log_softmax(-1)
        self.text, self.state = text, drafter.start(Session(tiny_target(), 1, 64), ids, torch.tensor([len(text)]))
        self.known = 1  # tokens that are committed

    def round(self, observed: int, levels: int) -> None:
        new = torch.tensor([self.text[self.known : self.known + observed]])
        proposal = self.drafter.observe(self.state, None, new, torch.tensor([observed]))
        self.known += observed
        self._compare(proposal, self.known - 1)
        parent = 0
        for level in range(levels):
            true = self.text[self.known + level]
            tokens = torch.tensor([[(true + 1) % 97, true, (true + 2) % 97] if self.wide else [true]])
            parents = torch.full_like(tokens, parent)
            proposal = self.drafter.expand(self.state, parents, tokens, torch.ones_like(tokens, dtype=torch.bool))
            parent = 1 + level * tokens.shape[1] + int(self.wide)
            self._compare(proposal, self.known + level)

    def _compare(self, proposal, index: int) -> None:
        found = proposal.scores[0, int(self.wide and proposal.scores.shape[1] > 1)]
        torch.testing.assert_close(found, self.expected[index], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("wide", [False, True], ids=["chain", "decoys"])
@pytest.mark.parametrize(
    "name, family", [("draft_model", "llama"), ("draft_model", "gemma3_text"), ("early_exit", "gpt2")]
)
def test_after_many_rounds_the_scores_are_those_of_a_fresh_forward(name, family, wide, monkeypatch):
    """What was only drafted is forgotten, decoys beside the true token are not seen, and no position is off by one."""
    monkeypatch.setattr(engine_module, "CHUNK", 5)
    model = tiny_target(family, seed=5)
    made = build_drafter(name, model, **({"model": model} if name == "draft_model" else {"layers": 3}))
    following = Following(made, random_prompts(1, 48)[0][0].tolist(), wide)
    for observed, levels in [(9, 3), (1, 4), (3, 0), (2, 2), (7, 3), (1, 1), (4, 5)]:
        following.round(observed, levels)
    made.rewind(following.state, torch.tensor([10]))
    following.known = 11
    following.round(5, 4)


def test_rows_go_on_at_their_own_pace():
    """A row that takes in nothing stays as it is, whatever is drafted beside it."""
    target, model = tiny_target(), tiny_target(seed=5)
    drafter = build_drafter("draft_model", target, model=model)
    texts = random_prompts(2, 20)[0]
    state = drafter.start(Session(target, 2, 64), texts, torch.tensor([20, 20]))
    drafter.observe(state, None, texts[:, 1:7], torch.tensor([6, 2]))
    drafter.expand(state, torch.zeros(2, 2).long(), texts[:, :2], torch.ones(2, 2).bool())
    drafter.observe(state, None, texts[:, 7:9], torch.tensor([2, 0]))
    found = drafter.observe(state, None, torch.stack((texts[0, 9:13], texts[1, 3:7])), torch.tensor([1, 4])).scores
    for row, length in enumerate((10, 7)):
        expected = model.model(texts[row : row + 1, :length]).logits[0, -1].log_softmax(-1)
        torch.testing.assert_close(found[row, 0], expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "name, model",
    [
        ("draft_model", {"seed": 5}),
        pytest.param("draft_model", {}, marks=pytest.mark.slow),
        pytest.param("early_exit", None, marks=pytest.mark.slow),
    ],
)
def test_sampled_children_follow_the_targets_law(name, model):
    sizes = {
        "dtype": torch.float64, "vocab_size": 8, "num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 16,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    }  # fmt: skip
    target = tiny_target(seed=2, **sizes)
    options = {"layers": 2} if model is None else {"model": tiny_target(**{"seed": 2, **model}, **sizes)}
    tree = FixedTree(((0,), (1,), (0, 0), (0, 1), (1, 0)), sampled=True)
    decoder = SpeculativeDecoder(target, build_drafter(name, target, **options), tree=tree)
    prompt, generator = torch.tensor([[1, 3, 5, 2]]), torch.Generator().manual_seed(11)
    arguments = {"temperature": 0.7, "top_p": 0.9}
    counts, accepted = torch.zeros(8**LENGTH), 0
    for _ in range(20):
        out = decoder.generate(
            prompt.expand(2048, -1), max_new_tokens=LENGTH, do_sample=True, top_k=0, generator=generator, **arguments
        )
        counts += count_sequences(out.sequences[:, 4:], 8)
        accepted += out.stats.accepted
    assert accepted > 2048
    assert chi_square_p_value(counts, exact_law(target, prompt, **arguments)) > 1e-4


@pytest.mark.parametrize("name", ["draft_model", "early_exit"])
@pytest.mark.parametrize("cut", [0, 4])
def test_turns_of_a_chat_keep_both_caches(name, cut):
    target = tiny_target()
    drafter = build_drafter(name, target, **({"model": target} if name == "draft_model" else {"layers": 3}))
    past, ids = Past(), random_prompts(3, 9)[0].clamp(min=2)
    for turn in range(3):
        out = decode(target, drafter, "chain", ids, past=past)
        fresh = decode(target, drafter, "chain", ids)
        assert out.answers == fresh.answers == greedy_reference(target, ids, torch.ones_like(ids), NEW)
        assert out.stats.accepted_at == fresh.stats.accepted_at
        assert turn == 0 or out.stats.prefilled < fresh.stats.prefilled
        rows = [row.tolist() + answer for row, answer in zip(ids, out.answers)]
        ids = torch.tensor([[*row[: len(row) - cut], 7, 8, 9] for row in rows])


def test_a_draft_model_that_reaches_less_far_than_the_target():
    """One row begins beyond its table of learned positions, one reaches the end of it while decoding."""
    target, model = tiny_target(), tiny_target("gpt2", seed=5, n_positions=32, max_position_embeddings=32)
    ids, mask = random_prompts(2, 36)
    drafter = build_drafter("draft_model", target, model=model)
    for tree in ("chain", "dynamic"):
        assert decode(target, drafter, tree, ids, mask).answers == greedy_reference(target, ids, mask, NEW)


@pytest.mark.parametrize("forward", ["auto", "generic"])
def test_a_tree_may_stand_beyond_the_targets_last_position(forward):
    """The answer just fits the table of learned positions, the nodes behind it do not."""
    target = tiny_target("gpt2", n_positions=32, max_position_embeddings=32)
    ids, mask = random_prompts(2, 32 - 12)
    answers = greedy_reference(target, ids, mask, 12)
    scripts = [row[m.bool()].tolist() + answer for row, m, answer in zip(ids, mask, answers)]
    decoder = SpeculativeDecoder(target, ScriptedDrafter(scripts, 97), tree=chain(7), forward=forward)
    assert decoder.generate(ids, mask, max_new_tokens=12, do_sample=False).answers == answers


def test_heads_that_differ_by_padding_rows():
    """One tokenizer, of which both heads have more rows than it has tokens, and not as many as each other."""
    tokenizer = build_tokenizer()
    tokens = len(tokenizer)
    target = Target(tiny_target(vocab_size=tokens + 9).model, tokenizer)
    model = Target(tiny_target(vocab_size=tokens + 3, seed=5).model, tokenizer)
    drafter = build_drafter("draft_model", target, model=model)
    assert drafter.draft_ids.tolist() == list(range(tokens))
    ids, mask = random_prompts(2, 12, vocab=tokens + 9)  # the texts may hold such rows
    ids[0, :2] = tokens + 8
    for tree in (chain(3, sampled=False), TREES["dynamic"]):
        assert decode(target, drafter, tree, ids, mask).answers == greedy_reference(target, ids, mask, NEW)
    whole = Target(tiny_target(vocab_size=tokens).model, tokenizer)
    assert build_drafter("draft_model", whole, model=model).draft_ids is None


def test_a_model_by_folder_takes_the_targets_dtype(tmp_path):
    tokenizer = build_tokenizer()
    tiny_target(vocab_size=len(tokenizer), seed=5).model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    target = Target(tiny_target(vocab_size=len(tokenizer), dtype=torch.float64).model, tokenizer)
    drafter = build_drafter("draft_model", target, model=str(tmp_path))
    assert drafter.model.dtype == torch.float64
    ids, mask = random_prompts(1, 9)
    assert decode(target, drafter, "chain", ids).answers == greedy_reference(target, ids, mask, NEW)


def test_draft_models_that_do_not_fit_are_refused():
    tokenizer = build_tokenizer()
    target = Target(tiny_target(vocab_size=len(tokenizer)).model, tokenizer)
    other = build_tokenizer()
    other.add_tokens(["<another>"])
    with pytest.raises(ValueError, match=rf"{len(other)} tokens, expected the same {len(tokenizer)}; name a smaller"):
        build_drafter("draft_model", target, model=Target(tiny_target(vocab_size=len(other)).model, other))
    with pytest.raises(ValueError, match=r"has 50 rows in its head, .* has 97 tokens; name"):
        build_drafter("draft_model", tiny_target(), model=tiny_target(vocab_size=50))
    with pytest.raises(UnsupportedTargetError, match=r"Mamba.* cannot draft: its cache is driven by .*name a model"):
        build_drafter("draft_model", family_target("mamba"), model=family_target("mamba"))
    with pytest.raises(ValueError, match="max_depth is at least 1, not 0"):
        build_drafter("draft_model", tiny_target(), model=tiny_target(), max_depth=0)
    with pytest.raises(ValueError, match="'model'"):
        build_drafter("draft_model", tiny_target())


@pytest.mark.parametrize("layers", [0, 4, 7, -1])
def test_an_exit_that_is_none_is_refused(layers):
    with pytest.raises(ValueError, match=rf"layers is {layers}, expected 1 to 3, as .* has 4"):
        build_drafter("early_exit", tiny_target(), layers=layers)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3", "gpt2"])
def test_cut_layers_share_their_weights_and_leave_the_target_alone(family):
    target = tiny_target(family, seed=3)
    ids = random_prompts(1, 9)[0]
    before, config = target.model(ids, output_hidden_states=True), target.config.to_dict()
    made = first_layers(target, 2)
    after = target.model(ids)
    assert torch.equal(before.logits, after.logits) and target.config.to_dict() == config
    assert target.num_layers == len(target.layers) == 4
    held = {parameter.data_ptr() for parameter in target.model.parameters()}
    assert {parameter.data_ptr() for parameter in made.model.parameters()} < held
    norm = target.decoder.ln_f if family == "gpt2" else target.decoder.norm
    expected = target.logits(norm(before.hidden_states[2]))
    torch.testing.assert_close(made.model(ids).logits, expected, atol=1e-5, rtol=1e-4)


def test_a_target_whose_layers_cannot_be_cut_is_refused_by_name():
    with pytest.raises(UnsupportedTargetError, match=r"cannot be cut to its first 2 layers: .*; take the drafter"):
        build_drafter("early_exit", family_target("gemma3n_text"), layers=2)


def test_a_cut_that_runs_other_layers_is_found_out(monkeypatch):
    """The check sees layers that run although they are not in the list, and ones that compute something else."""
    target = tiny_target(seed=4)
    from headsmith.heads import early_exit

    cut = early_exit._cut
    monkeypatch.setattr(early_exit, "_cut", lambda target, count: cut(target, count + 1))
    with pytest.raises(UnsupportedTargetError, match="3 layers run"):
        first_layers(target, 2)
    other = tiny_target(seed=5)
    monkeypatch.setattr(early_exit, "_cut", lambda target, count: cut(other, count))
    with pytest.raises(UnsupportedTargetError, match=r"off by [\d.]+ standard deviations"):
        first_layers(target, 2)


def test_drafters_are_named_on_the_command_line(tmp_path):
    """What `headsmith bench --drafter` takes."""
    target = tiny_target()
    made = _untrained("early_exit:layers=2,max_depth=5", target)
    assert (made.method, made.model.num_layers, made.max_depth) == ("early_exit", 2, 5)
    target.model.save_pretrained(tmp_path)
    assert _untrained(f"draft_model:model={tmp_path}", target).model.num_layers == 4
    with pytest.raises(ValueError, match=r"option 'layers' should read name=value"):
        _untrained("early_exit:layers", target)
    with pytest.raises(ValueError, match="eagle3 has to be trained first; name the folder"):
        _untrained("eagle3", target)
    with pytest.raises(ValueError, match="known are draft_model"):
        _untrained("bird", target)
