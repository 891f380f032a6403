"""One self-contained `report.html`: what was gained, how sure that is, where it sits, what it cost, what it looks like.

Images are in the page, styles are inline, nothing is fetched and no script runs. Model text is escaped.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from turnstile.evaluation.markup import anchor, paragraph, picture, section, text, wide
from turnstile.evaluation.metrics import to_metrics
from turnstile.evaluation.plots import Rows, Runs, curves, one_run
from turnstile.evaluation.replay import Shown, episodes
from turnstile.evaluation.sections import Alert, alerts, cards, costs, gains, reproduce
from turnstile.evaluation.table import Stages, make_table, to_html


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportData:
    """What a report shows; whatever is left empty leaves its part out.

    `stages`: evaluation results by policy, in order. `pairs`: which of them to compare, (before, after); the
    first is the headline. `metrics`: the rows a run logged, or `runs`: several runs by label and seed. `heldout`:
    which stage was evaluated after which step of `metrics`, to be marked in the curves.
    `before`, `after`: episodes to read side by side. `training_kinds`: how often each bug kind occurs among the
    training tasks. `recipe`: nested mappings. `timings`: seconds by phase, `memory`: peak MB by phase. `notes`:
    what a reader must know to read the figures rightly, one sentence or more each. `alerts`: the run's warnings and
    alarms, oldest first; they come before everything else. `missing`: why results or curves are not there.
    """

    name: str
    stages: Stages
    pairs: Sequence[tuple[str, str]] = ()
    metrics: Rows = ()
    runs: Runs = field(default_factory=dict)
    heldout: Mapping[int, str] = field(default_factory=dict)
    before: Sequence[Shown] = ()
    after: Sequence[Shown] = ()
    training_kinds: Mapping[str, float] = field(default_factory=dict)
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
    """Writes `run/report.html` whole or not at all, and returns its path."""
    run = Path(run)
    run.mkdir(parents=True, exist_ok=True)
    path, scratch = run / "report.html", run / "report.html.new"
    scratch.write_text(render(data), encoding="utf-8")
    os.replace(scratch, path)
    return path


def render(data: ReportData) -> str:
    """The page."""
    results = [cards(data.stages, data.pairs), wide(to_html(make_table(data.stages, data.pairs))), _list(data.notes)]
    sections = {
        "Alarms and warnings": alerts(data.alerts),
        "Not in this report": [_list(data.missing)],
        "Results": results if data.stages else [],
        "Learning curves": [_curves(data)],
        "Where the gain is": gains(data.stages, data.pairs, data.training_kinds),
        "Time and memory": costs(data.timings, data.memory, data.metrics),
        "Episodes": [episodes(data.before, data.after, data.pairs[0] if data.pairs else ("before", "after"))],
        "Reproduce": reproduce(data.command, data.recipe, data.versions),
    }
    body = {title: part for title, parts in sections.items() if (part := section(title, *parts))}
    links = " ".join(f"<a href='#{anchor(title)}'>{text(title)}</a>" for title in body)
    style = files("turnstile.evaluation").joinpath("report.css").read_text(encoding="utf-8")
    return (
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        "<meta name='color-scheme' content='light dark'>\n"
        f"<title>{text(data.name)} - Turnstile report</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"<header><h1>{text(data.name)}</h1>{paragraph(data.subtitle, 'subtitle')}<nav>{links}</nav></header>\n<main>\n"
        + "\n".join(body.values())
        + "\n</main>\n</body>\n</html>\n"
    )


def _curves(data: ReportData) -> str:
    runs = data.runs or one_run(with_heldout(data))
    if not data.runs and not data.metrics:
        return ""
    alt = "Rates, rewards, gates, turns and seconds by training step"
    return wide(f"<div class='sheet'>{picture(curves(runs), curves(runs, theme='dark'), alt)}</div>")


def with_heldout(data: ReportData) -> Rows:
    """The rows a run logged, with its held-out evaluations among them."""
    marks = [{"step": step, **to_metrics(data.stages[name])} for step, name in data.heldout.items()]
    return [*data.metrics, *marks]


def _list(lines: Sequence[str]) -> str:
    return f"<ul class='notes'>{''.join(f'<li>{text(line)}</li>' for line in lines)}</ul>" if lines else ""
