"""headsmith generate RECIPE [key=value …]"""

from __future__ import annotations

import click


@click.command("generate")
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[key=value]…")
def command(recipe: str, overrides: tuple[str, ...]) -> None:
    """Let the target answer the prompts of RECIPE (a YAML file, or a packaged recipe's name).

    Every record is written as it is finished: an interrupted run goes on where it stopped.
    """
    from headsmith.training.generate import generate
    from headsmith.training.recipe import load_recipe

    print(f"wrote {generate(load_recipe(recipe, overrides))}")
