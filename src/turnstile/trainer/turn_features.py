"""Inputs of turn-level heads, made of the policy's hidden states before and within each turn.

The state of a turn is the hidden state before its first token. The turn itself is represented by that state and the
mean of the hidden states after its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from turnstile.batching.rows import rows_of
from turnstile.trainer.features import features, trajectories_of, zero_advantages
from turnstile.trainer.learner import Learner
from turnstile.types import F32, Group, Row

Indices = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class TurnFeatures:
    """Features of the trained turns of a step."""

    turns: Indices  # [M] index of each turn among all turns of the step
    lengths: list[int]  # number of turns of each trajectory
    before: Tensor  # [M, H] the state before the turn
    after: Tensor  # [M, 2H] that state, and the mean state over the turn's tokens

    def spread(self, values: Tensor) -> list[F32]:
        """Return the values [M] as [trajectory] -> f32[K], with 0 for untrained turns."""
        flat = np.zeros(sum(self.lengths), np.float32)
        flat[self.turns] = values.detach().float().cpu().numpy()
        return np.split(flat, np.cumsum(self.lengths)[:-1])

    @property
    def trajectory(self) -> Indices:
        """The index of each trained turn's trajectory in the step, [M]."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)[self.turns]


def read_turn_features(learner: Learner, groups: Sequence[Group]) -> TurnFeatures:
    """Return the features of the step's trained turns under the current weights, in main memory."""
    trajectories = trajectories_of(groups)
    lengths = [len(trajectory.turns) for trajectory in trajectories]
    rows, turns = [], []
    for begin, trajectory in zip(np.cumsum([0, *lengths]), trajectories, strict=False):
        for row in rows_of(trajectory, zero_advantages(trajectory)):
            if row.loss_mask.any():
                trained = np.unique(row.turn_ids[row.loss_mask])
                rows.append((row, trained))
                turns.append(begin + trained)
    if not rows:
        width = int(learner.model.config.get_text_config().hidden_size)
        return TurnFeatures(np.empty(0, np.int64), lengths, torch.empty(0, width), torch.empty(0, 2 * width))
    hidden = features(learner, [_with_boundaries(row, trained) for row, trained in rows])
    by_turn = [states for each in zip(hidden, rows, strict=True) for states in _split_by_turn(*each)]
    before = torch.stack([states[0] for states in by_turn])
    action = torch.stack([states[1:].mean(0) for states in by_turn])
    return TurnFeatures(np.concatenate(turns), lengths, before, torch.cat([before, action], dim=1))


def turn_head(size: int) -> nn.Sequential:
    """Return a network with one hidden layer as wide as its input, and one output that is initially 0."""
    last = nn.Linear(size, 1)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(size, size), nn.ReLU(), last)


def _with_boundaries(row: Row, turns: Indices) -> Row:
    """Return the row with its mask set at the tokens of `turns` and at the token after each turn.

    The hidden states before the masked-in tokens are then those before each turn and after each of its tokens. One
    extra token is appended, so that the last turn is followed by a token too.
    """
    mask = np.append(np.isin(row.turn_ids, turns), False)
    mask[1:] |= mask[:-1]
    arrays: dict[str, Any] = {name: np.append(getattr(row, name), getattr(row, name)[-1]) for name in _PER_TOKEN}
    return replace(row, loss_mask=mask, **arrays)


def _split_by_turn(states: Tensor, row: tuple[Row, Indices]) -> list[Tensor]:
    """Return the states of `_with_boundaries` split by turn, [n + 1, H] for each turn of n tokens."""
    owner = row[0].turn_ids
    positions = np.flatnonzero(_with_boundaries(*row).loss_mask)
    by_turn = []
    for turn in row[1]:
        tokens = np.flatnonzero(owner == turn)
        begin = int(np.searchsorted(positions, tokens[0]))
        by_turn.append(states[begin : begin + len(tokens) + 1])
    return by_turn


_PER_TOKEN = ("token_ids", "logprobs", "advantages", "turn_ids", "versions")
