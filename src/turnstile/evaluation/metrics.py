"""Rates computed from episodes, with intervals clustered by task, paired differences and pass@k.

Every estimate gives each task the same weight: first the mean over a task's episodes, then the mean over tasks.
Episodes in which infrastructure failed (outcome None) are excluded everywhere and counted by `errors`. Intervals are
percentile bootstraps that resample whole tasks, so several samples or several training seeds of one task stay together;
they describe the variation over new tasks for these policies, not over new training seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import comb, isfinite, isnan, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnstile.types import Group, Score

F64 = NDArray[np.float64]
NUMBERS = ("outcome", "total", "turns")
"""Numbers that every result has. Any other value that can be averaged is one of the environment's rates."""

LEVEL = 0.95
RESAMPLES = 10_000
_CHUNK = 1 << 21  # indices drawn at once, to bound memory


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeResult:
    """The result of one evaluation episode.

    `rates` says which of the environment's rates (`envs.base.Env`) it reached, as logged in training. `kind` and
    `package` come from the task's data ("" if missing). `outcome` and `total` are None if infrastructure failed.
    """

    task_id: str
    sample: int
    rates: Mapping[str, bool] = field(default_factory=dict)
    kind: str = ""
    package: str = ""
    turns: int = 0
    stop: str = ""
    outcome: float | None = None
    total: float | None = None

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> EpisodeResult:
        """Return the result in a line of evaluations/NAME.jsonl. Older lines have the rates beside the other fields."""
        own = {each.name for each in fields(cls)}
        beside = {name: value for name, value in row.items() if name not in own and name != "changed"}
        return cls(**{"rates": beside} | {name: value for name, value in row.items() if name in own})

    def value(self, name: str) -> float:
        """Return the value of a number, or 1 or 0 for a rate; NaN if the episode has no such value."""
        found = self.rates.get(name) if name not in NUMBERS else getattr(self, name)
        return nan if found is None else float(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean over tasks and its confidence interval. All are NaN without tasks."""

    mean: float
    low: float
    high: float
    n_tasks: int
    n_episodes: int

    @property
    def excludes_zero(self) -> bool:
        return self.low > 1e-12 or self.high < -1e-12  # thirds do not add up to exact zeros


def from_group(group: Group, scores: Sequence[Score]) -> list[EpisodeResult]:
    """Return one result for each trajectory."""
    data = group.task.data
    return [
        EpisodeResult(
            task_id=group.task.id,
            sample=trajectory.attempt,
            rates=dict(trajectory.rates),
            kind=str(data.get("kind", "")),
            package=str(data.get("package", "")),
            turns=len(trajectory.turns),
            stop=str(trajectory.stop),
            outcome=None if score.outcome is None else score.outcome_of(),
            total=None if score.outcome is None else float(score.total),
        )
        for trajectory, score in zip(group.trajectories, scores, strict=True)
    ]


def with_verdict(results: Iterable[EpisodeResult]) -> list[EpisodeResult]:
    """Return the episodes with a verdict, which are those that count."""
    return [result for result in results if result.outcome is not None]


def compared_rates(results: Iterable[EpisodeResult]) -> tuple[str, ...]:
    """Return the names of the rates that the episodes have, in order, or ("outcome",) if none has any.

    A gain is measured in the last of these.
    """
    return tuple(dict.fromkeys(name for result in with_verdict(results) for name in result.rates)) or ("outcome",)


def errors(results: Iterable[EpisodeResult]) -> int:
    """Return the number of episodes in which infrastructure failed."""
    return sum(result.outcome is None for result in results)


def rate(
    results: Sequence[EpisodeResult],
    name: str = "resolution",
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Return the mean over tasks of a rate or a number, with a bootstrap interval clustered by task."""
    tasks = by_task(results, name)
    values = np.array([np.mean(samples) for samples in tasks.values()], dtype=np.float64)
    episodes = sum(len(samples) for samples in tasks.values())
    return interval_of(values, episodes, _bounds(name), level, resamples, seed)


def paired_difference(
    before: Sequence[EpisodeResult],
    after: Sequence[EpisodeResult],
    name: str = "resolution",
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Return the mean of (after - before) over the tasks that both have, with a bootstrap interval over tasks.

    Either side may contain the results of several seeds; all of a task's episodes are averaged first.
    """
    pairs = paired_values(before, after, name)
    values = np.array([difference for difference, _ in pairs.values()], dtype=np.float64)
    episodes = sum(count for _, count in pairs.values())
    low, high = _bounds(name)
    return interval_of(values, episodes, (low - high, high - low), level, resamples, seed)


def pass_at_k(
    results: Sequence[EpisodeResult],
    k: int,
    name: str = "resolution",
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Return pass@k, the mean over tasks of 1 - C(n-c, k) / C(n, k) (arXiv 2107.03374).

    It is the probability that at least one of k samples succeeds. n is a task's number of samples and c how many
    succeeded, so the estimate is unbiased for every n >= k. Tasks with fewer than k samples are left out (`n_tasks`
    says how many were used). Raises ValueError if k < 1.
    """
    if k < 1:
        raise ValueError(f"pass@k needs k >= 1, got {k}")
    tasks = by_task(results, name)
    enough = [samples for samples in tasks.values() if len(samples) >= k]
    values = [1.0 - comb(len(s) - round(sum(s)), k) / comb(len(s), k) for s in enough]
    return interval_of(np.array(values, dtype=np.float64), sum(map(len, enough)), (0.0, 1.0), level, resamples, seed)


def max_samples(results: Sequence[EpisodeResult]) -> int:
    """Return the largest number of counted episodes of any task, or 0 without any."""
    return max((len(samples) for samples in by_task(results, "turns").values()), default=0)


def by_task(results: Sequence[EpisodeResult], name: str) -> dict[str, list[float]]:
    """Return the values of the counted episodes that have one, by task in order of first appearance."""
    tasks: dict[str, list[float]] = {}
    for result in with_verdict(results):
        if not isnan(value := result.value(name)):
            tasks.setdefault(result.task_id, []).append(value)
    return tasks


def paired_values(
    before: Sequence[EpisodeResult], after: Sequence[EpisodeResult], name: str
) -> dict[str, tuple[float, int]]:
    """Return (difference of the means, number of episodes) for each task that both sides have."""
    old, new = by_task(before, name), by_task(after, name)
    return {
        task: (float(np.mean(new[task]) - np.mean(old[task])), len(old[task]) + len(new[task]))
        for task in old
        if task in new
    }


def _bounds(name: str) -> tuple[float, float]:
    """Return the smallest and the largest value that a rate or a number can have."""
    return (-np.inf, np.inf) if name in NUMBERS else (0.0, 1.0)


def to_metrics(results: Sequence[EpisodeResult], prefix: str = "eval/") -> dict[str, float]:
    """Return the metrics to log for an evaluation, under the names used in training after `prefix`.

    The ends of each rate's interval have the suffixes `_low` and `_high`. Metrics that no episode has are left out.
    """
    logged = {f"rate/{name}": rate(results, name) for name in compared_rates(results) if name not in NUMBERS}
    found = {f"{prefix}count/errors": float(errors(results)), f"{prefix}count/trajectories": float(len(results))}
    for name, part in logged.items():
        found |= {f"{prefix}{name}": part.mean, f"{prefix}{name}_low": part.low, f"{prefix}{name}_high": part.high}
    found[f"{prefix}turns"] = rate(results, "turns").mean
    found[f"{prefix}reward/outcome"] = rate(results, "outcome").mean
    found[f"{prefix}reward/total"] = rate(results, "total").mean
    return {name: value for name, value in found.items() if not isnan(value)}


def interval_of(
    values: F64, episodes: int, bounds: tuple[float, float], level: float, resamples: int, seed: int
) -> Interval:
    """Return the mean of one value per task, f64[n_tasks], with its percentile bootstrap interval.

    If all tasks agree (0 of 48, or 48 of 48), resampling has nothing to vary and would claim certainty. The interval
    then uses the exact binomial bound on unseen tasks: with confidence 1 - (1 - level) / 2, at most a share u = 1 - ((1
    - level) / 2)^(1 / n) of all tasks differs, by no more than the bounds allow.
    """
    n = len(values)
    if n == 0:
        return Interval(mean=nan, low=nan, high=nan, n_tasks=0, n_episodes=0)
    mean, tail = float(values.mean()), (1.0 - level) / 2.0
    if np.ptp(values) == 0.0:
        unseen = 1.0 - tail ** (1.0 / n)
        low, high = (mean + (bound - mean) * unseen if isfinite(bound) else mean for bound in bounds)
        return Interval(mean=mean, low=low, high=high, n_tasks=n, n_episodes=episodes)
    generator = np.random.default_rng(seed)
    rows = max(1, _CHUNK // n)
    means = np.concatenate(
        [
            values[generator.integers(n, size=(min(rows, resamples - start), n))].mean(axis=1)
            for start in range(0, resamples, rows)
        ]
    )
    low, high = np.quantile(means, (tail, 1.0 - tail))
    return Interval(mean=mean, low=float(low), high=float(high), n_tasks=n, n_episodes=episodes)
