"""Rules for scoring episodes by their stop reason, set in the recipe because published systems disagree on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np

from turnstile.errors import ConfigError
from turnstile.lookup import nearest
from turnstile.rewards.compose import failure_score, sum_terms
from turnstile.types import Score, Stop, Trajectory

End = Literal["grade", "zero", "half", "mask", "drop"]
"""grade: as scored. zero: every reward is 0. half: positive rewards count half, negative ones whole (an end
must not become better by being halved). mask: out of the gradient, in the baseline. drop: out of both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRules:
    """The rules for episodes by stop reason.

    Episodes whose stop reason is not in `table` are graded. `Stop.ERROR` cannot be configured: it is an infrastructure
    failure.
    """

    table: Mapping[Stop, End] = field(default_factory=dict)

    @classmethod
    def read(cls, table: Mapping[str, str]) -> StopRules:
        """Return the rules in a recipe's section. Raises ConfigError for an unknown word, naming the nearest one."""
        known = [stop.value for stop in Stop if stop is not Stop.ERROR]
        result: dict[Stop, End] = {}
        for stop, end in table.items():
            if stop not in known:
                extra = "; infrastructure failures are always dropped" if stop == Stop.ERROR else ""
                raise ConfigError(f"on_stop: unknown end {stop!r}; {nearest(stop, known)}{extra}")
            match end:
                case "grade" | "zero" | "half" | "mask" | "drop":
                    result[Stop(stop)] = end
                case _:
                    raise ConfigError(f"on_stop.{stop}: unknown rule {end!r}; {nearest(end, get_args(End))}")
        return cls(table=result)

    def apply(self, score: Score, trajectory: Trajectory) -> Score:
        """Return the score after the rules, for which total = outcome + sum(turn) still holds.

        What a rule takes from a step term moves from `granted` to `withheld`, withheld by `on_stop.STOP`.
        """
        if trajectory.stop is Stop.ERROR:
            return failure_score(trajectory)
        if score.outcome is None:
            return score
        match self.table.get(trajectory.stop, "grade"):
            case "grade":
                return score
            case "mask":
                return replace(score, in_gradient=False)
            case "drop":
                return replace(score, in_gradient=False, in_baseline=False)
            case "zero":
                return _scale_rewards(score, 0.0, 0.0, f"on_stop.{trajectory.stop.value}")
            case "half":
                return _scale_rewards(score, 0.5, 1.0, f"on_stop.{trajectory.stop.value}")


def _scale_rewards(score: Score, positive: float, negative: float, end: str) -> Score:
    """Return a score with each reward multiplied by `positive` or `negative`, by its sign.

    The difference is withheld by `end`.
    """
    assert score.outcome is not None
    outcome = {agent: value * (positive if value > 0 else negative) for agent, value in score.outcome.items()}
    granted = {
        term: (steps * np.where(steps > 0, positive, negative)).astype(np.float32)
        for term, steps in score.granted.items()
    }
    withheld = {term: score.withheld[term] + (steps - granted[term]) for term, steps in score.granted.items()}
    taken = {
        term: (*score.withheld_by.get(term, ()), end)
        for term in granted
        if (granted[term] != score.granted[term]).any()
    }
    turn = sum_terms(granted, len(score.turn))
    total = sum(outcome.values()) + float(turn.sum(dtype=np.float64))
    return replace(
        score,
        outcome=outcome,
        turn=turn,
        total=total,
        granted=granted,
        withheld=withheld,
        withheld_by={**score.withheld_by, **taken},
    )
