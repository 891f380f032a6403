"""What the policy could do when RL began, learned from again beside what it plays: samples against forgetting."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from turnstile.batching.rows import rows_of
from turnstile.trainer.learner import Objective
from turnstile.types import Row, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """Stored episodes, and what is learned from them in every optimiser step, on top of its own objective.

    Each step draws `batch` of them by `seed` and its number alone, so that a step which is done again takes the same.
    Their tokens share weights of their own and take none from what was played. Advantages are 1, and `ref_logprobs` the
    recorded ones, which were the reference's own when it sampled them.
    """

    episodes: tuple[Trajectory, ...]
    objective: Objective
    batch: int
    seed: int

    def rows(self, step: int) -> list[Row]:
        """Those of a step of training."""
        draw = random.Random(f"{self.seed}/{step}/rehearsal")
        chosen = draw.sample(self.episodes, min(self.batch, len(self.episodes)))
        return [row for episode in chosen for row in _rows(episode)]


def _rows(episode: Trajectory) -> Sequence[Row]:
    ones = [np.ones(len(turn.completion.token_ids), np.float32) for turn in episode.turns]
    rows = [row for row in rows_of(episode, ones) if row.loss_mask.any()]
    return [replace(row, extras={"ref_logprobs": row.logprobs}) for row in rows]
