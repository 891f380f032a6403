"""The types of rewards, terms and gates.

A *term* is one named reward at one level. Levels are priorities, and the outcome has the highest. A reward function is
pure: it reads only what was recorded (`Task`, `Trajectory`), so a run can be scored again from its record without a
sandbox.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from turnstile.errors import ConfigError
from turnstile.types import F32, Task, Trajectory

EpisodeReward = Callable[[Task, Trajectory], float | None]
"""A terminal reward; None if infrastructure failed."""

TurnReward = Callable[[Task, Trajectory], Sequence[float] | F32]
"""A reward for each of the K turns."""

Compare = Literal["gt", "ge"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Threshold:
    """The threshold that a term's value must pass for terms of lower levels to count."""

    value: float
    compare: Compare = "gt"

    def passes(self, reward: float) -> bool:
        return reward > self.value if self.compare == "gt" else reward >= self.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One named reward.

    Terms of a higher `level` gate those of lower levels. `scope` says whether `function` gives one number per episode
    or one per turn. A term whose `gate` is None withholds nothing.
    """

    name: str
    function: EpisodeReward | TurnReward
    scope: Literal["episode", "turn"]
    level: int
    weight: float = 1.0
    gate: Threshold | None = None

    def values(self, task: Task, trajectory: Trajectory) -> NDArray[np.float64] | None:
        """Return the reward before weighting, f64[1] for an episode term, f64[K] for a turn term.

        It is None if there is no verdict. A turn term judges only the turns that the environment answered; an
        unanswered turn gets 0. Raises ConfigError if the function returns anything else, or a number that is not
        finite.
        """
        judged = trajectory.without_open_turn if self.scope == "turn" else trajectory
        raw = self.function(task, judged)
        if raw is None:
            return None
        where = f"reward term {self.name!r}, task {task.id!r}, attempt {trajectory.attempt}"
        try:
            values = np.atleast_1d(np.asarray(raw, dtype=np.float64))
        except (TypeError, ValueError):
            raise ConfigError(f"{where}: gave {type(raw).__name__}, not a number or a number for each turn") from None
        expected = (1,) if self.scope == "episode" else (len(judged.turns),)
        if values.shape != expected or (self.scope == "turn" and np.ndim(raw) == 0):
            wanted = "one number" if self.scope == "episode" else f"{expected[0]} numbers, one for each turn"
            raise ConfigError(f"{where}: gave {values.size} numbers but scope {self.scope!r} wants {wanted}")
        if not np.isfinite(values).all():
            raise ConfigError(f"{where}: gave {raw!r}; a reward must be finite (None means: no verdict)")
        unanswered = len(trajectory.turns) - len(judged.turns)
        return np.concatenate([values, np.zeros(unanswered)]) if unanswered else values
