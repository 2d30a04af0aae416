"""Every drafter of the registry: exact decoding, training gradients, save and load."""

from __future__ import annotations

import json

import pytest
import torch
from headsmith.heads import DRAFTERS, CheckpointError, build_drafter, load_drafter
from headsmith.heads.checkpoint import SavedDrafter
from headsmith.heads.drafter import Drafter, Needs
from headsmith.heads.eagle3 import default_layers
from headsmith.inference import DynamicTree, FixedTree, SpeculativeDecoder, chain

from tests.reference import naive_eagle3_logits, naive_eagle_features, naive_eagle_loss, naive_hydra_logits
from tests.tiny import greedy_reference, random_prompts, tiny_target

TRAINED = sorted(name for name, cls in DRAFTERS.items() if issubclass(cls, SavedDrafter))
# Options that change what is computed, by a name of their own: the method, and the options.
VARIANTS = {
    "hass": ("eagle", {"steps": 3, "top_k_loss": 5}),
    "eagle3 normed": ("eagle3", {"norm_features": True, "feedback": "normed"}),
    "hydra++": ("hydra", {"prefix_attention": True}),
    "hydra shared": ("hydra", {"prefix_attention": True, "lm_head": "shared", "num_layers": 2}),
}
TREES = [chain(3), FixedTree(((0,), (1,), (0, 0), (1, 0), (1, 1), (0, 0, 0))), DynamicTree(10, 4, 3)]


def untrained(name, target, **options):
    """A drafter of the registry, or of VARIANTS."""
    method, variant = VARIANTS.get(name, (name, {}))
    return build_drafter(method, target, **variant, **options)


def randomised(name, target, **options):
    """A drafter whose weights all matter (zero-initialised ones included)."""
    torch.manual_seed(3)
    drafter = untrained(name, target, **options)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return drafter


def batch_of(target, needs, lengths=(9, 14, 6), prompt=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 97, (len(lengths), max(lengths)), generator=generator)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, prompt:length] = True
        ids[row, length:] = 0
    return target.features(ids, needs, mask, with_top=True)


@pytest.mark.parametrize("name", [*sorted(DRAFTERS), *VARIANTS])
@pytest.mark.parametrize("tree", TREES, ids=["chain", "fixed", "dynamic"])
@pytest.mark.parametrize("reduced", [False, True])
def test_decodes_exactly(name, tree, reduced):
    target = tiny_target()
    if name in TRAINED or name in VARIANTS:
        drafter = randomised(name, target, draft_vocab_size=48 if reduced else None)
    else:
        drafter = build_drafter(name, target, **({"model": tiny_target(seed=5)} if name == "draft_model" else {}))
    assert isinstance(drafter, Drafter)
    ids, mask = random_prompts(3, 12)
    expected = greedy_reference(target, ids, mask, 30)
    out = SpeculativeDecoder(target, drafter, tree=tree).generate(ids, mask, max_new_tokens=30, do_sample=False)
    assert out.sequences[:, 12:].tolist() == expected


@pytest.mark.parametrize("name", [*TRAINED, *VARIANTS])
def test_decoding_computes_what_training_does(name, tmp_path):
    """The scores drafted along the true continuation are the logits of the unrolled steps at the same place."""
    target = tiny_target()
    drafter = randomised(name, target, draft_vocab_size=60)
    drafter.save_pretrained(tmp_path / "heads")
    drafter = load_drafter(tmp_path / "heads", target)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 97, (2, 16), generator=generator)
    lengths = torch.tensor([9, 7])
    levels = 3
    state = drafter.start(FakeSession(target), ids, lengths)
    features = target.features(ids[:, :9], Needs(drafter.needs.layers, final=True))
    proposal = drafter.observe(state, features, ids[:, 1:10], lengths)
    drafted = [proposal.scores[:, 0]]
    for level in range(levels - 1):
        tokens = torch.stack([ids[r, lengths[r] + 1 + level] for r in range(2)])[:, None]
        # A decoy beside the true token must not be seen by it.
        both = torch.cat((tokens + 1, tokens), 1) % 97
        parents = torch.full_like(both, 2 * level)
        proposal = drafter.expand(state, parents, both, torch.ones_like(both, dtype=torch.bool))
        drafted.append(proposal.scores[:, 1])
    for row in range(2):
        reference = naive_logits(drafter, target, ids[row], levels)
        for level in range(levels):
            expected = reference[level][lengths[row] - 1].log_softmax(-1)
            torch.testing.assert_close(drafted[level][row], expected, atol=1e-4, rtol=1e-3)


class FakeSession:
    capacity = 64

    def __init__(self, target):
        self.target = target


def naive_logits(drafter, target, ids, levels):
    """Per level the logits [T, V_d] at every index, by a method's own naive loop."""
    if drafter.method == "eagle3":
        return naive_eagle3_logits(drafter, target, ids, levels)
    if drafter.method == "eagle":
        rows = slice(None) if drafter.draft_ids is None else drafter.draft_ids
        return [target.logits(level)[:, rows] for level in naive_eagle_features(drafter, target, ids, levels)]
    if drafter.method == "hydra":
        return naive_hydra_logits(drafter, target, ids, levels)
    final = target.features(ids[None], Needs(final=True)).final[0]
    return [drafter.lm_heads[k](drafter.blocks[k](final)) for k in range(levels)]


@pytest.mark.parametrize("name", [*TRAINED, *VARIANTS])
@pytest.mark.parametrize("reduced", [None, 60])
def test_loss_and_gradient_match_a_naive_loop(name, reduced):
    target = tiny_target(dtype=torch.float64)
    drafter = randomised(name, target, draft_vocab_size=reduced).double().eval()  # without noise
    features = batch_of(target, Needs(drafter.needs.layers, final=True))
    result = drafter(features, target.teacher(drafter.draft_ids), 1 if name == "eagle" else 3)
    result.total(1.0).backward()
    gradients = {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad()
    total, count, hits = 0.0, [0] * len(result.loss), [0] * len(result.loss)
    size = reduced or 97
    for row in range(features.input_ids.shape[0]):
        ids = features.input_ids[row]
        logits = naive_logits(drafter, target, ids, len(result.loss))
        teacher = target.logits(features.final[row])[:, :size].softmax(-1)
        if drafter.method == "eagle":
            predicted = naive_eagle_features(drafter, target, ids, len(result.loss))
        for level in range(len(result.loss)):
            for t in range(len(ids) - 2 - level):
                if features.loss_mask[row, t + 2 + level]:
                    if drafter.method == "eagle":
                        true = features.final[row, t + 1 + level]
                        loss = naive_eagle_loss(drafter, target, predicted[level][t], true)
                    else:
                        loss = -(teacher[t + 1 + level] * logits[level][t].log_softmax(-1)).sum()
                    total = total + 0.8**level * loss
                    count[level] += 1
                    hits[level] += int(logits[level][t].argmax() == features.top[row, t + 1 + level])
    total.backward()
    assert result.count.tolist() == count
    assert result.hits[:, 0].tolist() == hits
    torch.testing.assert_close(result.total(1.0).double(), total.detach(), rtol=1e-5, atol=1e-4)
    for name_, parameter in drafter.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name_], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [*TRAINED, *VARIANTS])
def test_every_parameter_moves(name):
    target = tiny_target()
    drafter = untrained(name, target)
    before = {n: p.clone() for n, p in drafter.named_parameters()}
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3)
    for seed in range(2):  # what starts at zero may hold back the gradient of what is in front of it for one step
        features = batch_of(target, Needs(drafter.needs.layers, final=True), seed=seed)
        optimizer.zero_grad()
        drafter(features, target.teacher(drafter.draft_ids)).total(10.0).backward()
        optimizer.step()
    still = [n for n, p in drafter.named_parameters() if torch.equal(p, before[n])]
    assert still == []
    assert all(not p.requires_grad and p.grad is None for p in target.model.parameters())


@pytest.mark.parametrize("name", [*TRAINED, *VARIANTS])
def test_a_batch_with_nothing_to_learn_gives_zero_connected_loss(name):
    target = tiny_target()
    drafter = untrained(name, target, draft_vocab_size=20)
    features = batch_of(target, Needs(drafter.needs.layers, final=True))
    features.loss_mask.zero_()
    loss = drafter(features, target.teacher(drafter.draft_ids)).total(1.0)
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in drafter.parameters())


@pytest.mark.parametrize("name", [*TRAINED, *VARIANTS])
def test_joint_hits_are_the_greedy_chain(name):
    target = tiny_target()
    drafter = randomised(name, target)
    features = batch_of(target, Needs(drafter.needs.layers, final=True), lengths=(40, 40), prompt=1)
    result = drafter(features, target.teacher(None), 3)
    assert result.joint[0] == result.hits[0, 0]
    assert (result.joint[1:] <= result.joint[:-1]).all()
    assert (result.joint <= result.hits[:, 0]).all()


@pytest.mark.parametrize("name", [*TRAINED, *VARIANTS])
@pytest.mark.parametrize("reduced", [None, 48])
def test_save_and_load_round_trip(name, reduced, tmp_path):
    target = tiny_target()
    drafter = randomised(name, target, draft_vocab_size=reduced)
    drafter.save_pretrained(tmp_path / "heads")
    drafter.save_pretrained(tmp_path / "heads")  # replaces what is there
    loaded = load_drafter(tmp_path / "heads", target)
    assert loaded.config == drafter.config
    for key, value in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key
    assert [p.name for p in tmp_path.iterdir()] == ["heads"]


@pytest.mark.parametrize("name", TRAINED)
def test_bad_checkpoints_and_targets_are_refused(name, tmp_path):
    target = tiny_target()
    heads = tmp_path / "heads"
    build_drafter(name, target).save_pretrained(heads)
    with pytest.raises(CheckpointError, match=r"hidden_size 32.* has 64"):
        load_drafter(heads, tiny_target(hidden_size=64, head_dim=16))
    with pytest.raises(CheckpointError, match="other weights"):
        load_drafter(heads, tiny_target(seed=5))
    load_drafter(heads, tiny_target(seed=5), any_target=True)
    with pytest.raises(FileNotFoundError, match="no heads in"):
        load_drafter(tmp_path / "nowhere", target)
    config = json.loads((heads / "config.json").read_text())
    config["config"]["draft_vocab_size"] = 50
    from safetensors.torch import load_file, save_file

    tensors = load_file(heads / "model.safetensors")
    missing = next(iter(tensors))
    del tensors[missing]
    save_file(tensors | {"surprise": torch.ones(1)}, heads / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{missing} is missing; surprise is not expected"):
        load_drafter(heads, target)
    (heads / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match=r"can be read"):
        load_drafter(heads, target)


def test_a_full_disk_leaves_the_old_heads_in_place(tmp_path, monkeypatch):
    target = tiny_target()
    drafter = build_drafter("medusa", target)
    drafter.save_pretrained(tmp_path / "heads")
    before = (tmp_path / "heads" / "model.safetensors").read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headsmith.heads.checkpoint.save_file", full)
    with pytest.raises(CheckpointError, match="disk is full"):
        randomised("medusa", target).save_pretrained(tmp_path / "heads")
    assert (tmp_path / "heads" / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["heads"]


def test_impossible_options_are_refused():
    target = tiny_target()
    for name in TRAINED:
        for size in (0, -1, 98):
            with pytest.raises(ValueError, match="expected 1 to 97"):
                build_drafter(name, target, draft_vocab_size=size)
        with pytest.raises(ValueError, match="its options are"):
            build_drafter(name, target, no_such_option=1)
    with pytest.raises(ValueError, match="known are draft_model"):
        build_drafter("no_such_method", target)
    with pytest.raises(ValueError, match=r"three different"):
        build_drafter("eagle3", tiny_target(num_hidden_layers=2))
    with pytest.raises(ValueError, match="lm_head is"):
        build_drafter("medusa", target, lm_head="none")


def test_default_layers_are_the_papers_where_they_fit():
    assert default_layers(32) == (2, 16, 29)
    assert default_layers(30) == (2, 15, 27)
    for depth in range(3, 40):
        low, mid, high = default_layers(depth)
        assert 0 <= low < mid < high < depth
    with pytest.raises(ValueError, match="has 2 layers"):
        default_layers(2)
