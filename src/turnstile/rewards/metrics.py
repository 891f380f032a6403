"""The metrics of a step's episodes: rates, stop reasons, gates, and rewards granted and withheld."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from turnstile.errors import VerifierKilledError
from turnstile.types import F32, Group, Score, Stop, Trajectory


def killed(trajectory: Trajectory) -> bool:
    """Return whether an attempt has no verdict because the process that judged it got SIGKILL."""
    return (trajectory.error or "").startswith(VerifierKilledError.__name__)


def step_metrics(groups: Sequence[Group], scores: Sequence[Sequence[Score]]) -> dict[str, float]:
    """Return a step's metrics. Means are over trajectories with a verdict; infrastructure failures are only counted.

    The metrics are rate/NAME (the environment's rates, `Trajectory.rates`), stop/STOP (share of all trajectories),
    reward/outcome, reward/total, reward/step_granted, reward/step_withheld (means of sums over turns),
    reward/granted/TERM, reward/withheld/TERM, reward/withheld_by/GATE (what that gate withheld, alone or with others),
    gate/TERM (share open), count/trajectories, count/errors, count/judge_killed (errors in which the judging process
    got SIGKILL, which the judged code can cause), and turns (mean). Means over nothing are left out.
    """
    pairs = [
        (trajectory, score)
        for group, group_scores in zip(groups, scores, strict=True)
        for trajectory, score in zip(group.trajectories, group_scores, strict=True)
    ]
    graded = [(trajectory, score) for trajectory, score in pairs if score.outcome is not None]
    result = {"count/trajectories": float(len(pairs)), "count/errors": float(len(pairs) - len(graded))}
    result["count/judge_killed"] = float(sum(killed(trajectory) for trajectory, _ in pairs))
    for stop in Stop:
        result[f"stop/{stop.value}"] = _mean(trajectory.stop is stop for trajectory, _ in pairs)
    if not graded:
        return {name: value for name, value in result.items() if not np.isnan(value)}
    for name in dict.fromkeys(name for trajectory, _ in graded for name in trajectory.rates):
        result[f"rate/{name}"] = _mean(trajectory.rates.get(name, False) for trajectory, _ in graded)
    result["turns"] = _mean(len(trajectory.turns) for trajectory, _ in graded)
    result["reward/outcome"] = _mean(sum((score.outcome or {}).values()) for _, score in graded)
    result["reward/total"] = _mean(score.total for _, score in graded)
    result["reward/step_granted"] = _mean(_sum(score.granted) for _, score in graded)
    result["reward/step_withheld"] = _mean(_sum(score.withheld) for _, score in graded)
    for term in sorted({term for _, score in graded for term in score.granted}):
        result[f"reward/granted/{term}"] = _mean(_sum(score.granted, term) for _, score in graded)
        result[f"reward/withheld/{term}"] = _mean(_sum(score.withheld, term) for _, score in graded)
    for gate in sorted(
        {gate for _, score in graded for by in (score.gates, *score.withheld_by.values()) for gate in by}
    ):
        result[f"reward/withheld_by/{gate}"] = _mean(
            sum(_sum(score.withheld, term) for term, by in score.withheld_by.items() if gate in by)
            for _, score in graded
        )
    for gate in sorted({gate for _, score in graded for gate in score.gates}):
        result[f"gate/{gate}"] = _mean(score.gates[gate] for _, score in graded if gate in score.gates)
    return result


def _sum(by_term: Mapping[str, F32], term: str | None = None) -> float:
    return float(sum(values.sum(dtype=np.float64) for name, values in by_term.items() if term in (None, name)))


def _mean(values: Iterable[float]) -> float:
    numbers = [float(value) for value in values]
    return float(np.mean(numbers)) if numbers else float("nan")
