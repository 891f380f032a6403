"""The command `turnstile config`."""

from __future__ import annotations

import json

import click

from turnstile.config import load_recipe
from turnstile.wiring.recipe_check import check_recipe


@click.command(short_help="Print a recipe with every default filled in.")
@click.argument("recipe", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--check", is_flag=True, help="Say only whether training could begin, and what is looked at when it does."
)
def config(recipe: str, overrides: tuple[str, ...], check: bool) -> None:
    """Print RECIPE as JSON, with overrides applied and every default filled in.

    Fails wherever training would: unknown kinds and knobs, values out of range, settings that exclude each other.
    """
    found = load_recipe(recipe, overrides)
    lines = check_recipe(found)
    if not check:
        click.echo(json.dumps(found.model_dump(mode="json"), indent=2))
        return
    for line in lines:
        click.echo(line)
    click.echo(f"{recipe}: nothing is wrong with it" + (", as far as can be said before" if lines else ""))
