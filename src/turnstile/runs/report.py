"""The report of a run, made from the files in its folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import get_args

from turnstile.config import Recipe
from turnstile.envs.base import Env
from turnstile.evaluation.gains import Division
from turnstile.evaluation.metrics import EpisodeResult
from turnstile.evaluation.plots import curves, one_run
from turnstile.evaluation.replay import Shown
from turnstile.evaluation.report import ReportData, with_heldout, write_report
from turnstile.evaluation.sections import Alert
from turnstile.lookup import resolve
from turnstile.records.record import read_record
from turnstile.runs.run_folder import FINAL, UNTOUCHED, WARM, read_resolved, read_results
from turnstile.runs.session import read_costs
from turnstile.tracking.jsonl import read_messages, read_metrics
from turnstile.types import Task

NAMES = {
    UNTOUCHED: "untouched model",
    "random": "random agent",
    "oracle": "oracle",
    WARM: "after warm start",
    FINAL: "after RL",
}
PAIRS = ((WARM, FINAL), (UNTOUCHED, FINAL))
"""Evaluations (before, after) whose paired difference is shown if a run has both."""
ONE_SEED = "One training seed: the intervals tell how the figures vary with the tasks, not with the seed."
SHOWN = 4
"""Number of tasks whose episodes before and after RL are shown."""


def report(run: Path, recipe: Recipe, train_tasks: Sequence[Task], env: Callable[..., Env] | None = None) -> Path:
    """Write report.html and curves.png to the run folder, and return the report's path.

    `env` made the run's environments, if the recipe's did not.
    """
    results = read_results(run)
    stages = named_stages(results)
    metrics = read_metrics(run)
    resolved = read_resolved(run)
    before, after = _episodes(run)
    costs = read_costs(run)
    data = ReportData(
        name=recipe.name,
        subtitle=", ".join(
            (
                recipe.model.id,
                f"{recipe.rewards.compose} rewards",
                f"{recipe.credit.kind} credit",
                f"seed {recipe.seed}",
            )
        ),
        stages=stages,
        pairs=named_pairs(results),
        metrics=metrics,
        alerts=_alerts(run),
        missing=_missing(recipe, bool(metrics), bool(results)),
        heldout={step: NAMES.get(name, name) for step, name in _held_out_at(recipe, results).items()},
        before=before,
        after=after,
        training={
            by: Counter(str(task.data[by]) for task in train_tasks if task.data.get(by)) for by in get_args(Division)
        },
        recipe=resolved["recipe"],
        versions=resolved["versions"],
        timings=costs["seconds"],
        memory=costs["memory_mb"],
        notes=[ONE_SEED, *getattr(env or resolve("env", recipe.env.kind), "notes", ())],
        command=" ".join(["turnstile", *resolved["command"][1:]]),
    )
    if data.metrics:
        (run / "curves.png").write_bytes(curves(one_run(with_heldout(data))))
    return write_report(run, data)


def named_stages(results: Mapping[str, Sequence[EpisodeResult]]) -> dict[str, Sequence[EpisodeResult]]:
    """Return a run's evaluations in the order in which they are shown, keyed by readable names."""
    return {NAMES.get(name, name): results[name] for name in sorted(results, key=_order)}


def named_pairs(results: Mapping[str, Sequence[EpisodeResult]]) -> list[tuple[str, str]]:
    """Return the pairs of `PAIRS` that a run has, by their readable names."""
    return [(NAMES[before], NAMES[after]) for before, after in PAIRS if {before, after} <= results.keys()]


def _alerts(run: Path) -> list[Alert]:
    messages = [message for message in read_messages(run) if message["level"] != "info"]
    return [Alert(level=str(message["level"]), line=str(message["message"])) for message in messages]


def _missing(recipe: Recipe, trained: bool, evaluated: bool) -> list[str]:
    """Return notes that say why a report has no curves or no results, and how to get them."""
    found = []
    if not trained and recipe.train.steps == 0:
        found.append("No learning curves: train.steps is 0, so no step was trained.")
    elif not trained:
        found.append("No learning curves: no step was finished; the same command goes on with the run.")
    if not evaluated and not recipe.tasks.heldout:
        found.append("No results: no tasks were held out; name a file of them in tasks.heldout.")
    elif not evaluated:
        found.append("No results: no evaluation was finished; the same command goes on with the run.")
    return found


def _order(name: str) -> tuple[int, str]:
    """Return a sort key for evaluations: baselines, warm start, intermediate ones, and the trained model last."""
    known = list(NAMES)
    return (known.index(name) if name in known[:4] else len(known) + (name == FINAL), name)


def _held_out_at(recipe: Recipe, results: Mapping[str, Sequence[EpisodeResult]]) -> dict[int, str]:
    """Return the names of the evaluations of the trained model, by the step after which they were made."""
    at = {0: WARM, recipe.train.steps: FINAL}
    at |= {int(name.removeprefix("step-")): name for name in results if name.startswith("step-")}
    return {step: name for step, name in sorted(at.items()) if name in results}


def _episodes(run: Path) -> tuple[list[Shown], list[Shown]]:
    """Return episodes of the same tasks before and after RL, those with the largest gain first."""
    played: dict[str, dict[str, Shown]] = {WARM: {}, FINAL: {}}
    for entry in read_record(run, phase="eval"):
        if entry.label in played:
            shown = Shown(task=entry.group.task, trajectory=entry.group.trajectories[0], score=entry.scores[0])
            played[entry.label][entry.group.task.id] = shown
    both = played[WARM].keys() & played[FINAL].keys()

    def gain(task: str) -> tuple[float, str]:
        before, after = (played[label][task].score.total for label in (WARM, FINAL))
        return (before - after, task)

    chosen = sorted(both, key=gain)[:SHOWN]
    return [played[WARM][task] for task in chosen], [played[FINAL][task] for task in chosen]
