"""Rescoring of a recorded run with other rewards, without a sandbox or a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from turnstile.credit.base import EQUAL
from turnstile.credit.stats import equal
from turnstile.records.record import REPLAYED, Entry
from turnstile.rewards.build import Scorer
from turnstile.rewards.metrics import step_metrics
from turnstile.tracking.alarms import CollapseAlarm
from turnstile.types import Score


@dataclass(frozen=True, slots=True)
class Rescored:
    """A recorded group, with its scores under other rewards."""

    entry: Entry
    scores: tuple[Score, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Means over episodes by name (`rewards.metrics`), as recorded and as rescored, and counts of groups.

    `groups` counts the groups with at least two attempts with a verdict. `flat_before` and `flat_after` count those in
    which all rewards are equal, so that nothing is learned, and `another_best` those in which another attempt is now
    best.
    """

    before: Mapping[str, float]
    after: Mapping[str, float]
    groups: int
    flat_before: int
    flat_after: int
    another_best: int


def rescore(entries: Iterable[Entry], scorer: Scorer) -> Iterator[Rescored]:
    """Yield each recorded group with new scores.

    Attempts replayed from earlier steps are left out. Raises ConfigError if a reward needs a signal that was not
    recorded.
    """
    for entry in entries:
        if entry.label == REPLAYED:  # attempts of earlier steps, which are scored with the steps that played them
            continue
        (scores,) = scorer([entry.group])
        yield Rescored(entry, tuple(scores))


def compare(rescored: Sequence[Rescored]) -> Comparison:
    """Return a comparison of the recorded rewards and rates with those of the new scores."""
    groups = [item.entry.group for item in rescored]
    sides = [(_totals(item.entry.scores), _totals(item.scores)) for item in rescored]
    sides = [(before, after) for before, after in sides if len(before) > 1 and len(after) > 1]
    return Comparison(
        before=step_metrics(groups, [item.entry.scores for item in rescored]),
        after=step_metrics(groups, [item.scores for item in rescored]),
        groups=len(sides),
        flat_before=sum(equal(np.array(list(before.values()))) for before, _ in sides),
        flat_after=sum(equal(np.array(list(after.values()))) for _, after in sides),
        another_best=sum(_another_best(before, after) for before, after in sides),
    )


def collapses(rescored: Sequence[Rescored]) -> Iterator[str]:
    """Yield the messages that the collapse alarm would have reported for the training steps with the new scores."""
    alarm = CollapseAlarm()
    training = sorted((item for item in rescored if item.entry.phase == "train"), key=lambda item: item.entry.step)
    for step, items in groupby(training, key=lambda item: item.entry.step):
        of_step = list(items)
        metrics = step_metrics([item.entry.group for item in of_step], [item.scores for item in of_step])
        if line := alarm.update(step, metrics):
            yield line


def lines(rescored: Iterable[Rescored]) -> Iterator[dict[str, Any]]:
    """Yield each episode as a JSON object, with its position in the run and its new score."""
    for item in rescored:
        entry = item.entry
        for trajectory, score in zip(entry.group.trajectories, item.scores, strict=True):
            yield {
                "step": entry.step,
                "phase": entry.phase,
                "label": entry.label,
                "task": entry.group.task.id,
                "group": entry.group.id,
                "attempt": trajectory.attempt,
                "outcome": None if score.outcome is None else dict(score.outcome),
                "total": None if score.outcome is None else score.total,
                "turns": score.turn.tolist(),
                "granted": {term: values.tolist() for term, values in score.granted.items()},
                "withheld": {term: values.tolist() for term, values in score.withheld.items()},
                "withheld_by": {term: list(by) for term, by in score.withheld_by.items()},
                "gates": dict(score.gates),
            }


def _totals(scores: Sequence[Score]) -> dict[int, float]:
    """Return the total of each attempt that counts, by its index in the group."""
    return {place: score.total for place, score in enumerate(scores) if score.in_baseline and score.outcome is not None}


def _another_best(before: Mapping[int, float], after: Mapping[int, float]) -> bool:
    """Return whether no attempt is best both times, among the attempts that count both times."""
    both = before.keys() & after.keys()

    def best(totals: Mapping[int, float]) -> set[int]:
        return {place for place in both if totals[place] >= max(totals[other] for other in both) - EQUAL}

    return bool(both) and not best(before) & best(after)
