"""What heads that judge whole turns read of the policy's last hidden states: a turn's state, and what was said in it.

The state is read before the first token of a turn; what was said in it is that and the mean over the turn's tokens,
each read once it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from turnstile.batching.rows import rows_of
from turnstile.trainer.features import features, nothing_said, trajectories_of
from turnstile.trainer.learner import Learner
from turnstile.types import F32, Group, Row

Places = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Spoken:
    """The turns of a step that are trained."""

    turns: Places  # [M] which of the step's turns
    lengths: list[int]  # turns of each trajectory
    before: Tensor  # [M, H] the state
    after: Tensor  # [M, 2H] the state, and what was said in it

    def spread(self, values: Tensor) -> list[F32]:
        """[M] as [trajectory] -> f32[K], 0 in turns that are not trained."""
        flat = np.zeros(sum(self.lengths), np.float32)
        flat[self.turns] = values.detach().float().cpu().numpy()
        return np.split(flat, np.cumsum(self.lengths)[:-1])

    @property
    def trajectory(self) -> Places:
        """Which of the step's trajectories each turn is of, [M]."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)[self.turns]


def read_spoken(learner: Learner, groups: Sequence[Group]) -> Spoken:
    """The turns of a step that are trained, as the network stands now; states are in main memory."""
    everyone = trajectories_of(groups)
    lengths = [len(trajectory.turns) for trajectory in everyone]
    rows, turns = [], []
    for begin, trajectory in zip(np.cumsum([0, *lengths]), everyone, strict=False):
        for row in rows_of(trajectory, nothing_said(trajectory)):
            if row.loss_mask.any():
                trained = np.unique(row.turn_ids[row.loss_mask])
                rows.append((row, trained))
                turns.append(begin + trained)
    if not rows:
        width = int(learner.model.config.get_text_config().hidden_size)
        return Spoken(np.empty(0, np.int64), lengths, torch.empty(0, width), torch.empty(0, 2 * width))
    seen = features(learner, [_opened(row, trained) for row, trained in rows])
    before = [states for each in zip(seen, rows, strict=True) for states in _apart(*each)]
    state = torch.stack([states[0] for states in before])
    said = torch.stack([states[1:].mean(0) for states in before])
    return Spoken(np.concatenate(turns), lengths, state, torch.cat([state, said], dim=1))


def turn_head(size: int) -> nn.Sequential:
    """One hidden layer as wide as what it reads, and one number, which begins at 0."""
    last = nn.Linear(size, 1)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(size, size), nn.ReLU(), last)


def _opened(row: Row, turns: Places) -> Row:
    """The row with exactly those tokens marked before which something of these turns is read: their own, and the one
    after each turn; the row has one more, so that there is one after the last."""
    mask = np.append(np.isin(row.turn_ids, turns), False)
    mask[1:] |= mask[:-1]
    arrays: dict[str, Any] = {name: np.append(getattr(row, name), getattr(row, name)[-1]) for name in _ARRAYS}
    return replace(row, loss_mask=mask, **arrays)


def _apart(states: Tensor, row: tuple[Row, Places]) -> list[Tensor]:
    """What `_opened` read, [n + 1, H] for each turn of n tokens."""
    owner = row[0].turn_ids
    places = np.flatnonzero(_opened(*row).loss_mask)
    found = []
    for turn in row[1]:
        own = np.flatnonzero(owner == turn)
        begin = int(np.searchsorted(places, own[0]))
        found.append(states[begin : begin + len(own) + 1])
    return found


_ARRAYS = ("token_ids", "logprobs", "advantages", "turn_ids", "versions")
