"""headsmith preview RECIPE [key=value …]"""

from __future__ import annotations

import click


@click.command("preview")
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[key=value]…")
@click.option("--rows", default=3, show_default=True, help="Conversations shown.")
def command(recipe: str, overrides: tuple[str, ...], rows: int) -> None:
    """Show what RECIPE trains on: masked text, rows dropped by reason, lengths, disk for cached features."""
    from headsmith.heads.checkpoint import find_method
    from headsmith.heads.target.loading import resolve
    from headsmith.training.preview import preview
    from headsmith.training.recipe import load_recipe
    from rich.console import Console
    from transformers import AutoConfig

    loaded = load_recipe(recipe, overrides)
    config = AutoConfig.from_pretrained(resolve(loaded.target), trust_remote_code=loaded.trust_remote_code)
    captures = find_method(loaded.drafter.method).captures
    preview(loaded, Console(), rows, captures, config.get_text_config(decoder=True).hidden_size)
