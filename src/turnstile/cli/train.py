"""The command `turnstile train`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turnstile.cli.runs import find_run, run_folder
from turnstile.config import load_recipe
from turnstile.errors import ConfigError, ReplayError
from turnstile.wiring.recipe_check import check_recipe


@click.command(short_help="Train a model as a recipe says, or go on with a run.")
@click.argument("recipe", required=False, type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--run", "name", metavar="NAME", help="Put the run in runs/NAME; default: the recipe's name.")
@click.option("--out", metavar="DIR", help="Put the run in this folder.")
@click.option("--fresh", is_flag=True, help="Start anew, and drop what the run's folder holds.")
@click.option(
    "--overfit", metavar="TASK", help="Train on this one task only: it must be learnt, or something is broken."
)
@click.option("--replay", metavar="RUN", help="Train RUN again from its record; give no RECIPE.")
@click.option("--plain", is_flag=True, help="Print lines, and draw no screen on a terminal.")
@click.option("--strict", is_flag=True, help="End the run at the first fault in an environment's code.")
@click.option("--dry-run", "dry", is_flag=True, help="Estimate time and memory, and train nothing.")
def train(
    recipe: str | None,
    overrides: tuple[str, ...],
    name: str | None,
    out: str | None,
    fresh: bool,
    overfit: str | None,
    replay: str | None,
    plain: bool,
    strict: bool,
    dry: bool,
) -> None:
    """Train as RECIPE (a TOML file) says. KEY=VALUE changes one key of it, like train.steps=4.

    To resume an interrupted run from its last checkpoint, give the same command again.

    --replay plays no episodes. It repeats the updates of a recorded run on the same tokens, which gives the same
    weights if the machine and its number of threads are the same.
    """
    if replay is not None:
        if recipe is not None or overfit is not None or dry:
            raise ConfigError("--replay takes the recipe of the run that it names; give no other, and no other mode")
        _replay(find_run(replay), name, out, fresh, plain)
        return
    if recipe is None:
        raise ConfigError("give a recipe (a TOML file), or --replay RUN")
    loaded = load_recipe(recipe, overrides)
    check_recipe(loaded)  # quick, and before torch is imported
    if dry:
        from turnstile.runs.dry_run import dry_run

        _print("dry run", dry_run(loaded))
        return
    if overfit is not None and name is None and out is None:
        name = f"{loaded.name}-overfit"
    from turnstile.cli.results import print_results
    from turnstile.runs.train import train as train_run

    folder = run_folder(name, out, loaded)
    summary = train_run(loaded, run=folder, fresh=fresh, overfit=overfit, plain=plain, strict=strict)
    print_results(summary["results"])
    click.echo(f"run: {folder}; read an episode with: turnstile rollout show {folder} --best")


def _replay(original: Path, name: str | None, out: str | None, fresh: bool, plain: bool) -> None:
    from turnstile.runs.audit import compare_runs
    from turnstile.runs.run_folder import read_recipe, read_resolved
    from turnstile.runs.train import train as train_run

    recipe, given = read_recipe(original), read_resolved(original).get("given", {})
    if "reward" in given:
        raise ReplayError(
            f"{original} was judged by a function of its caller's ({given['reward']}); replay it from there"
        )
    folder = run_folder(name or (None if out else f"{original.resolve().name}-replay"), out, recipe)
    train_run(recipe, run=folder, fresh=fresh, overfit=given.get("overfit"), replay=original, plain=plain)
    found = compare_runs(original, folder)
    if found.record is not None:
        raise ReplayError(f"{folder} parted from {original} at {found.record}")
    if found.weights is not None:
        raise ReplayError(f"{folder} parted from {original} in the weights after step {found.weights}")
    click.echo(f"run: {folder}; every step as in {original}, to the last bit")


def _print(title: str, found: Mapping[str, Any]) -> None:
    """Print names and values in two columns."""
    table = Table(title=title, show_header=False, box=None, title_justify="left")
    for key, value in found.items():
        shown = f"{value:,.4g}" if isinstance(value, float) else str(value)
        table.add_row(Text(key), Text(shown))
    Console(highlight=False).print(table)
