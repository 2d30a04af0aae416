"""headsmith target OUT_DIR"""

from __future__ import annotations

from pathlib import Path

import click


@click.command("target")
@click.argument("out_dir", type=click.Path(path_type=Path))
@click.option("--model", "alias", help="Alias of the embedded target; smollm2-135m-instruct (Apache-2.0) by default.")
def command(out_dir: Path, alias: str | None) -> None:
    """Write an embedded target as a plain Hugging Face folder: SmolLM2-135M-Instruct, or gemma-3-270m (Gemma Terms)."""
    from headsmith.heads.target.embedded import ALIAS, write_embedded_target

    print(f"wrote {write_embedded_target(out_dir, alias or ALIAS)}")
