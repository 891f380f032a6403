"""Potential-based shaping on enumerated worlds, plain or gated: its effect on the best policy and the gradient.

The reward `potential` adds gamma Phi(s') - Phi(s) to every turn. Over a whole episode this adds up to -Phi(s_0)
whatever the actions, so it changes neither the gradient of the expected return nor the best policy (Ng, Harada, Russell
1999). Behind a gate it is paid in some episodes only, so this no longer holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from turnstile.lab.judge import Figures
from turnstile.lab.measure import Subject, make_bench, measure
from turnstile.lab.play import Player
from turnstile.lab.world import F64, World, some_policy
from turnstile.rewards.base import Threshold
from turnstile.rewards.build import Scorer, make_term
from turnstile.types import Score

Shape = Literal["none", "potential", "gated"]
SHAPES: tuple[Shape, ...] = ("none", "potential", "gated")
"""No shaping; the potential at the highest level; the potential one level below, behind the outcome's gate."""


def shaped_scores(world: World, shape: Shape) -> list[Score]:
    """Return the score of each path, [P]: outcome and step rewards, plus the potential unless `shape` is "none"."""
    terms = [
        make_term("outcome", "signal", level=1, gate=Threshold(value=0.0)),
        make_term("step", "env", level=1),
    ]
    if shape != "none":
        start = float(world.process.potential(world.process.starts[0]))
        level = 1 if shape == "potential" else 0
        terms.append(make_term("potential", "potential", {"start": start}, level=level))
    scorer = Scorer(terms=tuple(terms))
    player = Player(world, world.policy(np.zeros(world.parameters)))
    return [scorer.score(player.tasks[world.task[p]], player.trajectory(p)) for p in range(len(world.paths))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shaping:
    """The effect of one shape on one world. `figures` compare each estimator with the unshaped return's gradient."""

    shape: Shape
    added: tuple[float, float]  # the smallest and largest change of an episode's total
    best: float  # the unshaped return of the policy that is best with shaping
    figures: tuple[tuple[str, Figures], ...]


def study_shapes(world: World, subjects: Sequence[Subject], *, size: int = 8, groups: int = 512) -> list[Shaping]:
    """Return the effect of every shape on one world, measured at the same policy and on the same sampled groups."""
    plain = np.array([score.total for score in shaped_scores(world, "none")])
    found = []
    for shape in SHAPES:
        scores = shaped_scores(world, shape)
        totals = np.array([score.total for score in scores])
        bench = make_bench(world, some_policy(world), size=size, groups=groups, scores=scores)
        added = totals - plain
        found.append(
            Shaping(
                shape=shape,
                added=(float(added.min()), float(added.max())),
                best=float(best_policy(world, totals) @ plain),
                figures=tuple((each.label, measure(each, bench)) for each in subjects),
            )
        )
    return found


def best_policy(world: World, totals: F64) -> F64:
    """Return the probability of each path, f64[P], under the best deterministic policy.

    Such a policy has one action for each view. All of them are tried; the best has the highest mean of `totals` f64[P],
    with equal weight for each task.
    """
    process = world.process
    taken = [tuple((process.view(step.state), step.action) for step in path.steps) for path in world.paths]
    menus: dict[str, set[int]] = {}
    for view, action in itertools.chain.from_iterable(taken):
        menus.setdefault(view, set()).add(action)
    chance = np.array([path.chance for path in world.paths]) / len(process.starts)
    best, found = -np.inf, chance
    for actions in itertools.product(*(sorted(menu) for menu in menus.values())):
        policy = dict(zip(menus, actions, strict=True))
        played = np.array([all(policy[view] == action for view, action in path) for path in taken])
        value = float((chance * played) @ totals)
        if value > best + 1e-9:
            best, found = value, chance * played
    return found
