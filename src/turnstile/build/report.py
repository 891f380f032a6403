"""The report of a run, from what lies in its folder."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from turnstile.build.run_folder import read_results
from turnstile.config import Recipe
from turnstile.evaluation.replay import Shown
from turnstile.evaluation.report import ReportData, write_report
from turnstile.rollout.record import read_record
from turnstile.tracking.jsonl import read_metrics
from turnstile.types import Task

NAMES = {
    "untouched": "untouched model",
    "random": "random agent",
    "oracle": "oracle",
    "warmstart": "after warm start",
    "trained": "after RL",
}
SHOWN = 4
"""Episodes to read, before and after."""


def report(run: Path, recipe: Recipe, train_tasks: Sequence[Task], timings: Mapping[str, float]) -> Path:
    """Writes report.html into the run folder and returns its path."""
    results = read_results(run)
    stages = {NAMES.get(name, name): results[name] for name in sorted(results, key=_order)}
    resolved = json.loads((run / "resolved.json").read_text(encoding="utf-8"))
    before, after = _episodes(run)
    kinds = Counter(str(task.data.get("kind", "")) for task in train_tasks)
    total = sum(kinds.values()) or 1
    pairs = [("after warm start", "after RL"), ("untouched model", "after RL")]
    data = ReportData(
        name=recipe.name,
        stages=stages,
        pairs=[pair for pair in pairs if set(pair) <= set(stages)],
        metrics=read_metrics(run),
        before=before,
        after=after,
        training_kinds={kind: count / total for kind, count in kinds.items() if kind},
        recipe=resolved["recipe"],
        versions=resolved["versions"],
        timings=timings,
        command=f"turnstile train recipes/{recipe.name}.toml",
    )
    return write_report(run, data)


def _order(name: str) -> tuple[int, str]:
    known = list(NAMES)
    return (known.index(name) if name in known[:4] else len(known) + (name == "trained"), name)


def _episodes(run: Path) -> tuple[list[Shown], list[Shown]]:
    """The same tasks before and after RL, those that turned out differently first."""
    played: dict[str, dict[str, Shown]] = {"warmstart": {}, "trained": {}}
    for entry in read_record(run, phase="eval"):
        if entry.label in played:
            shown = Shown(task=entry.group.task, trajectory=entry.group.trajectories[0], score=entry.scores[0])
            played[entry.label][entry.group.task.id] = shown
    both = played["warmstart"].keys() & played["trained"].keys()

    def gain(task: str) -> tuple[float, str]:
        before, after = (played[label][task].score.total for label in ("warmstart", "trained"))
        return (before - after, task)

    chosen = sorted(both, key=gain)[:SHOWN]
    return [played["warmstart"][task] for task in chosen], [played["trained"][task] for task in chosen]
