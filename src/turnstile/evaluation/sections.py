"""The report's sections with figures: headline, gains by kind and package, costs, and how to reproduce the run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, isnan
from typing import Any, get_args

from markupsafe import Markup

from turnstile.evaluation.gains import Division, paired_breakdown, prior_share, split
from turnstile.evaluation.markup import FEW, render
from turnstile.evaluation.metrics import EpisodeResult, Interval, compared_rates, paired_difference, rate
from turnstile.evaluation.plots import Rows
from turnstile.evaluation.table import Stages, make_table

Pairs = Sequence[tuple[str, str]]
LISTED = 20
"""Maximum number of alarms and warnings that a report lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """A line of warning. `level` is "warning" or "alarm"."""

    level: str
    line: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A rate before and after, and their paired difference."""

    name: str
    before: Interval
    after: Interval
    gain: Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class DividedGain:
    """The gain by kind of task or by package, each one's share of training, and the largest absolute interval end."""

    by: Division
    gains: Mapping[str, Interval]
    before: Mapping[str, Interval]
    after: Mapping[str, Interval]
    shares: Mapping[str, float]
    reach: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """Seconds by part, and the seconds of the whole, which are fewer if parts run at the same time."""

    seconds: Mapping[str, float]
    whole: float


def alerts(found: Sequence[Alert]) -> Markup:
    """Render a run's alarms, then its warnings, without duplicates; at most `LISTED` lines, then a count."""
    lines = sorted(dict.fromkeys(found), key=lambda alert: alert.level != "alarm")  # stable: oldest first in a level
    more = f"{len(lines) - LISTED} more are in messages.jsonl." if len(lines) > LISTED else ""
    return render("alerts.html", alerts=lines[:LISTED], more=more)


def results(stages: Stages, pairs: Pairs, lines: Sequence[str]) -> Markup:
    """Render the rates of the first pair, before and after, with the uncertainty of each change, and all rates."""
    changes = []
    if pairs:
        before, after = (stages[name] for name in pairs[0])
        changes = [
            Change(
                name=name,
                before=rate(before, name),
                after=rate(after, name),
                gain=paired_difference(before, after, name),
            )
            for name in compared_rates((*before, *after))
        ]
    pair = pairs[0] if pairs else None
    return render("results.html", changes=changes, pair=pair, table=make_table(stages, pairs), lines=lines)


def gains(stages: Stages, pairs: Pairs, training: Mapping[Division, Mapping[str, float]]) -> Markup:
    """Render the gain of the first pair by kind and by package, and how much of it a sharper prior could explain."""
    if not pairs:
        return Markup()
    before, after = (stages[name] for name in pairs[0])
    of = compared_rates((*before, *after))[-1]
    present = [by for by in get_args(Division) if any(getattr(result, by) for result in after)]
    found = [_divide_gain(training.get(by, {}), before, after, by, of) for by in present]
    prior = prior_share(before, after, training["kind"], of) if "kind" in present and training.get("kind") else None
    return render("gains.html", divisions=found, few=FEW, prior=prior, of=of)


def _divide_gain(
    training: Mapping[str, float],
    before: Sequence[EpisodeResult],
    after: Sequence[EpisodeResult],
    by: Division,
    of: str,
) -> DividedGain:
    found = paired_breakdown(before, after, by, of)
    old, new = split(before, by), split(after, by)
    reach = max((abs(end) for gain in found.values() for end in (gain.low, gain.high) if not isnan(end)), default=1.0)
    total = sum(training.values())
    return DividedGain(
        by=by,
        gains=found,
        before={name: rate(old[name], of) for name in found},
        after={name: rate(new[name], of) for name in found},
        shares={name: training[name] / total for name in training} if total > 0 else {},
        reach=reach or 1.0,
    )


def costs(timings: Mapping[str, float], memory: Mapping[str, float], metrics: Rows) -> Markup:
    """Render wall-clock time and peak memory by phase, then how the time of the training steps was spent.

    Parts of a step may run at the same time, so shares are relative to the steps' own time (`seconds/step`).
    """
    spent: dict[str, float] = {}
    for row in metrics:
        for name, value in row.items():
            kind, _, part = name.partition("/")
            if kind == "seconds" and isinstance(value, int | float) and isfinite(value):
                spent[part] = spent.get(part, 0.0) + value
    whole = spent.pop("step", 0.0) or sum(spent.values())
    phases, steps = Spent(seconds=timings, whole=sum(timings.values())), Spent(seconds=spent, whole=whole)
    return render("costs.html", phases=phases, memory=memory, steps=steps)


def reproduce(command: str, recipe: Mapping[str, Any], versions: Mapping[str, str]) -> Markup:
    """Render the command, the whole recipe and the versions of the run."""
    lines = [(key, json.dumps(value, ensure_ascii=False)) for key, value in _flat(recipe)]
    return render("reproduce.html", command=command, recipe=lines, versions=versions)


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for each value, with keys as in overrides on the command line."""
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
