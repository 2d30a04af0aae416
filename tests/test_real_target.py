"""The embedded targets themselves, in fp32: any drafter, tree and batch gives the text of `generate()`, token by token.

SmolLM2-135M-Instruct answers questions; Gemma-3-270M (sliding window, scaled embeddings) continues plain text, one
piece of it longer than its window. HEADSMITH_HEADS names heads folders or runs of the first, separated by spaces, to
check these; otherwise its heads are trained briefly, as those of Gemma always are.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass

import pytest
import torch
from headsmith.heads import Target, load_drafter
from headsmith.heads.target import embedded_target
from headsmith.inference import SpeculativeDecoder
from headsmith.training.generate import generate
from headsmith.training.prompts import load_prompts
from headsmith.training.recipe import load_recipe
from headsmith.training.train import train

from tests.scripted import ScriptedDrafter
from tests.tiny import greedy_reference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
SMOLLM2, GEMMA3 = "smollm2-135m-instruct", "gemma-3-270m"
NEW = 48
TREES = ["chain:depth=3", "chain:depth=6", "fixed", "dynamic", "calibrated:fallback=false"]
# Neighbours are unequal, so that every batch is ragged; 610 is more than Gemma's window of 512.
LENGTHS = (5, 610, 12, 230, 33, 110, 3, 64)
PLAIN_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"


@dataclass
class Setting:
    """A target, prompts [1, T] of quite unequal lengths, and what `model.generate` answers to each by itself."""

    alias: str
    target: Target
    prompts: list[torch.Tensor]
    answers: list[list[int]]


@pytest.fixture(scope="module", params=[SMOLLM2, GEMMA3])
def setting(request):
    target = Target.from_pretrained(str(embedded_target(request.param)), dtype="float32")
    prompts = questions(target.tokenizer) if request.param == SMOLLM2 else pieces(target.tokenizer)
    answers = [greedy_reference(target, ids, torch.ones_like(ids), NEW)[0] for ids in prompts]
    return Setting(request.param, target, prompts, answers)


def questions(tokenizer):
    """As many packaged questions, spread over their lengths, the shortest beside the longest."""
    texts = [prompt.messages for prompt in load_prompts("questions")]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    rendered = [tokenizer.apply_chat_template(text, **options)["input_ids"] for text in texts]
    by_length = sorted(rendered, key=lambda ids: ids.shape[1])
    spread = [by_length[round(i * (len(by_length) - 1) / 7)] for i in range(8)]
    return [spread[i] for pair in zip(range(4), range(7, 3, -1)) for i in pair]


def pieces(tokenizer):
    """Stretches of plain text, cut off at `LENGTHS` tokens, each behind the token that begins a text."""
    ids = tokenizer("\n\n".join(plain_texts()), add_special_tokens=False)["input_ids"]
    begins = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    return [torch.tensor([[tokenizer.bos_token_id, *ids[b : b + n - 1]]]) for b, n in zip(begins, LENGTHS)]


def plain_texts():
    return [prompt.messages[0]["content"] for prompt in load_prompts("builtin")]


@pytest.fixture(scope="module")
def heads(setting, tmp_path_factory):
    """Heads folders of the setting's target."""
    folder = tmp_path_factory.mktemp("heads")
    if setting.alias == GEMMA3:
        return [train_gemma(setting.target, folder)]
    return os.environ.get("HEADSMITH_HEADS", "").split() or train_smollm2(folder)


def train_smollm2(folder):
    common = [f"output_dir={folder / 'answers'}", "generate.count=48", "generate.max_new_tokens=64"]
    answers = generate(load_recipe("smollm2-135m-medusa", common))
    made = []
    for name in ("smollm2-135m-medusa", "smollm2-135m-eagle3"):
        overrides = ["train.minutes=null", "train.max_steps=40", "evaluate.prompts=0", f"data.train={answers}"]
        made.append(train(load_recipe(name, [f"output_dir={folder / name}", *overrides])))
    return made


def train_gemma(target, folder):
    """EAGLE-3 on plain text: a base model has no chat template, so that one is set which adds nothing."""
    data = folder / "texts.jsonl"
    with data.open("w") as file:
        for text in plain_texts():
            turns = [{"role": "user", "content": text[:8]}, {"role": "assistant", "content": text[8:]}]
            file.write(json.dumps({"messages": turns}) + "\n")
    target.tokenizer.chat_template = PLAIN_TEMPLATE
    overrides = [f"target={GEMMA3}", f"output_dir={folder / GEMMA3}", "dtype=float32", f"data.train={data}"]
    overrides += ["drafter.options={draft_vocab_size: 8192, steps: 3, layers: [1, 8, 15]}", "data.train_on=all"]
    overrides += ["train.minutes=null", "train.max_steps=40", "train.batch_tokens=1024", "train.ema=null"]
    return train(load_recipe("smollm2-135m-eagle3", [*overrides, "evaluate.prompts=0", "data.eval_limit=4"]), target)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("batch", [1, 2, 4, 8])
def test_trained_heads_give_the_text_of_generate(setting, heads, tree, batch):
    for folder in heads:
        drafter = load_drafter(folder, setting.target)
        counts = decode(setting, lambda start, drafter=drafter: drafter, tree, batch, drafter.method)
        assert sum(stats.accepted for stats in counts) > 0


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("batch", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["perfect", "wrong"])
def test_scripted_drafters_give_the_text_of_generate(setting, kind, tree, batch):
    texts = [ids[0].tolist() + answer for ids, answer in zip(setting.prompts, setting.answers)]

    def scripted(start):
        rows, vocab = texts[start : start + batch], setting.target.vocab_size
        return ScriptedDrafter(rows, vocab, right=lambda row, level: kind == "perfect", explicit=True)

    counts = decode(setting, scripted, tree, batch, kind)
    assert (sum(stats.accepted for stats in counts) == 0) == (kind == "wrong")
    if kind == "perfect" and tree.startswith("chain") and batch == 1:
        depth = int(tree.partition("=")[2])
        fewest = [math.ceil((len(answer) - 1) / (depth + 1)) for answer in setting.answers]
        assert [stats.forwards for stats in counts] == fewest


def decode(setting, drafter_of, tree, batch, name):
    """Decode all prompts, `batch` at a time; every row has to be the single-row `generate()`, full length.

    Args: drafter_of: from the number of a batch's first prompt to its drafter.
    Returns: the stats of each batch.
    """
    counts, different = [], []
    for start in range(0, len(setting.prompts), batch):
        ids, mask = left_padded(setting.prompts[start : start + batch], setting.target.tokenizer.pad_token_id)
        decoder = SpeculativeDecoder(setting.target, drafter_of(start), tree=tree)
        assert not decoder.fallback, decoder.fallback
        out = decoder.generate(ids, mask, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(out.sequences[:, : ids.shape[1]], ids)
        different += compare(setting, start, out.sequences[:, ids.shape[1] :].tolist())
        counts.append(out.stats)
    tau = 1 + sum(stats.accepted for stats in counts) / sum(stats.row_forwards for stats in counts)
    identical = len(setting.prompts) - len(different)
    print(f"{setting.alias}, {name}, {tree}, batch {batch}: {identical} of {len(setting.prompts)} rows, τ {tau:.2f}")
    assert not different
    return counts


def left_padded(prompts, pad):
    """Prompts [1, T] -> [B, longest] token ids and mask."""
    longest = max(ids.shape[1] for ids in prompts)
    ids = torch.full((len(prompts), longest), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - prompt.shape[1] :] = prompt[0]
        mask[row, longest - prompt.shape[1] :] = 1
    return ids, mask


def compare(setting, start, rows):
    """The prompts whose row is not its answer and then padding: their number, the answer, what came."""
    pad = setting.target.tokenizer.pad_token_id
    expected = [setting.answers[start + i] for i in range(len(rows))]
    padded = [answer + [pad] * (len(row) - len(answer)) for answer, row in zip(expected, rows)]
    return [(start + i, want, row) for i, (want, row) in enumerate(zip(padded, rows)) if want != row]
