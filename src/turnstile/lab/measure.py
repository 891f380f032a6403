"""Measurement of one estimator on one world: its mean gradient compared with the exact one, and its noise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from turnstile.credit.base import Estimator, estimate
from turnstile.lab.controls import Adjusted, Controls, controls
from turnstile.lab.judge import Figures, judge
from turnstile.lab.play import Drawn, Player, branch_paths, deal, draw_paths
from turnstile.lab.world import F64, I64, Truth, World, truth
from turnstile.types import Score

MOST_GROUPS = 4096
"""All possible groups are enumerated if there are at most this many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """An estimator with its knobs. `broken` maps the number of each invariant that it breaks to a counterexample."""

    name: str
    estimator: Estimator
    knobs: Mapping[str, Any] = field(default_factory=dict)
    broken: Mapping[int, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return label(self.name, self.knobs)

    @property
    def bound(self) -> Estimator:
        """The estimator with its knobs bound."""
        return functools.partial(self.estimator, **self.knobs)


def label(name: str, knobs: Mapping[str, Any]) -> str:
    """Return a name with its knobs, such as "grpo (scale=none)"."""
    shown = ", ".join(f"{knob}={value}" for knob, value in knobs.items())
    return f"{name} ({shown})" if shown else name


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """A world under one policy, with the same samples for all estimators."""

    world: World
    pi: F64  # [D]
    true: Truth
    player: Player
    size: int  # G
    branched: bool  # half of a group's attempts branch from the others
    drawn: Drawn
    controls: Controls


def make_bench(
    world: World,
    theta: F64,
    *,
    size: int = 8,
    groups: int = 512,
    seed: int = 0,
    branched: bool = False,
    scores: Sequence[Score] | None = None,
) -> Bench:
    """Return a bench with about `groups` groups of `size` attempts.

    Each step has two groups, or one of each task if there are more tasks. `scores` [P] replaces the paths' own outcomes
    and step rewards, which still define the exact gradient.
    """
    pi = world.policy(theta)
    true = truth(world, pi)
    player = Player(world, pi, scores)
    per_step = max(2, len(world.process.starts))
    rng = np.random.default_rng([seed, size])
    steps = max(2, groups // per_step)
    if branched:
        drawn_paths, parents = branch_paths(world, true.probabilities, rng, steps, per_step, size)
        drawn = deal(player, drawn_paths, parents=parents)
    else:
        drawn = deal(player, draw_paths(world, true.probabilities, rng, steps, per_step, size))
    return Bench(
        world=world,
        pi=pi,
        true=true,
        player=player,
        size=size,
        branched=branched,
        drawn=drawn,
        controls=controls(drawn, true, independent=not branched),
    )


def credit(subject: Subject, drawn: Drawn) -> tuple[F64, bool]:
    """Return the advantages of all tokens in order, f64[tokens], and whether the estimator keeps state."""
    state: Mapping[str, Any] = {}
    parts: list[Any] = []
    for n, (groups, scores) in enumerate(zip(drawn.steps, drawn.scores, strict=True)):
        given, state = estimate(subject.bound, groups, scores, drawn.aux(n), state)
        parts += [values for turns in given for values in turns]
    return np.concatenate(parts).astype(np.float64), bool(state)


def measure(subject: Subject, bench: Bench, *, exact: bool | None = None) -> Figures:
    """Return the figures of `subject` on `bench`.

    With `exact`, all outcomes of a group are enumerated instead of sampled. This is the default if there are at most
    4,096 of them, attempts do not branch, and the estimator treats groups separately and keeps no state. Raises
    TurnstileError if it needs something that the lab does not have.
    """
    values, remembers = credit(subject, bench.drawn)
    if exact is None:
        alone = 3 not in subject.broken and not remembers and not bench.branched
        exact = alone and outcomes(bench) <= MOST_GROUPS
    if exact:
        mean, noise = enumerate_gradient(lambda drawn: credit(subject, drawn)[0], bench)
        found = Adjusted(mean=mean, covariance=np.zeros((len(mean), len(mean))))
    else:
        gradients = bench.drawn.gradients(values)
        found = bench.controls.mean(gradients)
        noise = float(gradients.var(axis=0, ddof=1).sum()) * bench.drawn.paths[0].size
    return judge(found, noise, bench.true, exact=exact)


def outcomes(bench: Bench) -> int:
    """Return the number of possible groups, summed over tasks."""
    return int(sum(count**bench.size for count in np.bincount(bench.world.task).tolist()))


def enumerate_gradient(advantages: Callable[[Drawn], F64], bench: Bench) -> tuple[F64, float]:
    """Return the exact mean of the gradient, f64[D], and its noise for one episode.

    The noise is the trace of a group's gradient covariance, times the number of episodes in a group.
    """
    tasks = len(bench.player.tasks)
    mean, second = np.zeros(bench.world.parameters), 0.0
    for task in range(tasks):
        own = np.flatnonzero(bench.world.task == task)
        places = np.indices((len(own),) * bench.size).reshape(bench.size, -1).T
        paths: I64 = own[places][:, None, :]
        chance = bench.true.probabilities[paths[:, 0]].prod(axis=1)
        drawn = deal(bench.player, paths)
        gradients = drawn.gradients(advantages(drawn))
        of_task = chance @ gradients
        mean += of_task / tasks
        second += float(chance @ np.square(gradients - of_task).sum(axis=1)) / tasks
    return mean, second * bench.size
