"""Alarms, which watch a run's metrics and report in one line when the run goes wrong.

Each alarm gets every step's metrics. It reports once when its condition begins, and again only after the condition has
ended. Its `state()` is part of the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from turnstile.errors import ConfigError, TrainingError
from turnstile.tracking.base import Scalars


@runtime_checkable
class Alarm(Protocol):
    """A rule that watches a run's metrics."""

    def update(self, step: int, metrics: Scalars) -> str | None:
        """Return a one-line message when the condition first becomes true, else None.

        A step without the metric returns None too.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Return the rule's state as JSON."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""


def numeric(metrics: Scalars, name: str) -> float | None:
    """Return a metric as a float, which may be NaN or infinite; None if it is missing or not a number."""
    value = metrics.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def slope(values: Sequence[float]) -> tuple[float, float]:
    """Return the least-squares slope per step of n >= 3 values, and its standard error."""
    y = np.asarray(values, dtype=np.float64)
    x = np.arange(len(y)) - (len(y) - 1) / 2
    spread = float((x * x).sum())
    estimate = float((x * y).sum()) / spread
    residual = y - y.mean() - estimate * x
    return estimate, math.sqrt(float((residual * residual).sum()) / (len(y) - 2) / spread)


class CollapseAlarm:
    """Reports reward collapse, when the total reward rises while the outcome falls.

    The policy then collects step rewards instead of solving the task, as with direct accumulation in arXiv 2508.10548.

    A least-squares line is fitted to each of the two series over the last `window` steps. The alarm is raised when the
    slope of reward/total is more than `z` of its standard errors above 0 and that of reward/outcome more than `z` of
    its own below 0. The message names the step term whose granted reward (reward/granted/TERM) rose most.

    window = 20 and z = 3 are tuned on simulated healthy runs of 200 steps with step-mean noise of .07 (outcome) and .05
    (step rewards), independent or with autocorrelation .3. The runs are flat, learning (both series rise), or have step
    rewards that rise by .6 and level off over a flat outcome. The last kind is the worst, with false alarms in 1.0 % of
    runs (0.3 % with independent noise); the others stay below 0.1 %. If the outcome falls by .005 / .01 a step while
    the step rewards rise by .02, the alarm reports within 60 steps in 84 % / 99 % of runs, with a median of step 31 /
    23. Step rewards that keep rising over a flat outcome do not count as healthy. tests/tracking/test_alarms.py runs
    this simulation.
    """

    def __init__(self, window: int = 20, z: float = 3.0) -> None:
        if window < 4 or z <= 0:
            raise ConfigError(f"collapse alarm: window must be at least 4 and z above 0, got {window} and {z}")
        self.window = window
        self.z = z
        self._steps: list[int] = []
        self._rows: list[dict[str, float]] = []
        self._raised = False

    def update(self, step: int, metrics: Scalars) -> str | None:
        names = ["reward/total", "reward/outcome", *(name for name in metrics if name.startswith("reward/granted/"))]
        row = {name: value for name in names if (value := numeric(metrics, name)) is not None and math.isfinite(value)}
        if "reward/total" not in row or "reward/outcome" not in row:
            return None
        self._steps = [*self._steps, step][-self.window :]
        self._rows = [*self._rows, row][-self.window :]
        if len(self._rows) < self.window:
            return None
        total, total_error = slope([row["reward/total"] for row in self._rows])
        outcome, outcome_error = slope([row["reward/outcome"] for row in self._rows])
        tiny = 1e-12  # exact lines have no standard error, and rounding must not count as a slope
        collapsing = total > self.z * total_error + tiny and outcome < -self.z * outcome_error - tiny
        begins, self._raised = collapsing and not self._raised, collapsing
        if not begins:
            return None
        return (
            f"collapse: over steps {self._steps[0]}-{self._steps[-1]} the total reward rose by {total:.3g} "
            f"(+-{total_error:.1g}) a step while the outcome fell by {-outcome:.3g} (+-{outcome_error:.1g}); "
            f"{self._driver()}"
        )

    def _driver(self) -> str:
        """Return a phrase that names the step term that rose most, with advice."""
        terms = {name for row in self._rows for name in row if name.startswith("reward/granted/")}
        rises = {name: slope([row.get(name, 0.0) for row in self._rows])[0] for name in sorted(terms)}
        if not rises:
            return "gate the step rewards behind the outcome, or lower their weights"
        worst = max(rises, key=lambda name: rises[name])
        term = worst.removeprefix("reward/granted/")
        return f"the step reward {term!r} drives it ({rises[worst]:+.3g} a step): gate it or lower its weight"

    def state(self) -> dict[str, Any]:
        return {"steps": list(self._steps), "rows": [dict(row) for row in self._rows], "raised": self._raised}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._steps = list(state["steps"])
        self._rows = [dict(row) for row in state["rows"]]
        self._raised = bool(state["raised"])


class EntropyAlarm:
    """Reports entropy collapse, when the mean entropy of the last `window` steps falls below a share of its start.

    The share is `fraction`, and the start is the mean over the run's first `window` steps. `metric` is the mean token
    entropy in nats.
    """

    def __init__(self, fraction: float = 0.2, window: int = 5, metric: str = "policy/entropy") -> None:
        if not 0 < fraction < 1 or window < 1:
            raise ConfigError(f"entropy alarm: 0 < fraction < 1 and window >= 1, got {fraction} and {window}")
        self.fraction = fraction
        self.window = window
        self.metric = metric
        self._first: list[float] = []
        self._last: list[float] = []
        self._raised = False

    def update(self, step: int, metrics: Scalars) -> str | None:
        value = numeric(metrics, self.metric)
        if value is None or not math.isfinite(value):
            return None
        if len(self._first) < self.window:
            self._first.append(value)
            return None
        self._last = [*self._last, value][-self.window :]
        start, now = float(np.mean(self._first)), float(np.mean(self._last))
        low = len(self._last) == self.window and now < self.fraction * start
        begins, self._raised = low and not self._raised, low
        if not begins:
            return None
        return (
            f"entropy: {now:.3g} nats a token at step {step}, {now / start:.0%} of the first {self.window} steps' "
            f"{start:.3g}; the policy hardly explores: lower the learning rate or raise the temperature"
        )

    def state(self) -> dict[str, Any]:
        return {"first": list(self._first), "last": list(self._last), "raised": self._raised}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._first = list(state["first"])
        self._last = list(state["last"])
        self._raised = bool(state["raised"])


class RatioAlarm:
    """Reports that the policy moved too far from the one that sampled.

    It is raised when a step's mean ratio (`metric`) is outside [1/limit, limit], or its mean k3 estimate of
    KL(behaviour || policy) (`kl_metric`, nats per token) is above `kl_limit`. These are near 1 and 0 while sampler and
    trainer agree and updates are small.
    """

    def __init__(
        self,
        limit: float = 2.0,
        kl_limit: float = 0.5,
        metric: str = "loss/ratio",
        kl_metric: str = "loss/kl_behaviour",
    ) -> None:
        if limit <= 1 or kl_limit <= 0:
            raise ConfigError(f"ratio alarm: limit must be above 1 and kl_limit above 0, got {limit} and {kl_limit}")
        self.limit = limit
        self.kl_limit = kl_limit
        self.metric = metric
        self.kl_metric = kl_metric
        self._raised = False

    def update(self, step: int, metrics: Scalars) -> str | None:
        ratio, divergence = numeric(metrics, self.metric), numeric(metrics, self.kl_metric)
        if ratio is None and divergence is None:
            return None
        # the comparisons are written so that NaN counts as too far
        ratio_fine = ratio is None or 1 / self.limit <= ratio <= self.limit
        divergence_fine = divergence is None or divergence <= self.kl_limit
        exploded = not (ratio_fine and divergence_fine)
        begins, self._raised = exploded and not self._raised, exploded
        if not begins:
            return None
        what = (
            f"mean ratio {ratio:.3g}" if not ratio_fine else f"KL to the sampling policy {divergence:.3g} nats a token"
        )
        return (
            f"ratio: {what} at step {step}; the update has left the policy that sampled: lower the learning rate, "
            "take fewer passes over a step, or check that engine and trainer agree"
        )

    def state(self) -> dict[str, Any]:
        return {"raised": self._raised}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._raised = bool(state["raised"])


class GapAlarm:
    """Reports that sampler and trainer disagree on the same weights.

    It is raised when their log-probabilities under one version of the weights differ by more than `limit` nats per
    token, for example because a server did not load all of the weights. Kernels and 16-bit numbers cause a gap of a few
    hundredths.
    """

    def __init__(self, limit: float = 0.1) -> None:
        if limit <= 0:
            raise ConfigError(f"gap alarm: limit must be above 0, got {limit}")
        self.limit = limit
        self._raised = False

    def update(self, step: int, metrics: Scalars) -> str | None:
        gap, behind = numeric(metrics, "policy/logprob_gap"), numeric(metrics, "staleness/max")
        if gap is None or behind:  # older weights explain a gap
            return None
        wide = not gap <= self.limit  # true for NaN
        begins, self._raised = wide and not self._raised, wide
        if not begins:
            return None
        return (
            f"gap: at step {step} sampler and trainer are {gap:.3g} nats a token apart on the same weights; check that "
            "a server has the model, the dtype and the sampling that are trained"
        )

    def state(self) -> dict[str, Any]:
        return {"raised": self._raised}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._raised = bool(state["raised"])


class GradientAlarm:
    """Reports each step whose gradient norm (`metric`) is NaN or infinite; the trainer skips that update.

    At the `limit`-th such step in a row it raises TrainingError.
    """

    def __init__(self, limit: int = 3, metric: str = "optim/grad_norm") -> None:
        if limit < 1:
            raise ConfigError(f"gradient alarm: limit must be at least 1, got {limit}")
        self.limit = limit
        self.metric = metric
        self.in_a_row = 0
        self.in_all = 0

    def update(self, step: int, metrics: Scalars) -> str | None:
        norm = numeric(metrics, self.metric)
        if norm is None:
            return None
        if math.isfinite(norm):
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        self.in_all += 1
        if self.in_a_row >= self.limit:
            raise TrainingError(
                f"the gradient was not finite {self.in_a_row} steps in a row, last at step {step}; resume from the "
                "last checkpoint with a lower learning rate, or in a wider dtype"
            )
        return (
            f"gradient: norm {norm} at step {step}, update skipped ({self.in_a_row} in a row, {self.in_all} in all; "
            f"the run stops at {self.limit} in a row)"
        )

    def state(self) -> dict[str, Any]:
        return {"in_a_row": self.in_a_row, "in_all": self.in_all}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.in_a_row = int(state["in_a_row"])
        self.in_all = int(state["in_all"])


class KilledAlarm:
    """Reports that graders were killed by SIGKILL in more than `share` of the attempts of the last `window` steps.

    Such attempts end without a verdict and are not trained on, so a policy pays nothing for code that kills itself
    where it would fail. A machine that is short of memory looks the same.
    """

    def __init__(self, share: float = 0.05, window: int = 5) -> None:
        if not 0 < share < 1 or window < 1:
            raise ConfigError(f"killed alarm: 0 < share < 1 and window >= 1, got {share} and {window}")
        self.share = share
        self.window = window
        self._counts: list[tuple[float, float]] = []  # killed and all attempts of a step
        self._raised = False

    def update(self, step: int, metrics: Scalars) -> str | None:
        killed, attempts = numeric(metrics, "count/judge_killed"), numeric(metrics, "count/trajectories")
        if killed is None or attempts is None:
            return None
        self._counts = [*self._counts, (killed, attempts)][-self.window :]
        killed, attempts = (sum(column) for column in zip(*self._counts, strict=True))
        raised = len(self._counts) == self.window and killed > self.share * attempts
        begins, self._raised = raised and not self._raised, raised
        if not begins:
            return None
        return (
            f"killed: the grader of {killed:.0f} of {attempts:.0f} attempts of the last {self.window} steps got "
            "SIGKILL; look at the attempts that ended in error (turnstile rollout list RUN), or add memory"
        )

    def state(self) -> dict[str, Any]:
        return {"counts": [list(pair) for pair in self._counts], "raised": self._raised}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._counts = [(float(killed), float(attempts)) for killed, attempts in state["counts"]]
        self._raised = bool(state["raised"])


class ZeroAdvantageAlarm:
    """Reports that no group had a gradient for `limit` steps in a row (groups/zero_advantage equals groups/total).

    All attempts at a task then get the same score, so nothing is learned from comparing them.
    """

    def __init__(self, limit: int = 5) -> None:
        if limit < 1:
            raise ConfigError(f"flat alarm: limit must be at least 1, got {limit}")
        self.limit = limit
        self._in_a_row = 0

    def update(self, step: int, metrics: Scalars) -> str | None:
        flat, groups = numeric(metrics, "groups/zero_advantage"), numeric(metrics, "groups/total")
        if flat is None or groups is None:
            return None
        self._in_a_row = self._in_a_row + 1 if groups and flat == groups else 0
        if self._in_a_row != self.limit:
            return None
        return (
            f"flat: no group has had a gradient for {self.limit} steps, last at step {step}: all attempts at a task "
            "get the same score; use tasks that are sometimes solved, more attempts (rollout.group_size), a warm "
            "start, or rewards that differ between attempts"
        )

    def state(self) -> dict[str, Any]:
        return {"in_a_row": self._in_a_row}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._in_a_row = int(state["in_a_row"])


def standard_alarms() -> dict[str, Alarm]:
    """Return one alarm of each kind, keyed by its name in a checkpoint."""
    return {
        "collapse": CollapseAlarm(),
        "entropy": EntropyAlarm(),
        "ratio": RatioAlarm(),
        "gradient": GradientAlarm(),
        "killed": KilledAlarm(),
        "gap": GapAlarm(),
        "flat": ZeroAdvantageAlarm(),
    }
