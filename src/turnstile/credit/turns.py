"""The turns of a step as one flat sequence, for estimators that compare turns rather than whole attempts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from turnstile.credit.base import Advantages, Scores
from turnstile.credit.stats import F64, Flags, Normalise, Scale, check_scores, equal, not_finite
from turnstile.errors import ConfigError, TrainingError
from turnstile.types import F32, Group, Score, Stop, Turn

I64 = NDArray[np.int64]
LIMITS = (Stop.TURNS, Stop.CONTEXT, Stop.TOKENS, Stop.TIMEOUT)
_LEARNED = {
    "values": ("the values of a critic", "credit.critic"),
    "implicit": ("the rewards of an implicit process reward", "credit.reward_model"),
    "q": ("the values of a critic of turns", "credit.critic"),
    "v": ("the values of a critic of turns", "credit.critic"),
    "progress": ("the contributions of turns", "credit.critic"),
}
"""Prediction of a learned part -> its description, and the part's section of a recipe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """T turns, in the order of groups, attempts and turns.

    `turns` contains only the n tokens of each turn that the policy chose, because tokens forced by a regex or a grammar
    are never trained. `split` puts the forced tokens back.
    """

    groups: Sequence[Group]
    turns: Sequence[Turn]  # [T]
    group: I64  # [T] index of the turn's group in the step
    trajectory: I64  # [T] index of the turn's trajectory in the step
    index: I64  # [T] index of the turn in its trajectory
    last: Flags  # [T] whether the turn is the last of its trajectory
    rewards: F64  # [T] r_{i,t}; 0 for a trajectory in neither baseline nor gradient
    outcomes: F64  # [T] R_i of the turn's trajectory, with the same exception
    in_baseline: Flags  # [T] whether its trajectory counts in the statistics
    in_gradient: Flags  # [T] whether its trajectory is trained on

    def returns(self, gamma: float) -> F64:
        """Return G_{i,t} = sum_{k >= t} gamma^(k-t) r_{i,k} + gamma^(K-t) R_i, f64[T].

        R_i belongs to the last turn itself, whatever was observed after it, so it is not discounted there.
        """
        return self.sums_to_go(self.rewards + np.where(self.last, self.outcomes, 0.0), gamma)

    def sums_to_go(self, values: F64, gamma: float) -> F64:
        """Return sum_{k >= t} gamma^(k-t) values_{i,k} within each trajectory, f64[T]."""
        result = np.zeros_like(values)
        ahead = 0.0
        for t in range(len(values) - 1, -1, -1):
            ahead = values[t] + (0.0 if self.last[t] else gamma * ahead)
            result[t] = ahead
        return result

    def within(self, labels: Sequence[Hashable], values: F64, normalise: Normalise) -> F64:
        """Return `values` f64[T] normalised among the turns with the same label."""
        return within(labels, values, self.in_baseline & self.valued, normalise)

    def mean_within(self, labels: Sequence[Hashable], values: F64) -> F64:
        """Return the mean of `values` f64[T] over the turns with the same label that are trained and in the baseline.

        A turn keeps its own value if no such turn has its label.
        """
        result, counted = values.copy(), self.in_baseline & self.valued
        for slots in _by_label(labels):
            if counted[slots].any():
                result[slots] = values[slots][counted[slots]].mean()
        return result

    def states(self) -> list[Hashable]:
        """Return the label (group, state key) of each turn, [T]. A turn without a key gets a label of its own."""
        return [
            (int(group), turn.state_key) if turn.state_key else place
            for place, (group, turn) in enumerate(zip(self.group, self.turns, strict=True))
        ]

    def entropies(self, kind: str, chosen: Flags) -> list[F64]:
        """Return the entropies of the tokens of turns that `chosen` selects, in nats, one array per turn.

        Raises TrainingError if a selected turn has none.
        """
        found: list[F64] = []
        for t in np.flatnonzero(chosen).tolist():
            values = self.turns[t].completion.entropies
            if values is None:
                raise TrainingError(
                    f"task {self.groups[self.group[t]].task.id!r}, turn {self.index[t]}: credit {kind!r} needs the "
                    "entropies of the sampled tokens, which this engine did not record"
                )
            found.append(values.astype(np.float64))
        return found

    def token_predictions(self, kind: str, aux: Mapping[str, Any], part: Literal["values", "implicit"]) -> list[F64]:
        """Return the predictions of an auxiliary model for the chosen tokens, [T] -> f64[n].

        `aux` holds predictions for all sampled tokens. Raises ConfigError if they are missing, ValueError if their
        shape is wrong, and TrainingError if they are not finite.
        """
        what, section = _LEARNED[part]
        if part not in aux:
            raise ConfigError(
                f"credit {kind!r} needs {what}: the trainer learns it; called from Python, "
                f'give it aux={{"{part}": [trajectory][turn] -> f32[n]}}'
            )
        found = [own.astype(np.float64) for turns in aux[part] for own in turns]
        chosen = [turn.completion.chosen for group in self.groups for t in group.trajectories for turn in t.turns]
        if [len(own) for own in found] != [len(own) for own in chosen]:
            raise ValueError(f"credit {kind!r}: aux[{part!r}] is not [trajectory][turn] -> f32[n] of these groups")
        found = [own[kept] for own, kept in zip(found, chosen, strict=True)]
        if not all(np.isfinite(own).all() for own in found):
            raise TrainingError(f"credit {kind!r}: {what} are not finite; lower {section}.lr")
        return found

    def turn_predictions(self, kind: str, aux: Mapping[str, Any], part: Literal["q", "v", "progress"]) -> F64:
        """Return the predictions of an auxiliary model for whole turns, f64[T].

        Raises ConfigError if `aux` lacks them, ValueError if their shape is wrong, and TrainingError if they are not
        finite.
        """
        what, section = _LEARNED[part]
        if part not in aux:
            raise ConfigError(
                f"credit {kind!r} needs {what}: the trainer learns it; called from Python, "
                f'give it aux={{"{part}": [trajectory] -> f32[K]}}'
            )
        found = np.concatenate([*aux[part], np.zeros(0)]).astype(np.float64)
        if len(found) != len(self.turns):
            raise ValueError(f"credit {kind!r}: aux[{part!r}] is not [trajectory] -> f32[K] of these groups")
        if not np.isfinite(found).all():
            raise TrainingError(f"credit {kind!r}: {what} are not finite; lower {section}.lr")
        return found

    @property
    def truncated(self) -> Flags:
        """Whether each turn belongs to an attempt that was stopped by a limit and might have continued, bool[T]."""
        stops = [t.stop in LIMITS for group in self.groups for t in group.trajectories]
        return np.array([stops[i] for i in self.trajectory.tolist()], dtype=np.bool_)

    @property
    def valued(self) -> Flags:
        """Whether each turn is trainable and has chosen tokens, so that a critic learns its values, bool[T]."""
        return np.array([turn.trainable and len(turn.completion.token_ids) > 0 for turn in self.turns], dtype=np.bool_)

    def over_tokens(self, values: Sequence[F64], scale: Scale, eps: float, *, among: Flags | None = None) -> list[F64]:
        """Return values of tokens, [T] -> f64[n], with 0 outside the gradient.

        If `scale` is "std", they are normalised (ddof 0) over the tokens of all turns in the baseline, or of those also
        in `among`. If all of these are equal, the result is 0.
        """
        chosen = self.in_baseline if among is None else self.in_baseline & among
        counted = [own for own, counts in zip(values, chosen, strict=True) if counts]
        tokens = np.concatenate(counted) if counted else np.zeros(0)
        mean, std = np.float64(0.0), np.float64(1.0)
        if scale == "std":
            if equal(tokens):
                return [np.zeros_like(own) for own in values]
            mean, std = tokens.mean(), tokens.std() + eps
        return [
            (own - mean) / std if learns else np.zeros_like(own)
            for own, learns in zip(values, self.in_gradient, strict=True)
        ]

    def to_tokens(self, values: F64) -> Advantages:
        """Return turn values f64[T], repeated for each sampled token; 0 outside the gradient and if forced."""
        masked = np.where(self.in_gradient, values, 0.0)
        return self.split(
            [np.full(len(turn.completion.token_ids), value) for turn, value in zip(self.turns, masked, strict=True)]
        )

    def split(self, values: Sequence[F64], *, forced: float = 0.0) -> Advantages:
        """Return arrays of turns, [T] -> f64[n], by trajectory and for all sampled tokens.

        Forced tokens get the value `forced`.
        """
        own = iter(values)
        return [
            [_spread(next(own), turn.completion.chosen, forced) for turn in trajectory.turns]
            for group in self.groups
            for trajectory in group.trajectories
        ]


def within(labels: Sequence[Hashable], values: F64, counted: Flags, normalise: Normalise) -> F64:
    """Return `values` normalised among those with the same label.

    `normalise` computes its statistics over the `counted` values only, but the others are normalised as well.
    """
    result = np.zeros_like(values)
    for slots in _by_label(labels):
        result[slots] = normalise(values[slots], counted[slots])
    return result


def states_shared(groups: Sequence[Group]) -> float:
    """Return the share of turns that began in the same state (`state_key`) as another turn of their group.

    Estimators that compare turns from equal states depend on it.
    """
    met = Counter(
        (place, turn.state_key) for place, group in enumerate(groups) for t in group.trajectories for turn in t.turns
    )
    shared = sum(count for (_, key), count in met.items() if key and count > 1)
    return shared / max(1, met.total())


def turns_of(groups: Sequence[Group], scores: Scores) -> Turns:
    """Return the turns of one step.

    Raises TrainingError if a reward is not finite, ValueError if scores and trajectories do not match.
    """
    check_scores(groups, scores)
    members = [
        (place, group, index, score)
        for place, (group, group_scores) in enumerate(zip(groups, scores, strict=True))
        for index, score in enumerate(group_scores)
    ]
    lengths = np.array([len(group.trajectories[index].turns) for _, group, index, _ in members], dtype=np.int64)
    rewards = [_rewards(group, index, score) for _, group, index, score in members]
    index = np.concatenate([np.arange(n) for n in lengths]) if members else np.zeros(0, dtype=np.int64)
    return Turns(
        groups=groups,
        turns=[_chosen(turn) for _, group, i, _ in members for turn in group.trajectories[i].turns],
        group=np.repeat(np.array([place for place, *_ in members], dtype=np.int64), lengths),
        trajectory=np.repeat(np.arange(len(members)), lengths),
        index=index,
        last=index == np.repeat(lengths, lengths) - 1,
        rewards=np.concatenate([turn for turn, _ in rewards]) if members else np.zeros(0),
        outcomes=np.repeat(np.array([outcome for _, outcome in rewards], dtype=np.float64), lengths),
        in_baseline=np.repeat(np.array([score.in_baseline for *_, score in members], dtype=np.bool_), lengths),
        in_gradient=np.repeat(np.array([score.in_gradient for *_, score in members], dtype=np.bool_), lengths),
    )


def seat_outcomes(step: Turns, scores: Scores) -> F64:
    """Return the outcome of each turn's agent, f64[T]; 0 if its trajectory is in neither baseline nor gradient.

    Raises TrainingError if the agent has no outcome.
    """
    flat = [score for group_scores in scores for score in group_scores]
    takes_part = step.in_baseline | step.in_gradient
    found = np.zeros(len(step.turns))
    for t in np.flatnonzero(takes_part).tolist():
        by_seat, seat = flat[step.trajectory[t]].outcome or {}, step.turns[t].agent
        if seat not in by_seat:
            raise TrainingError(
                f"task {step.groups[step.group[t]].task.id!r}: {seat!r} spoke, but has no outcome (there: "
                f"{', '.join(by_seat) or 'none'}); a game of several seats needs a reward for each"
            )
        found[t] = by_seat[seat]
    return found


def _chosen(turn: Turn) -> Turn:
    """Return the turn without forced tokens."""
    completion = turn.completion
    if completion.forced is None or not completion.forced.any():
        return turn
    kept = completion.chosen
    entropies = None if completion.entropies is None else completion.entropies[kept]
    of_tokens = {name: getattr(completion, name)[kept] for name in ("token_ids", "logprobs", "versions", "forced")}
    return replace(turn, completion=replace(completion, entropies=entropies, **of_tokens))


def _spread(values: F64, chosen: Flags, forced: float) -> F32:
    """Return the values of chosen tokens among all sampled tokens, with `forced` for the others."""
    found = np.full(len(chosen), forced, dtype=np.float32)
    found[chosen] = values
    return found


def _rewards(group: Group, index: int, score: Score) -> tuple[F64, float]:
    """Return the step rewards [K] and the outcome of a trajectory; zeros if it is in neither baseline nor gradient."""
    if not score.in_baseline and not score.in_gradient:
        return np.zeros(len(score.turn)), 0.0
    # use the shortest decimal of each float32, so that thirty times .1 and ten times .3 are equal again
    turn = score.turn.astype(str).astype(np.float64)
    outcome = float(sum(score.outcome.values())) if score.outcome is not None else np.nan
    attempt = group.trajectories[index].attempt
    if not np.isfinite(turn).all():
        raise not_finite(group, attempt, f"step rewards {score.turn.tolist()}")
    if not np.isfinite(outcome):
        raise not_finite(group, attempt, f"outcome reward {outcome}")
    return turn, outcome


def _by_label(labels: Sequence[Hashable]) -> list[I64]:
    """Return the indices with each label, in the order in which labels first appear."""
    found: dict[Hashable, list[int]] = {}
    for place, label in enumerate(labels):
        found.setdefault(label, []).append(place)
    return [np.array(places, dtype=np.int64) for places in found.values()]
