"""How good was it: the shapes of rewards, gates and their composition.

A *term* is one named reward at one level. Levels are priorities: the outcome stands at the highest. A reward
function is pure: it reads what was recorded (`Task`, `Trajectory`) and nothing else, so a run can be scored
again from its record without a sandbox.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from turnstile.types import F32, Task, Trajectory

EpisodeReward = Callable[[Task, Trajectory], float | None]
"""A terminal reward; None where infrastructure failed."""

TurnReward = Callable[[Task, Trajectory], Sequence[float] | F32]
"""A reward for each of the K turns."""

Compare = Literal["gt", "ge"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Threshold:
    """What a term's value must pass for the levels below it to count."""

    value: float
    compare: Compare = "gt"

    def passes(self, reward: float) -> bool:
        return reward > self.value if self.compare == "gt" else reward >= self.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One named reward. `level`: higher gates lower. `scope` says whether `function` gives one number per
    episode or one per turn. `gate` None means that this term holds nothing back."""

    name: str
    function: EpisodeReward | TurnReward
    scope: Literal["episode", "turn"]
    level: int
    weight: float = 1.0
    gate: Threshold | None = None

    def values(self, task: Task, trajectory: Trajectory) -> F32 | None:
        """The weighted reward: f32[1] for an episode term, f32[K] for a turn term; None without a verdict."""
        raw = self.function(task, trajectory)
        if raw is None:
            return None
        return np.asarray(raw, dtype=np.float32).reshape(-1) * np.float32(self.weight)
