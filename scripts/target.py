"""headsmith target OUT_DIR"""

from __future__ import annotations

from pathlib import Path

import click


@click.command("target")
@click.argument("out_dir", type=click.Path(path_type=Path))
def command(out_dir: Path) -> None:
    """Write the embedded target, SmolLM2-135M-Instruct (Apache-2.0), as a plain Hugging Face folder."""
    from headsmith.heads.target.embedded import write_embedded_target

    print(f"wrote {write_embedded_target(out_dir)}")
