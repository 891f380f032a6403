"""The command `turnstile rollout rescore`."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from turnstile.cli.episodes import Filter, entries, filter_options
from turnstile.cli.runs import find_run
from turnstile.config import load_recipe
from turnstile.errors import ConfigError, TurnstileError
from turnstile.evaluation.rescore import Comparison, collapses, compare, lines, rescore
from turnstile.records.record import Phase
from turnstile.runs.run_folder import read_recipe, read_resolved
from turnstile.wiring.world import make_scorer

SHOWN = ("reward/", "gate/")


@click.command("rescore", short_help="Judge a recorded run by other rewards.")
@click.argument("run")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--recipe", metavar="FILE", help="Take the rewards and ends of this recipe; default: the run's own.")
@click.option("--write", metavar="FILE", type=click.Path(dir_okay=False), help="Write each episode's score, as JSONL.")
@filter_options
def rescore_run(
    run: str,
    overrides: tuple[str, ...],
    recipe: str | None,
    write: str | None,
    task: str | None,
    phase: Phase | None,
    step: int | None,
    label: str | None,
) -> None:
    """Compute the rewards of RUN's recorded episodes again, without a model or sandbox, and compare with the record.

    KEY=VALUE changes a key of the recipe, like rewards.compose=direct or rewards.terms.1.weight=0.3. The record itself
    is not changed.
    """
    folder = find_run(run)
    if recipe is None and "reward" in read_resolved(folder).get("given", {}):
        raise ConfigError("this run's reward is a function that Python gave it; name rewards with --recipe FILE")
    rewards = load_recipe(recipe, overrides) if recipe is not None else read_recipe(folder, overrides)
    found = list(rescore(entries(folder, Filter(task=task, phase=phase, step=step, label=label)), make_scorer(rewards)))
    if not found:
        raise TurnstileError("no recorded episode fits; see what there is with: turnstile rollout list RUN")
    console = Console(highlight=False)
    _print(console, compare(found))
    for line in collapses(found):
        console.print(line, markup=False)
    if write is not None:
        text = "".join(json.dumps(line) + "\n" for line in lines(found))
        try:
            Path(write).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--write {write!r} cannot be written: {error.strerror}") from None


def _print(console: Console, found: Comparison) -> None:
    table = Table("", box=None, pad_edge=False)
    for name in ("recorded", "now", "difference"):
        table.add_column(name, justify="right")
    for name in sorted(found.before.keys() | found.after.keys()):
        if name.startswith(SHOWN):
            before, after = found.before.get(name), found.after.get(name)
            change = "-" if before is None or after is None else f"{after - before:+.4f}"
            table.add_row(name, *("-" if value is None else f"{value:.4f}" for value in (before, after)), change)
    console.print(table)
    console.print(
        f"{found.groups} groups of two attempts or more: equal rewards in {found.flat_before} recorded, "
        f"{found.flat_after} now; another attempt is best in {found.another_best}",
        soft_wrap=True,
    )
