"""The embedded target itself, in fp32: trained heads, real questions, full length, token by token.

HEADSMITH_HEADS names heads folders or runs, separated by spaces, to check these; otherwise heads are trained briefly.
"""

from __future__ import annotations

import os

import pytest
import torch
from headsmith.heads import Target, load_drafter
from headsmith.inference import SpeculativeDecoder
from headsmith.training.generate import generate
from headsmith.training.prompts import load_prompts
from headsmith.training.recipe import load_recipe
from headsmith.training.train import train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
NEW, QUESTIONS = 48, 20
TREES = ["chain:depth=3", "dynamic", "calibrated:fallback=false"]


@pytest.fixture(scope="module")
def target():
    return Target.from_pretrained("smollm2-135m-instruct", dtype="float32")


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """Heads folders by method."""
    if given := os.environ.get("HEADSMITH_HEADS"):
        return given.split()
    folder = tmp_path_factory.mktemp("heads")
    common = [f"output_dir={folder / 'answers'}", "generate.count=48", "generate.max_new_tokens=64"]
    answers = generate(load_recipe("smollm2-135m-medusa", common))
    made = []
    for name in ("smollm2-135m-medusa", "smollm2-135m-eagle3"):
        overrides = ["train.minutes=null", "train.max_steps=40", "evaluate.prompts=0", f"data.train={answers}"]
        made.append(train(load_recipe(name, [f"output_dir={folder / name}", *overrides])))
    return made


@pytest.fixture(scope="module")
def questions(target):
    """Prompts, and what `model.generate` answers to each by itself."""
    texts = [prompt.messages for prompt in load_prompts("questions")[:QUESTIONS]]
    render = target.tokenizer.apply_chat_template
    prompts = [render(t, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"] for t in texts]
    answers = []
    for ids in prompts:
        out = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        answers.append(out[0, ids.shape[1] :].tolist())
    return list(zip(prompts, answers))


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("which", [0, 1], ids=["first heads", "second heads"])
def test_fp32_text_is_that_of_generate(target, heads, questions, tree, batch, which):
    drafter = load_drafter(heads[which], target)
    decoder = SpeculativeDecoder(target, drafter, tree=tree)
    accepted = forwards = 0
    for start in range(0, QUESTIONS, batch):
        part = questions[start : start + batch]
        longest = max(ids.shape[1] for ids, _ in part)
        padded = torch.full((len(part), longest), target.tokenizer.pad_token_id)
        mask = torch.zeros_like(padded)
        for row, (ids, _) in enumerate(part):
            padded[row, longest - ids.shape[1] :] = ids[0]
            mask[row, longest - ids.shape[1] :] = 1
        out = decoder.generate(padded, mask, max_new_tokens=NEW, do_sample=False)
        for row, (_, answer) in enumerate(part):
            found = out.sequences[row, longest:].tolist()
            assert found[: len(answer)] == answer
            assert set(found[len(answer) :]) <= {target.tokenizer.pad_token_id}
        accepted += out.stats.accepted
        forwards += out.stats.row_forwards
    print(f"{drafter.method}, {tree}, batch {batch}: {QUESTIONS} questions identical, τ {1 + accepted / forwards:.2f}")
    assert accepted > 0
