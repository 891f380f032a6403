"""The policy as its own teacher, by its log-probabilities after it has read feedback on the attempt."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from turnstile.agents.base import Renderer
from turnstile.agents.history import messages_before
from turnstile.credit.base import EQUAL
from turnstile.rewards.judges.transcript import middle, plain, transcript
from turnstile.trainer.learner import Learner
from turnstile.trainer.reference import LogprobProvider, with_logprobs
from turnstile.types import Group, Row, Sampling, Score, Trajectory

_log = logging.getLogger(__name__)
NAME = "feedback_logprobs"
Scalar = TypeVar("Scalar", bound=np.generic)


class Feedback(LogprobProvider):
    """Computes the log-probabilities of the pre-step policy given feedback, for the loss `self_distill`.

    The feedback consists of signals of the attempt's episode (`show`), its `last` observation, and the group's attempt
    with the highest reward, if that is higher (`solution`). It is appended to the conversation's opening; all sampled
    and observed tokens after that stay the same. Without feedback, or if it does not fit into the model's window, the
    array holds the policy's own log-probabilities, so nothing is learned there. The first time that it does not fit, a
    warning is logged.
    """

    def __init__(
        self,
        learner: Learner,
        renderer: Renderer,
        *,
        show: tuple[str, ...] = (),  # signals of the episode
        last: bool = True,  # the last observation
        solution: bool = True,  # the group's best attempt, if that earned more
        chars: Annotated[int, Field(ge=200)] = 4000,  # characters in all
    ) -> None:
        self._learner, self._renderer = learner, renderer
        self._show, self._last, self._solution, self._chars = show, last, solution, chars
        self._window = int(getattr(learner.model.config.get_text_config(), "max_position_embeddings", 0) or 0)
        self._warned = False
        self._step: dict[tuple[str, int], tuple[Trajectory, str]] = {}

    def on_step_start(self, groups: Sequence[Group], scores: Sequence[Sequence[Score]]) -> None:
        """Prepare the feedback on each attempt of the step."""
        self._step = {
            trajectory.key: (trajectory, self.text(group, own, place))
            for group, own in zip(groups, scores, strict=True)
            for place, trajectory in enumerate(group.trajectories)
        }

    def text(self, group: Group, scores: Sequence[Score], place: int) -> str:
        """Return the feedback on the trajectory with index `place` in the group; "" if there is none."""
        own = group.trajectories[place]
        parts = [f"[{name}]\n{plain(own.signals[name])}" for name in self._show if own.signals.get(name) is not None]
        if self._last and own.turns:
            parts += [message.content for message in own.turns[-1].observation if message.content]
        paragraphs = [
            f"An attempt at this ended so:\n{middle(part, self._chars // 2)}" for part in ("\n\n".join(parts),) if part
        ]
        if self._solution and (better := _better_attempt(group, scores, place)) is not None:
            shown = transcript(group.task, better, chars=self._chars // 2)
            paragraphs.append(f"Another attempt did better:\n{shown}")
        return "\n\n".join(paragraphs)

    def provide(self, rows: Sequence[Row], sampling: Sampling) -> list[Row]:
        """Return the rows with `feedback_logprobs` f32[L] among their extras, 0 where masked."""
        taught = [self._with_feedback(row) for row in rows]
        learner = self._learner
        found = with_logprobs(learner.model, learner.config.budget, taught, sampling, NAME)
        return [
            replace(row, extras={**row.extras, NAME: _fit_right(one.extras[NAME], len(row.token_ids))})
            for row, one in zip(rows, found, strict=True)
        ]

    def _with_feedback(self, row: Row) -> Row:
        """Return the row re-prompted with its feedback; unchanged if there is none or it exceeds the window."""
        trajectory, text = self._step[row.origin]
        if not text:
            return row
        first = int(row.turn_ids[row.turn_ids >= 0].min())
        start = max(turn for turn in range(first + 1) if turn == 0 or trajectory.turns[turn].fresh)
        messages = messages_before(trajectory, start, hint=text)
        prompt = self._renderer.prompt(messages, trajectory.tools)
        rest_length = len(row.token_ids) - len(trajectory.turns[start].context_ids)
        length = len(prompt) + rest_length
        if self._window and length > self._window:
            self._warn_once(length)
            return row
        return replace(
            row,
            token_ids=np.concatenate([prompt, row.token_ids[len(row.token_ids) - rest_length :]]),
            loss_mask=_fit_right(row.loss_mask, length),
            logprobs=_fit_right(row.logprobs, length),
            advantages=_fit_right(row.advantages, length),
            turn_ids=_fit_right(row.turn_ids + 1, length) - 1,
            versions=_fit_right(row.versions, length),
            extras={},
        )

    def _warn_once(self, length: int) -> None:
        if not self._warned:
            _log.warning(
                "feedback makes a row of %d tokens, the model's window holds %d: nothing is learned from it there; "
                "lower loss.feedback.chars or episode.context",
                length,
                self._window,
            )
        self._warned = True


def _fit_right(values: NDArray[Scalar], length: int) -> NDArray[Scalar]:
    """Return the last `length` values, after zeros if there are fewer."""
    if len(values) >= length:
        return values[len(values) - length :]
    return np.concatenate([np.zeros(length - len(values), values.dtype), values])


def _better_attempt(group: Group, scores: Sequence[Score], place: int) -> Trajectory | None:
    """Return the attempt with the highest reward, the first if several tie, or None if it is not above this one's."""
    best = max(range(len(scores)), key=lambda i: (_earned_total(scores[i]), -group.trajectories[i].attempt))
    return group.trajectories[best] if _earned_total(scores[best]) > _earned_total(scores[place]) + EQUAL else None


def _earned_total(score: Score) -> float:
    return score.total if score.outcome is not None else -float("inf")
