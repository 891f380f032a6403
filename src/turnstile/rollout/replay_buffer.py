"""Attempts of earlier steps that are worth training on again: which are kept, and which a step takes."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from turnstile.errors import CheckpointError
from turnstile.records.journal import Key
from turnstile.records.record import read_record
from turnstile.types import F32, Group, Score


@dataclass(kw_only=True, slots=True)
class _StoredAttempt:
    """One attempt, alone in its group; the step that played it, and how often it was taken."""

    group: Group
    step: int
    used: int = 0

    @property
    def key(self) -> Key:
        return self.group.trajectories[0].key


class ReplayBuffer:
    """The last `size` attempts that were trained on with a positive advantage.

    A step takes up to `batch` of them, drawn by `seed` and its number alone. One that was taken `uses` times goes, and
    so does one whose advantage is no longer positive by then; the oldest go for new ones. What a checkpoint keeps is
    which attempts there are: the episodes themselves are in the record of the run. With a `size` of 0 nothing is kept.
    """

    def __init__(self, run: Path, *, size: int, batch: int, uses: int, seed: int) -> None:
        self._run, self._size, self._batch, self._uses, self._seed = run, size, batch, uses, seed
        self._kept: list[_StoredAttempt] = []
        self._taken: list[_StoredAttempt] = []

    def draw(self, step: int) -> list[Group]:
        """What a step trains on again, each attempt with the others of its group that are taken."""
        draw = random.Random(f"{self._seed}/{step}/buffer")
        places = sorted(draw.sample(range(len(self._kept)), min(self._batch, len(self._kept))))
        self._taken = [self._kept[place] for place in places]
        groups: dict[str, Group] = {}
        for one in self._taken:
            known = groups.get(one.group.id)
            mates = known.trajectories if known is not None else ()
            groups[one.group.id] = replace(one.group, trajectories=(*mates, *one.group.trajectories))
        return list(groups.values())

    def keep(
        self,
        step: int,
        groups: Sequence[Group],
        advantages: Sequence[Sequence[Sequence[F32]]],
        passes: Sequence[Collection[Key]],
    ) -> None:
        """Takes over what the step was: the groups that it played and those that were drawn, their advantages
        [group][trajectory][turn] -> f32[n], and the attempts trained on in each pass."""
        trained = {key for keys in passes for key in keys}
        good = {
            trajectory.key: _StoredAttempt(group=replace(group, trajectories=(trajectory,)), step=step)
            for group, own in zip(groups, advantages, strict=True)
            for trajectory, turns in zip(group.trajectories, own, strict=True)
            if trajectory.key in trained and sum(float(values.sum(dtype=np.float64)) for values in turns) > 0
        }
        for one in self._taken:
            one.used = one.used + 1 if good.pop(one.key, None) is not None else self._uses
        self._taken = []
        fresh = good.values()
        left = [one for one in self._kept if one.used < self._uses]
        self._kept = [*left, *fresh][-self._size :] if self._size else []

    def metrics(self, step: int) -> dict[str, float]:
        """replay_buffer/kept (attempts), replay_buffer/again (those that the step takes) and replay_buffer/age (their
        mean age in steps)."""
        if not self._size:
            return {}
        ages = [step - one.step for one in self._taken]
        found = {"replay_buffer/kept": float(len(self._kept)), "replay_buffer/again": float(len(ages))}
        return {**found, **({"replay_buffer/age": float(np.mean(ages))} if ages else {})}

    def state(self) -> dict[str, Any]:
        """Which attempts are kept: small JSON for a checkpoint."""
        return {"kept": [[one.step, *one.key, one.used] for one in self._kept]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes the episodes from the record. Raises CheckpointError where one is not there."""
        wanted = [(int(step), (str(group), int(attempt)), int(used)) for step, group, attempt, used in state["kept"]]
        played: dict[Key, Group] = {}
        for step in sorted({step for step, *_ in wanted}):
            for entry in read_record(self._run, phase="train", step=step, label=""):
                for trajectory in entry.group.trajectories:
                    played[trajectory.key] = replace(entry.group, trajectories=(trajectory,))
        for step, key, _ in wanted:
            if key not in played:
                raise CheckpointError(
                    f"the buffer holds attempt {key[1]} of {key[0]!r}, which the record of step {step} in "
                    f"{self._run / 'record'} lacks"
                )
        self._kept = [_StoredAttempt(group=played[key], step=step, used=used) for step, key, used in wanted]


def without_baseline(scores: Sequence[Sequence[Score]]) -> list[list[Score]]:
    """The scores of attempts that are trained on again: compared with what is played now, and part of no baseline."""
    return [[replace(score, in_baseline=False) for score in own] for own in scores]
