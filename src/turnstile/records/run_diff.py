"""The first difference between two runs' records: its step, and what differs first in that step.

Everything that determines a run is compared: the tasks drawn, then each attempt turn by turn (tokens shown,
log-probabilities, tokens sampled, answers), then scores, advantages, and the data of the update. Times are not
compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from turnstile.records.codec import encode
from turnstile.records.record import Entry, read_record
from turnstile.types import F32, Score, Trajectory, Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordDifference:
    """The first difference: `what` differs at `step`. `others` is the number of further differences in that step."""

    step: int
    what: str
    where: str = ""
    others: int = 0

    def __str__(self) -> str:
        more = f", and in {self.others} more of that step" if self.others else ""
        return f"step {self.step}: {self.what} differ{f' in {self.where}' if self.where else ''}{more}"


def first_difference(one: Path, other: Path) -> RecordDifference | int:
    """Return the first difference between two runs' records, or the last step up to which they are equal.

    If one run has more steps, only the steps of both are compared. Raises TurnstileError for a run without a record.
    """
    last = 0
    for first, second in zip(_steps(one), _steps(other), strict=False):
        if difference := _step_difference(*first, *second):
            return difference
        last = first[0]
    return last


def _steps(run: Path) -> Iterator[tuple[int, list[Entry]]]:
    """Yield each trained step with its groups in the order they were drawn. The warm start counts as step 0."""
    entries = (entry for entry in read_record(run) if entry.phase != "eval")
    for step, group in groupby(entries, key=lambda entry: entry.step):
        yield step, sorted(group, key=_sort_key)


def _sort_key(entry: Entry) -> tuple[Any, ...]:
    """Return the sort key of an entry: the parts of its group's id, with numbers compared as numbers."""
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in entry.group.id.split("/"))


def _step_difference(step: int, first: list[Entry], other_step: int, second: list[Entry]) -> RecordDifference | None:
    if step != other_step:
        return RecordDifference(step=min(step, other_step), what="the steps recorded")
    drawn = [[entry.group.task.id for entry in entries] for entries in (first, second)]
    if drawn[0] != drawn[1]:
        index = next(i for i, (a, b) in enumerate(zip_longest(*drawn)) if a != b)
        names = " and ".join(repr(names[index]) if index < len(names) else "none" for names in drawn)
        return RecordDifference(step=step, what="the tasks drawn", where=f"place {index} ({names})")
    pairs = list(zip(first, second, strict=True))
    for compare in (_play_diffs, _score_diffs, _credit_diffs, _training_diffs):
        differences = [(what, where) for a, b in pairs for what, where in compare(a, b)]
        if differences:
            what, where = differences[0]
            return RecordDifference(step=step, what=what, where=where, others=len(differences) - 1)
    return None


Diffs = Iterator[tuple[str, str]]
"""(what differs, where)"""


def _play_diffs(first: Entry, second: Entry) -> Diffs:
    if not _equal_as_recorded(first.group.task, second.group.task):
        yield "the task's contents", first.group.id
    for a, b in zip_longest(first.group.trajectories, second.group.trajectories):
        where = f"{first.group.id}, attempt {(a or b).attempt}"
        if a is None or b is None:
            yield "the attempts", where
        elif difference := _attempt_difference(a, b):
            yield difference[0], f"{where}{difference[1]}"


def _attempt_difference(a: Trajectory, b: Trajectory) -> tuple[str, str] | None:
    for number, (first, second) in enumerate(zip(a.turns, b.turns, strict=False)):
        if difference := _turn_difference(first, second):
            return difference[0], f", turn {number}{difference[1]}"
    if len(a.turns) != len(b.turns) or a.stop is not b.stop:
        return f"the ends ({a.stop.value} after {len(a.turns)} turns, {b.stop.value} after {len(b.turns)})", ""
    if not _equal_as_recorded(a.signals, b.signals):
        return "the final measurements", _first_differing_key(a.signals, b.signals)
    return None


def _turn_difference(a: Turn, b: Turn) -> tuple[str, str] | None:
    if (index := _first_index(a.context_ids, b.context_ids)) is not None:
        return "the tokens shown", f", token {index}"
    tokens = _first_index(a.completion.token_ids, b.completion.token_ids)
    logprobs = _first_index(a.completion.logprobs, b.completion.logprobs)
    if logprobs is not None and (tokens is None or logprobs < tokens):
        values = [float(turn.completion.logprobs[logprobs]) for turn in (a, b)]
        return (
            "the sampler's log-probabilities (weights or engine)",
            f", token {logprobs} ({values[0]:.9g}, {values[1]:.9g})",
        )
    if tokens is not None:
        return "the tokens sampled", f", token {tokens}"
    for what, first, second in (
        ("the distributions sampled from", a.completion.sampling, b.completion.sampling),
        ("the answers", a.observation, b.observation),
        ("the environment's rewards", a.rewards, b.rewards),
        ("the turn's signals", a.signals, b.signals),
        ("the environment's states", a.state_key, b.state_key),
    ):
        if not _equal_as_recorded(first, second):
            return what, ""
    return None


def _score_diffs(first: Entry, second: Entry) -> Diffs:
    for trajectory, a, b in zip(first.group.trajectories, first.scores, second.scores, strict=True):
        if not _equal_as_recorded(a, b):
            yield f"the scores ({_total(a)}, {_total(b)})", f"{first.group.id}, attempt {trajectory.attempt}"


def _total(score: Score) -> str:
    return "no verdict" if score.outcome is None else f"{score.total:.9g}"


def _credit_diffs(first: Entry, second: Entry) -> Diffs:
    return _array_diffs("the advantages", first, first.advantages or (), second.advantages or ())


def _training_diffs(first: Entry, second: Entry) -> Diffs:
    for name, what in {
        "weight": "the tokens' weights in the loss",
        "logprob": "the trainer's log-probabilities",
    }.items():
        yield from _array_diffs(what, first, first.trained.get(name, ()), second.trained.get(name, ()))


def _array_diffs(what: str, entry: Entry, first: Sequence[Sequence[F32]], second: Sequence[Sequence[F32]]) -> Diffs:
    for index, trajectory in enumerate(entry.group.trajectories):
        a, b = (side[index] if side else () for side in (first, second))  # empty if the group was not trained on
        nothing = np.empty(0, np.float32)
        for number, (x, y) in enumerate(zip_longest(a, b, fillvalue=nothing)):
            if (token := _first_index(x, y)) is not None:
                yield what, f"{entry.group.id}, attempt {trajectory.attempt}, turn {number}, token {token}"
                break


def _equal_as_recorded(a: Any, b: Any) -> bool:
    """Return whether two values have the same recorded form. NaN equals NaN."""
    return json.dumps(encode(a), sort_keys=True) == json.dumps(encode(b), sort_keys=True)


def _first_index(a: np.ndarray, b: np.ndarray) -> int | None:
    """Return the first index at which two arrays differ, or None if they are equal. NaN equals NaN."""
    both = min(len(a), len(b))
    differ = np.flatnonzero(~((a[:both] == b[:both]) | ((a[:both] != a[:both]) & (b[:both] != b[:both]))))
    return int(differ[0]) if len(differ) else None if len(a) == len(b) else both


def _first_differing_key(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    return next((f", {key}" for key in sorted({*a, *b}) if not _equal_as_recorded(a.get(key), b.get(key))), "")
