"""One self-contained `report.html`: the gain, its uncertainty, where it lies, what it cost, and example episodes.

Images are embedded, styles are inline, nothing is fetched and no script runs. Model text is escaped.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnstile.evaluation.gains import Division
from turnstile.evaluation.markup import render
from turnstile.evaluation.metrics import to_metrics
from turnstile.evaluation.plots import Rows, Runs, curves, one_run
from turnstile.evaluation.replay import Shown, episodes
from turnstile.evaluation.sections import Alert, alerts, costs, gains, reproduce, results
from turnstile.evaluation.table import Stages


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportData:
    """The content of a report. Sections whose fields are empty are left out.

    `stages`: evaluation results by policy, in order. `pairs`: the pairs to compare, (before, after); the first is the
    headline. `metrics`: the rows that a run logged, or `runs`: several runs by label and seed. `heldout`: the stage
    that was evaluated after each step of `metrics`, to be marked in the curves. `before`, `after`: episodes to read
    side by side. `training`: the number of training tasks of each kind and of each package. `recipe`: nested mappings.
    `timings`: seconds by phase, `memory`: peak MB by phase. `notes`: what a reader must know to interpret the figures
    correctly, each one or more sentences. `alerts`: the run's warnings and alarms, oldest first; they come before
    everything else. `missing`: why results or curves are missing.
    """

    name: str
    stages: Stages
    pairs: Sequence[tuple[str, str]] = ()
    metrics: Rows = ()
    runs: Runs = field(default_factory=dict)
    heldout: Mapping[int, str] = field(default_factory=dict)
    before: Sequence[Shown] = ()
    after: Sequence[Shown] = ()
    training: Mapping[Division, Mapping[str, float]] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()
    alerts: Sequence[Alert] = ()
    missing: Sequence[str] = ()
    command: str = ""
    subtitle: str = ""


def write_report(run: Path, data: ReportData) -> Path:
    """Write `run/report.html` atomically, and return its path."""
    run = Path(run)
    run.mkdir(parents=True, exist_ok=True)
    path, scratch = run / "report.html", run / "report.html.new"
    scratch.write_text(make_page(data), encoding="utf-8")
    os.replace(scratch, path)
    return path


def make_page(data: ReportData) -> str:
    """Return the page as HTML. Sections with nothing to show are left out."""
    names = data.pairs[0] if data.pairs else ("before", "after")
    sections = {
        "Alarms and warnings": alerts(data.alerts),
        "Not in this report": render("missing.html", lines=data.missing),
        "Results": results(data.stages, data.pairs, data.notes) if data.stages else "",
        "Learning curves": _curves(data),
        "Where the gain is": gains(data.stages, data.pairs, data.training),
        "Time and memory": costs(data.timings, data.memory, data.metrics),
        "Episodes": episodes(data.before, data.after, names),
        "Reproduce": reproduce(data.command, data.recipe, data.versions),
    }
    shown = {title: body for title, body in sections.items() if body}
    return f"{render('report.html', name=data.name, subtitle=data.subtitle, sections=shown)}\n"


def _curves(data: ReportData) -> str:
    if not data.runs and not data.metrics:
        return ""
    runs = data.runs or one_run(with_heldout(data))
    return render("curves.html", light=curves(runs), dark=curves(runs, theme="dark"))


def with_heldout(data: ReportData) -> Rows:
    """Return the rows that a run logged, followed by its held-out evaluations."""
    marks = [{"step": step, **to_metrics(data.stages[name])} for step, name in data.heldout.items()]
    return [*data.metrics, *marks]
