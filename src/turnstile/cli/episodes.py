"""Selection of recorded episodes by the options of a command."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from turnstile.errors import ConfigError, TurnstileError
from turnstile.lookup import nearest
from turnstile.records.record import Entry, Phase, read_record
from turnstile.types import Score, Trajectory

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Episode:
    """A recorded episode: the trajectory at index `place` of an entry's group."""

    entry: Entry
    place: int

    @property
    def trajectory(self) -> Trajectory:
        return self.entry.group.trajectories[self.place]

    @property
    def score(self) -> Score:
        return self.entry.scores[self.place]

    @property
    def total(self) -> float:
        """The composed reward, or NaN if infrastructure failed."""
        return math.nan if self.score.outcome is None else self.score.total


@dataclass(frozen=True, kw_only=True, slots=True)
class Filter:
    """Criteria for recorded episodes. A criterion that is None selects all."""

    task: str | None = None  # a part of its id
    phase: Phase | None = None
    step: int | None = None
    label: str | None = None


def filter_options(command: F) -> F:
    """Add an option to a command for each field of `Filter`."""
    for option in (
        click.option("--label", help="Of this evaluation only."),
        click.option("--step", type=int, help="Of this step only."),
        click.option("--phase", type=click.Choice(get_args(Phase)), help="Of this phase only."),
        click.option("--task", metavar="ID", help="Of this task only; a part of its id will do."),
    ):
        command = option(command)
    return command


def entries(run: Path, wanted: Filter) -> Iterator[Entry]:
    """Yield the recorded groups that match `wanted`. Raises ConfigError if none is of the wanted task."""
    seen: set[str] = set()
    fits = False
    for entry in read_record(run, phase=wanted.phase, step=wanted.step, label=wanted.label):
        seen.add(entry.group.task.id)
        if wanted.task is None or wanted.task in entry.group.task.id:
            fits = True
            yield entry
    if wanted.task is not None and seen and not fits:
        hint = nearest(wanted.task, seen) if len(seen) <= 20 else f"{len(seen)} tasks are"
        raise ConfigError(f"no episode of a task like {wanted.task!r} is recorded there; {hint}")


def episodes(found: Iterable[Entry], attempt: int | None = None) -> Iterator[Episode]:
    """Yield the trajectories of these entries as episodes, or only those with number `attempt` in their group."""
    for entry in found:
        for place, trajectory in enumerate(entry.group.trajectories):
            if attempt in (None, trajectory.attempt):
                yield Episode(entry, place)


def select(found: Iterable[Episode], which: str | None) -> Episode:
    """Return the "best" or "worst" episode by total reward, or with None the latest of all.

    Of equally good episodes, the latest counts. Episodes lost to infrastructure are neither best nor worst. Raises
    TurnstileError if there is no episode.
    """
    chosen: Episode | None = None
    for episode in found:
        if which is None or (
            not math.isnan(episode.total)
            and (
                chosen is None or (episode.total >= chosen.total) == (which == "best") or episode.total == chosen.total
            )
        ):
            chosen = episode
    if chosen is None:
        raise TurnstileError("no recorded episode fits; see what there is with: turnstile rollout list RUN")
    return chosen
