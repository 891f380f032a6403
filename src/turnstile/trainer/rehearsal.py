"""Rehearsal of stored samples of the initial policy in every step, against forgetting."""

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
    """Stored episodes, and the objective with which every optimiser step trains on them beside the policy's own.

    Each training step draws `batch` episodes, which depend on `seed` and the step number alone, so a repeated step
    draws the same ones. Their tokens are aggregated separately, so they take no weight from fresh samples. Advantages
    are 1. `ref_logprobs` are the recorded log-probabilities, because the reference itself sampled the episodes.
    """

    episodes: tuple[Trajectory, ...]
    objective: Objective
    batch: int
    seed: int

    def rows(self, step: int) -> list[Row]:
        """Return the stored rows that a training step rehearses."""
        draw = random.Random(f"{self.seed}/{step}/rehearsal")
        chosen = draw.sample(self.episodes, min(self.batch, len(self.episodes)))
        return [row for episode in chosen for row in _rows(episode)]


def _rows(episode: Trajectory) -> Sequence[Row]:
    ones = [np.ones(len(turn.completion.token_ids), np.float32) for turn in episode.turns]
    rows = [row for row in rows_of(episode, ones) if row.loss_mask.any()]
    return [replace(row, extras={"ref_logprobs": row.logprobs}) for row in rows]
