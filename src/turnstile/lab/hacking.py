"""Gated and direct accumulation of rewards compared on a process in which a step reward can be farmed.

The signature published in arXiv 2508.10548: with direct accumulation the total rises while the outcome falls; with
gates both rise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from turnstile.lab.curves import Curve, Plan, learn, sampled
from turnstile.lab.measure import Subject
from turnstile.lab.play import Player
from turnstile.lab.world import World
from turnstile.rewards.base import Threshold
from turnstile.rewards.build import Compose, Scorer, make_term
from turnstile.rewards.compose import direct, gated
from turnstile.types import Score

COMPOSITIONS: Mapping[str, Compose] = {"direct": direct, "gated": gated}


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """The learning curves under one composition, by seed, with their mean total and outcome before and after."""

    composition: str
    curves: tuple[Curve, ...]

    @property
    def total(self) -> tuple[float, float]:
        """The mean total before learning and after the last step."""
        return self._ends([curve.total for curve in self.curves])

    @property
    def outcome(self) -> tuple[float, float]:
        return self._ends([curve.outcome for curve in self.curves])

    @property
    def matches_paper(self) -> tuple[bool, ...]:
        """Whether each seed's curves move as published: total up, outcome down if direct and up if gated."""
        wanted = -1.0 if self.composition == "direct" else 1.0
        return tuple(
            bool(curve.total[-1] > curve.total[0] and wanted * (curve.outcome[-1] - curve.outcome[0]) > 0)
            for curve in self.curves
        )

    @staticmethod
    def _ends(values: Sequence[np.ndarray]) -> tuple[float, float]:
        return float(np.mean([each[0] for each in values])), float(np.mean([each[-1] for each in values]))


def compose_scores(world: World, compose: Compose) -> list[Score]:
    """Return the score of each path, [P]: a gated outcome at level 1 and the step reward at level 0, composed."""
    terms = (
        make_term("outcome", "signal", level=1, gate=Threshold(value=0.0)),
        make_term("step", "env", level=0),
    )
    player = Player(world, world.policy(np.zeros(world.parameters)))
    scorer = Scorer(terms=terms, compose=compose)
    return [scorer.score(player.tasks[world.task[p]], player.trajectory(p)) for p in range(len(world.paths))]


def hack(
    subject: Subject,
    world: World,
    plan: Plan,
    *,
    seeds: int = 5,
    done: Callable[[], None] = lambda: None,
) -> list[Signature]:
    """Return one signature per composition, all learned from the same initial policy with the same seeds.

    `done` is called after each learning curve.
    """
    found = []
    for name, compose in COMPOSITIONS.items():
        scores = compose_scores(world, compose)
        curves = []
        for seed in range(seeds):
            curves.append(learn(world, sampled(subject, plan, scores), plan, seed=seed, scores=scores))
            done()
        found.append(Signature(composition=name, curves=tuple(curves)))
    return found
