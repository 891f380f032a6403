"""The command `turnstile eval`."""

from __future__ import annotations

from pathlib import Path

import click

from turnstile.cli.results import print_results
from turnstile.cli.runs import find_run
from turnstile.config import load_recipe
from turnstile.records.record import label_of
from turnstile.runs.evaluate import evaluate as evaluate_policy
from turnstile.runs.run_folder import read_recipe


@click.command(short_help="Evaluate a model, a run or a baseline on held-out tasks.")
@click.argument("target", metavar="RECIPE|RUN")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--model", help="A hub id, a folder or a packaged name; default: the run's last weights, or the recipe's."
)
@click.option(
    "--policy", default="model", show_default=True, help="Or a baseline that the recipe names in eval.policies."
)
@click.option("--samples", type=click.IntRange(min=1), help="Episodes for each task; default: the recipe's.")
@click.option(
    "--predictions", type=click.Path(dir_okay=False), help="Write what was handed in here, as SWE-bench reads it."
)
@click.option("--plain", is_flag=True, help="Print lines, and draw no screen on a terminal.")
@click.option("--limit", type=click.IntRange(min=1), help="Only so many of the held-out tasks.")
def evaluate(
    target: str,
    overrides: tuple[str, ...],
    model: str | None,
    policy: str,
    samples: int | None,
    predictions: str | None,
    plain: bool,
    limit: int | None,
) -> None:
    """Play the held-out tasks of RECIPE (a TOML file) or of RUN (a folder, or a name below runs/).

    KEY=VALUE changes one key of the recipe, like tasks.heldout=other.jsonl. The episodes are added to the record of RUN
    and replace those of an earlier evaluation of the same model or policy.
    """
    run = None if Path(target).is_file() or target.endswith(".toml") else find_run(target)
    recipe = load_recipe(target, overrides) if run is None else read_recipe(run, overrides)
    results = evaluate_policy(
        recipe, run=run, model=model, policy=policy, samples=samples, limit=limit, predictions=predictions, plain=plain
    )
    print_results(results)
    if run is not None:
        label = label_of(next(iter(results)))
        click.echo(f"read an episode with: turnstile rollout show {run} --label {label} --best")
