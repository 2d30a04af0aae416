"""Every packaged recipe trains: two steps on a tiny target of its own family."""

from __future__ import annotations

import json

import pytest
import torch
from headsmith.heads import Target, load_drafter
from headsmith.inference import SpeculativeDecoder
from headsmith.training.recipe import load_recipe, recipe_names
from headsmith.training.train import train

from tests.folders import chat_target_folder

# What a recipe's target is called -> family of the tiny target that stands in for it.
FAMILIES = {"smollm2": "llama", "llama": "llama", "qwen3": "qwen3"}


def test_the_packaged_recipes_are_these():
    assert recipe_names() == [
        "llama-3.1-8b-instruct-eagle3",
        "qwen3-8b-eagle3",
        "smollm2-135m-eagle",
        "smollm2-135m-eagle3",
        "smollm2-135m-hass",
        "smollm2-135m-hydra",
        "smollm2-135m-medusa",
    ]


@pytest.mark.parametrize("name", recipe_names())
def test_two_steps_give_heads_that_decode(name, tmp_path):
    family = next(kind for prefix, kind in FAMILIES.items() if name.startswith(prefix))
    target = Target.from_pretrained(str(chat_target_folder(tmp_path / "target", family)))
    rows = [
        {"messages": [{"role": "user", "content": f"Count to {n}"}, {"role": "assistant", "content": "one two " * n}]}
        for n in range(3, 12)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = load_recipe(
        name,
        [
            f"target={tmp_path / 'target'}", f"output_dir={tmp_path / 'out'}", f"data.train={tmp_path / 'train.jsonl'}",
            "data.eval_fraction=0.3", "train.minutes=null", "train.epochs=null", "train.max_steps=2",
            "train.batch_tokens=256", "train.accumulation=1", "drafter.options.draft_vocab_size=100",
            "evaluate.prompts=1", "evaluate.new_tokens=6", "dtype=float32",
        ],
    )  # fmt: skip
    heads = train(recipe)
    assert heads == tmp_path / "out" / "heads"
    assert (tmp_path / "out" / "evaluation.json").is_file()
    out = SpeculativeDecoder(target, load_drafter(heads, target)).generate(
        torch.tensor([[40, 50, 60]]), max_new_tokens=5, do_sample=False
    )
    assert out.sequences.shape == (1, 8)
