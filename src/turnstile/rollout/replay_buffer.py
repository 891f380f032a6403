"""The replay buffer, which holds attempts of earlier steps for training on them again."""

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
    """One attempt as a group of its own, the step that played it, and how often it was drawn."""

    group: Group
    step: int
    used: int = 0

    @property
    def key(self) -> Key:
        return self.group.trajectories[0].key


class ReplayBuffer:
    """Holds the last `size` attempts that were trained on with a positive advantage.

    Each step draws up to `batch` of them; the draw depends only on `seed`, the step's number and the attempts held. An
    attempt is dropped after `uses` draws, or once its advantage is no longer positive, and the oldest make room for new
    ones. A checkpoint stores only which attempts are held; the episodes themselves are in the run's record. With `size`
    0 the buffer stays empty.
    """

    def __init__(self, run: Path, *, size: int, batch: int, uses: int, seed: int) -> None:
        self._run, self._size, self._batch, self._uses, self._seed = run, size, batch, uses, seed
        self._kept: list[_StoredAttempt] = []
        self._taken: list[_StoredAttempt] = []

    def draw(self, step: int) -> list[Group]:
        """Draw the attempts that a step trains on again. Attempts of the same group are returned as one Group."""
        draw = random.Random(f"{self._seed}/{step}/buffer")
        places = sorted(draw.sample(range(len(self._kept)), min(self._batch, len(self._kept))))
        self._taken = [self._kept[place] for place in places]
        groups: dict[str, Group] = {}
        for stored in self._taken:
            known = groups.get(stored.group.id)
            mates = known.trajectories if known is not None else ()
            groups[stored.group.id] = replace(stored.group, trajectories=(*mates, *stored.group.trajectories))
        return list(groups.values())

    def keep(
        self,
        step: int,
        groups: Sequence[Group],
        advantages: Sequence[Sequence[Sequence[F32]]],
        passes: Sequence[Collection[Key]],
    ) -> None:
        """Update the buffer with the attempts that a step trained on.

        `groups` are the groups that the step played and those it drew, `advantages` are theirs,
        [group][trajectory][turn] -> f32[n], and `passes` gives the keys of the attempts trained on in each pass.
        """
        trained = {key for keys in passes for key in keys}
        good = {
            trajectory.key: _StoredAttempt(group=replace(group, trajectories=(trajectory,)), step=step)
            for group, own in zip(groups, advantages, strict=True)
            for trajectory, turns in zip(group.trajectories, own, strict=True)
            if trajectory.key in trained and sum(float(values.sum(dtype=np.float64)) for values in turns) > 0
        }
        for stored in self._taken:
            stored.used = stored.used + 1 if good.pop(stored.key, None) is not None else self._uses
        self._taken = []
        fresh = good.values()
        left = [stored for stored in self._kept if stored.used < self._uses]
        self._kept = [*left, *fresh][-self._size :] if self._size else []

    def metrics(self, step: int) -> dict[str, float]:
        """Return the buffer's metrics for a step, or none with `size` 0.

        They are replay_buffer/kept (number of attempts held), replay_buffer/again (number that the step drew) and, if
        it drew any, replay_buffer/age (their mean age in steps).
        """
        if not self._size:
            return {}
        ages = [step - stored.step for stored in self._taken]
        counts = {"replay_buffer/kept": float(len(self._kept)), "replay_buffer/again": float(len(ages))}
        return {**counts, **({"replay_buffer/age": float(np.mean(ages))} if ages else {})}

    def state(self) -> dict[str, Any]:
        """Return which attempts are held, as small JSON for a checkpoint."""
        return {"kept": [[stored.step, *stored.key, stored.used] for stored in self._kept]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load the attempts of a saved state from the record. Raises CheckpointError if one is missing."""
        saved = [(int(step), (str(group), int(attempt)), int(used)) for step, group, attempt, used in state["kept"]]
        played: dict[Key, Group] = {}
        for step in sorted({step for step, *_ in saved}):
            for entry in read_record(self._run, phase="train", step=step, label=""):
                for trajectory in entry.group.trajectories:
                    played[trajectory.key] = replace(entry.group, trajectories=(trajectory,))
        for step, key, _ in saved:
            if key not in played:
                raise CheckpointError(
                    f"the replay buffer holds attempt {key[1]} of {key[0]!r}, but the record of step {step} in "
                    f"{self._run / 'record'} does not; restore that record, or start the run again in another folder"
                )
        self._kept = [_StoredAttempt(group=played[key], step=step, used=used) for step, key, used in saved]


def without_baseline(scores: Sequence[Sequence[Score]]) -> list[list[Score]]:
    """Return the scores of replayed attempts with `in_baseline` set to False.

    They are then compared with the baseline of the attempts played now, without changing it.
    """
    return [[replace(score, in_baseline=False) for score in own] for own in scores]
