"""`turnstile config`."""

from __future__ import annotations

import json

import click

from turnstile.config import load_recipe


@click.command(short_help="Print a recipe with every default filled in.")
@click.argument("recipe", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def config(recipe: str, overrides: tuple[str, ...]) -> None:
    """Prints RECIPE as JSON, resolved: overrides applied and every default filled in."""
    click.echo(json.dumps(load_recipe(recipe, overrides).model_dump(mode="json"), indent=2))
