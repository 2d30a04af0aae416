"""One run on an accelerator: plain and speculative decoding, eager and compiled, the parts of a round, its costs.

    python -m tests.device OUT

writes JSON to the folder OUT. The target is a random model of the sizes of a 1B Llama and the heads are untrained, so
that nothing is fetched: times are real, acceptance is not, but for prompt lookup on a text that repeats itself. A round
pays where τ is above its time over that of a plain step (`round_ms`).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from headsmith.heads import Target, build_drafter

from tests.folders import chat_target_folder

SIZES = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 8192,
    "initializer_range": 0.02,
}  # fmt: skip
TREES = ("chain:depth=4", "dynamic:total=16,depth=5,top_k=4", "dynamic:total=64,depth=6,top_k=8")


def measure(out: Path, sizes: dict[str, float], new_tokens: int = 128) -> list[Path]:
    """Run everything; returns the files written."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = chat_target_folder(Path(scratch) / "target", **sizes)
        target = Target.from_pretrained(str(folder), dtype="bfloat16")
        build_drafter("eagle3", target).save_pretrained(Path(scratch) / "heads")
        del target
        common = ["--target", folder, "--dtype", "bfloat16", "--heads", Path(scratch) / "heads"]
        asked = ["--limit", 4, "--new-tokens", new_tokens, *(f"--tree={tree}" for tree in TREES)]
        runs = {
            "eager": ["bench", *common, *asked],
            "compiled": ["bench", *common, *asked, "--compile"],
            "costs": ["calibrate", *common, "--table", "--contexts", "256,4096", "--batches", "1,8"],
        }
        for name, arguments in runs.items():
            command = [sys.executable, "-m", "headsmith.scripts.cli", *arguments, "--json", out / f"{name}.json"]
            print(f"== {name}", flush=True)
            subprocess.run(list(map(str, command)), check=True)
    return [out / f"{name}.json" for name in runs]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    measure(Path(sys.argv[1]), SIZES)
