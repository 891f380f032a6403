"""Learning curves on the lab's worlds: policies learn from sampled groups with Adam, and are evaluated exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from turnstile.credit.base import estimate
from turnstile.errors import TurnstileError
from turnstile.lab.measure import Subject
from turnstile.lab.play import Player, deal, draw_paths, plain_score
from turnstile.lab.world import F64, World, truth
from turnstile.types import Score

_T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}
"""Student's t for a two-sided 95 % interval, by the number of seeds."""


RATES = (0.1, 0.3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Length and rate of learning. Each step has `groups` groups (at least one of each task) of `size` attempts."""

    steps: int = 60
    groups: int = 2
    size: int = 4
    rate: float = 0.1  # Adam's


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Exact expectations of reward and outcome before the first step and after each step, f64[steps + 1].

    With several agents, both are the mean outcome of a seat that plays the learned policy against the initial one.
    """

    total: F64
    outcome: F64

    @property
    def area(self) -> float:
        """The mean gain in reward over all steps."""
        return float(self.total[1:].mean() - self.total[0])


Direction = Callable[[World, F64, np.random.Generator], F64]
"""(world, pi f64[D], rng) -> the gradient of one step, f64[D]."""


def learn(world: World, direction: Direction, plan: Plan, *, seed: int, scores: Sequence[Score] | None = None) -> Curve:
    """Return the curve of gradient ascent with Adam from the uniform policy.

    `scores` [P] are the rewards of the paths, by default their own outcome and step rewards.
    """
    rng = np.random.default_rng([seed, plan.size, 23])
    theta = np.zeros(world.parameters)
    first, second = np.zeros_like(theta), np.zeros_like(theta)
    begin = world.policy(theta)
    gain = _gains(world, scores)
    found = [gain(begin, begin)]
    for step in range(1, plan.steps + 1):
        gradient = direction(world, world.policy(theta), rng)
        first = 0.9 * first + 0.1 * gradient
        second = 0.99 * second + 0.01 * np.square(gradient)
        ahead = first / (1 - 0.9**step)
        theta = theta + plan.rate * ahead / (np.sqrt(second / (1 - 0.99**step)) + 1e-8)
        found.append(gain(world.policy(theta), begin))
    totals, outcomes = zip(*found, strict=True)
    return Curve(total=np.array(totals), outcome=np.array(outcomes))


def exact(world: World, pi: F64, rng: np.random.Generator) -> F64:
    """Return the exact gradient, f64[D], as a `Direction` that samples nothing."""
    return truth(world, pi).gradient


def sampled(subject: Subject, plan: Plan, scores: Sequence[Score] | None = None) -> Direction:
    """Return a direction: the gradient of `subject` on freshly sampled groups.

    The estimator's state is kept from step to step.
    """
    state: Mapping[str, Any] = {}
    known = list(scores or [])

    def direction(world: World, pi: F64, rng: np.random.Generator) -> F64:
        nonlocal state, known
        known = known or [plain_score(world, p) for p in range(len(world.paths))]
        player = Player(world, pi, known)
        groups = max(plan.groups, len(world.process.starts))
        drawn = deal(player, draw_paths(world, world.probabilities(pi), rng, 1, groups, plan.size))
        given, state = estimate(subject.bound, drawn.steps[0], drawn.scores[0], drawn.aux(0), state)
        values = np.concatenate([each for turns in given for each in turns]).astype(np.float64)
        result: F64 = drawn.gradients(values)[0]
        return result

    return direction


def _gains(world: World, scores: Sequence[Score] | None) -> Callable[[F64, F64], tuple[float, float]]:
    """Return a function (policy, initial policy) -> (expected reward, expected outcome), both exact."""
    made = scores or [plain_score(world, p) for p in range(len(world.paths))]
    total = np.array([score.total for score in made])
    outcome = np.array([sum(path.outcome.values()) for path in world.paths])
    share = 1 / len(world.process.starts)

    def alone(pi: F64, begin: F64) -> tuple[float, float]:
        p = world.probabilities(pi) * share
        return float(p @ total), float(p @ outcome)

    def against(pi: F64, begin: F64) -> tuple[float, float]:
        results = [share * float(world.mix_probabilities(pi, begin, seat) @ own[seat]) for seat in world.seats]
        return float(np.mean(results)), float(np.mean(results))

    own = {seat: np.array([path.outcome.get(seat, 0.0) for path in world.paths]) for seat in world.seats}
    return alone if len(world.seats) == 1 else against


@dataclass(frozen=True, kw_only=True, slots=True)
class Race:
    """The curves of one estimator on one world at the best rate tried, relative to that of the exact gradient."""

    estimator: str
    process: str
    rate: float
    areas: tuple[float, ...]
    exact: float  # the exact gradient's area, at its own best rate
    curve: tuple[float, ...] = ()  # the mean reward over seeds, by step
    refused: str = ""

    @property
    def share(self) -> float:
        """The mean area relative to that of the exact gradient; 1 means learning as quickly."""
        return float(np.mean(self.areas)) / self.exact if self.areas else math.nan

    def to_json(self) -> Any:
        """Return a JSON-serialisable dictionary; its rate is None if the race was refused."""
        return {**asdict(self), "rate": None if self.refused else self.rate}

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the mean share over seeds, by Student's t."""
        half = half_width(self.areas) / self.exact
        return self.share - half, self.share + half


def half_width(values: Sequence[float]) -> float:
    """Return half the width of the 95 % interval of a mean, by Student's t; NaN for fewer than two values."""
    n = len(values)
    return _T95.get(n, 2.0) * float(np.std(values, ddof=1)) / math.sqrt(n) if n > 1 else math.nan


def race_of(body: Any) -> Race:
    """Return the race that `Race.to_json` turned into `body`."""
    rate = math.nan if body["rate"] is None else body["rate"]
    return Race(**{**body, "rate": rate, "areas": tuple(body["areas"]), "curve": tuple(body["curve"])})


def race(
    subjects: Sequence[Subject],
    worlds: Sequence[World],
    plan: Plan,
    *,
    seeds: int = 5,
    rates: Sequence[float] = RATES,
    done: Callable[[Race], None] = lambda race: None,
) -> list[Race]:
    """Return one race per world and subject: learning curves with every seed, at the rate with the largest mean area.

    `done` is called with each race as soon as it is over.
    """
    found = []
    for world in worlds:
        best = max(learn(world, exact, replace(plan, rate=rate), seed=0).area for rate in rates)
        for each in subjects:
            runs: dict[float, list[Curve]] = {}
            refused = ""
            try:
                for rate in rates:
                    of = replace(plan, rate=rate)
                    runs[rate] = [learn(world, sampled(each, of), of, seed=seed) for seed in range(seeds)]
            except TurnstileError as error:
                refused, runs = str(error), {}
            rate = max(runs, key=lambda rate: sum(curve.area for curve in runs[rate]), default=math.nan)
            curves = runs.get(rate, [])
            found.append(
                Race(
                    estimator=each.label,
                    process=world.process.name,
                    rate=rate,
                    areas=tuple(curve.area for curve in curves),
                    exact=best,
                    curve=tuple(np.mean([each.total for each in curves], axis=0).round(4).tolist()) if curves else (),
                    refused=refused,
                )
            )
            done(found[-1])
    return found
