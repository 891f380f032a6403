"""The report's parts that hold figures: headline, gains by kind and package, costs, how to reproduce."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, isnan
from typing import Any

from turnstile.evaluation.gains import Division, TopKinds, paired_breakdown, prior_share, split
from turnstile.evaluation.markup import FEW, bars, duration, paragraph, table, text, tone, whisker
from turnstile.evaluation.metrics import EpisodeResult, compared, paired_difference, rate
from turnstile.evaluation.plots import Rows
from turnstile.evaluation.table import Stages, bounds, number

Pairs = Sequence[tuple[str, str]]
LISTED = 20
"""Alarms and warnings that a report lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """A line that warns a person; `level` is "warning" or "alarm"."""

    level: str
    line: str


def alerts(found: Sequence[Alert]) -> list[str]:
    """Lists a run's alarms, then its warnings, each line once; at most `LISTED` of them, then a count."""
    lines = sorted(dict.fromkeys(found), key=lambda alert: alert.level != "alarm")  # stable: oldest first in a level
    items = "".join(
        f"<li class='{text(alert.level)}'><b>{text(alert.level)}</b> {text(alert.line)}</li>"
        for alert in lines[:LISTED]
    )
    more = f"{len(lines) - LISTED} more are in messages.jsonl." if len(lines) > LISTED else ""
    return [f"<ul class='alerts'>{items}</ul>{paragraph(more, 'note')}"] if lines else []


def cards(stages: Stages, pairs: Pairs) -> str:
    """The rates of the first pair, each with what it came from and how sure the change is."""
    if not pairs:
        return ""
    before, after = (stages[name] for name in pairs[0])
    reading = {"up": "higher", "down": "lower", "unclear": "no clear change"}
    found = []
    for name in compared((*before, *after)):
        gain = paired_difference(before, after, name)
        found.append(
            f"<div class='card {tone(gain)}'><h3>{text(name)}</h3>"
            f"<p class='big'><span class='from'>{number(rate(before, name).mean, digits=2)}</span> &rarr; "
            f"{number(rate(after, name).mean, digits=2)}</p>"
            f"{whisker(gain, max(0.1, abs(gain.low), abs(gain.high)))}"
            f"<p class='note'>{number(gain.mean, signed=True)} {bounds(gain)}, {reading[tone(gain)]}</p></div>"
        )
    names = f"From {pairs[0][0]} to {pairs[0][1]}, paired over {gain.n_tasks} tasks"
    return f"<div class='cards'>{''.join(found)}</div>{paragraph(names, 'note')}"


def gains(stages: Stages, pairs: Pairs, training: Mapping[str, float]) -> list[str]:
    """The last rate by kind and by package for the first pair, and how much of the gain a prior could be."""
    if not pairs:
        return []
    before, after = (stages[name] for name in pairs[0])
    of = compared((*before, *after))[-1]
    parts = [
        _division(training, before, after, by, of) for by in ("kind", "package") if any(getattr(r, by) for r in after)
    ]
    parts.append(
        paragraph(
            f"Each row has its own 95 % interval, so one row in twenty misses by chance; with fewer than {FEW} tasks "
            "no difference is coloured.",
            "note",
        )
    )
    if any(result.kind for result in after) and training:
        parts.append(_prior(before, after, training, of))
    return parts


def _division(
    training: Mapping[str, float],
    before: Sequence[EpisodeResult],
    after: Sequence[EpisodeResult],
    by: Division,
    of: str,
) -> str:
    found = paired_breakdown(before, after, by, of)
    old, new = split(before, by), split(after, by)
    reach = max((abs(end) for gain in found.values() for end in (gain.low, gain.high) if not isnan(end)), default=1.0)
    total = sum(training.values())
    shares = by == "kind" and total > 0
    rows = [
        (
            text(name or "(none)"),
            str(gain.n_tasks),
            *((f"{100 * training.get(name, 0.0) / total:.0f} %",) if shares else ()),
            number(rate(old[name], of).mean),
            number(rate(new[name], of).mean),
            f"<span class='{tone(gain)}'>{number(gain.mean, signed=True)}</span>",
            whisker(gain, reach or 1.0),
        )
        for name, gain in found.items()
    ]
    head = (by, "tasks", *(("of training",) if shares else ()), "before", "after", "difference", "95 % interval")
    return f"<h3>{text(of.capitalize())} by {'bug kind' if by == 'kind' else by}</h3>" + table(head, rows, "gains")


def _prior(
    before: Sequence[EpisodeResult], after: Sequence[EpisodeResult], training: Mapping[str, float], of: str
) -> str:
    found = prior_share(before, after, training, of)
    title = "<h3>How much of it could be a sharper prior over common mutations?</h3>"
    if not found.gain.mean > 0:
        return title + paragraph(f"{of.capitalize()} did not rise, so there is no gain to divide.")

    def holds(top: TopKinds) -> str:
        return (
            f"{', '.join(top.kinds)}: {100 * top.task_share:.0f} % of the tasks and {100 * top.gain_share:.0f} % of "
            f"the gain ({number(top.contribution.mean, signed=True)} {bounds(top.contribution)})"
        )

    return (
        title
        + paragraph(
            f"Most frequent kind in training: {holds(found.top1)}. Three most frequent: {holds(found.top3)}. A gain "
            "spread evenly over the tasks has equal shares; a gain share far above the task share is what a "
            "sharper prior over common mutations looks like."
        )
        + paragraph(
            f"With kinds as frequent as in training the gain is {number(found.train_weighted_gain, signed=True)}; "
            f"with all kinds equally frequent it is {number(found.even_gain, signed=True)}. This points and "
            "does not prove: a skill too is learnt first where there is most practice, and a prior helps inside a kind."
        )
    )


def costs(timings: Mapping[str, float], memory: Mapping[str, float], metrics: Rows) -> list[str]:
    """Wall clock and peak memory by phase, then what the training steps were spent on.

    Parts of a step may run at the same time, so their shares are of the steps' own time (`seconds/step`).
    """
    parts = []
    if timings:
        whole = sum(timings.values())
        shown = {name: f"{duration(s)} ({100 * s / whole if whole else 0:.0f} %)" for name, s in timings.items()}
        head = ["phase", "", f"time, {duration(whole)} in all", *(["peak memory"] if memory else [])]
        rows = [
            (*row, f"{memory[name] / 1024:.1f} GB" if name in memory else "")[: len(head)]
            for name, row in zip(timings, bars(timings, shown), strict=True)
        ]
        parts.append(table(head, rows, "costs"))
    spent: dict[str, float] = {}
    for row in metrics:
        for name, value in row.items():
            kind, _, part = name.partition("/")
            if kind == "seconds" and isinstance(value, int | float) and isfinite(value):
                spent[part] = spent.get(part, 0.0) + value
    whole = spent.pop("step", 0.0) or sum(spent.values())
    if spent:
        shown = {name: f"{duration(s)} ({100 * s / whole if whole else 0:.0f} %)" for name, s in spent.items()}
        note = "Parts overlap: environments run while others generate." if sum(spent.values()) > 1.01 * whole else ""
        body = table(("part", "", f"time, {duration(whole)} in all"), bars(spent, shown), "costs")
        parts.append(f"<h3>Inside the training steps</h3>{body}{paragraph(note, 'note')}")
    return parts


def reproduce(command: str, recipe: Mapping[str, Any], versions: Mapping[str, str]) -> list[str]:
    """The command, the whole recipe and the versions it ran with."""
    lines = "\n".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in _flat(recipe))
    packages = [(text(name), text(version)) for name, version in versions.items()]
    return [
        f"<pre class='command'>{text(command)}</pre>" if command else "",
        f"<details><summary>The resolved recipe</summary><pre>{text(lines)}</pre></details>" if lines else "",
        table(("package", "version"), packages, "versions") if packages else "",
    ]


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys, as overrides on the command line are written."""
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
