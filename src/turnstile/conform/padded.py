"""Padded arrays, as most frameworks use them: [B, L] with a mask, one row per attempt, padded on the right.

A row holds an attempt's tokens from its first action on: actions, the observations between them (masked), two or more
tokens observed after the last action (masked), and padding (masked). A step reward is on the last token of its turn.
The outcome is on the last action token or, if it arrives late, on the last observed token.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from turnstile.credit.base import Advantages, Scores
from turnstile.credit.check import examine_estimator
from turnstile.credit.invariants import DoesNotApply, Finding
from turnstile.errors import ConfigError
from turnstile.types import F32, Group, Score, Trajectory

NAMES: Mapping[str, tuple[str, ...]] = {
    "rewards": ("token_level_rewards", "token_rewards", "rewards"),
    "mask": ("response_mask", "action_mask", "loss_mask", "completion_mask", "eos_mask", "mask"),
    "index": ("index", "group_index", "group_ids", "uid"),
    "values": ("values", "old_values"),
    "logprobs": ("log_prob", "log_probs", "logprob", "logprobs", "new_log_prob", "new_logprobs"),
    "old": ("old_log_prob", "old_log_probs", "old_logprob", "old_logprobs"),
    "reference": ("ref_log_prob", "ref_log_probs", "ref_logprob", "ref_logprobs", "log_probs_base"),
    "advantages": ("advantages", "advantage"),
    "predictions": ("vpreds", "new_values"),
    "returns": ("returns", "value_targets"),
}
"""Role of an array -> the parameter names by which it is recognised. All arrays are f32 or f64[B, L], except `index`,
which holds the names of groups, [B]."""

Function: TypeAlias = Callable[..., Any]
VALUE_AT_OBSERVATION = 0.5
"""The critic's value at observed tokens."""


def roles(function: Function) -> dict[str, str]:
    """Return the role of each parameter that takes an array: parameter -> a key of `NAMES`. Bound knobs are left out.

    Raises ConfigError if a parameter has neither a known name nor a default.
    """
    parameters = inspect.signature(function).parameters
    bound = function.keywords if isinstance(function, functools.partial) else {}
    known = {name: role for role, names in NAMES.items() for name in names}
    found = {name: known[name] for name in parameters if name in known and name not in bound}
    if "old_values" in found and "values" in found:  # then `values` are a critic's new ones
        found["values"] = "predictions"
    open_kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    for name, parameter in parameters.items():
        if name not in found and parameter.default is parameter.empty and parameter.kind not in open_kinds:
            arrays = ", ".join(names[0] for names in NAMES.values())
            raise ConfigError(
                f"{label(function)} wants {name!r}, which is no padded array (known: {arrays}, and their usual other "
                f"names); give it as a knob, {name}=VALUE, or rename it in an adapter of your own, --as module:function"
            )
    return found


def label(function: Function) -> str:
    """Return a function's name for error messages."""
    inner = function.func if isinstance(function, functools.partial) else function
    return getattr(inner, "__qualname__", None) or type(inner).__name__


def examine_padded(function: Function, *, seed: int = 0) -> dict[int, Finding]:
    """Return the finding for each invariant of a function from padded rewards to advantages [B, L].

    If the function returns advantages and returns, the returns are checked against invariants 1, 2, 3 and 5 as well.
    """

    def findings(part: int) -> dict[int, Finding]:
        one = functools.partial(PaddedEstimator, function, part=part)
        return examine_estimator(one(), seed=seed, padded=one(pad=3), late_outcome=one(late_outcome=True))

    found = findings(0)
    try:
        returns = findings(1)
    except DoesNotApply:
        return found
    for number in (1, 2, 3, 5):
        if returns[number].seen and not found[number].seen:
            found[number] = Finding(seen=returns[number].seen.replace("the advantage of", "the return of"))
    return found


class PaddedEstimator:
    """An estimator that calls a function on padded arrays.

    A failed attempt becomes a row of masked tokens without a reward, which is all that padded arrays can express.
    `part` is the index of the array to take from the result: 0 for the advantages, 1 for the returns.
    """

    def __init__(
        self,
        function: Function,
        *,
        pad: int = 0,
        late_outcome: bool = False,
        part: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.function, self.roles = function, roles(function)
        self.lay_out = functools.partial(lay_out, pad=pad, late_outcome=late_outcome, dtype=dtype)
        self.part = part

    def __call__(self, groups: Sequence[Group], scores: Scores, aux: Mapping[str, Any], **knobs: Any) -> Advantages:
        flat = [score for group_scores in scores for score in group_scores]
        if any(score.in_baseline and not score.in_gradient for score in flat):
            raise DoesNotApply("padded arrays cannot say that an attempt counts but is not learned from")
        turns = [turn for group in groups for t in group.trajectories for turn in t.turns]
        if not all(turn.trainable and turn.completion.chosen.all() for turn in turns):
            raise DoesNotApply("padded arrays know tokens that are not trained as observed ones, as of invariant 1")
        arrays, places = self.lay_out(groups, flat, aux)
        result = self.function(**{name: arrays[role] for name, role in self.roles.items()}, **knobs)
        values = self._array(result, arrays["mask"])
        return [[values[row, begin:end] for begin, end in turns] for row, turns in enumerate(places)]

    def _array(self, result: Any, mask: Tensor) -> F32:
        """Return the selected array of the result, f32[B, L], with 0 where masked, as a loss sees it."""
        parts = result if isinstance(result, tuple | list) else (result,)
        if self.part and (self.part >= len(parts) or getattr(parts[self.part], "shape", ()) != mask.shape):
            raise DoesNotApply("it gives no returns")
        values = torch.as_tensor(parts[self.part]).detach()
        if values.dim() == 1:
            values = values[:, None]
        if values.dim() != 2 or values.shape[0] != mask.shape[0] or values.shape[1] not in (1, mask.shape[1]):
            shape = tuple(torch.as_tensor(parts[self.part]).shape)
            raise AssertionError(f"its result is {shape}, not an array of {tuple(mask.shape)}")
        array: F32 = torch.where(mask > 0, values, 0.0).numpy().astype(np.float32)
        return array


def lay_out(
    groups: Sequence[Group],
    scores: Sequence[Score],
    aux: Mapping[str, Any],
    *,
    pad: int = 0,
    late_outcome: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[dict[str, Any], list[list[tuple[int, int]]]]:
    """Return the arrays by role, and the span of each turn in its row: [trajectory][turn] -> (begin, end).

    `pad` columns of padding are added. With `late_outcome`, outcomes are on the last observed token.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    places = [_turn_spans(trajectory) for trajectory in trajectories]
    observed_after = [2 * len(trajectory.turns[-1].observation) for trajectory in trajectories]
    ends = [turns[-1][1] + tokens for turns, tokens in zip(places, observed_after, strict=True)]
    shape = len(trajectories), max(ends) + pad
    rewards, mask, values = (torch.zeros(shape, dtype=dtype) for _ in range(3))
    critic = aux.get("values") or [[np.zeros(end - begin) for begin, end in turns] for turns in places]
    for row, (turns, score) in enumerate(zip(places, scores, strict=True)):
        values[row, : ends[row]] = VALUE_AT_OBSERVATION
        for (begin, end), reward, value in zip(turns, score.turn, critic[row], strict=True):
            values[row, begin:end] = torch.as_tensor(np.array(value))
            if score.in_gradient:
                mask[row, begin:end] = 1
                rewards[row, end - 1] += float(reward)
        if score.in_gradient:
            rewards[row, (ends[row] if late_outcome else turns[-1][1]) - 1] += score.outcome_of()
    index = np.array([group.id for group in groups for _ in group.trajectories], dtype=object)
    return {"rewards": rewards, "mask": mask, "values": values, "index": index}, places


def _turn_spans(trajectory: Trajectory) -> list[tuple[int, int]]:
    found, at = [], 0
    for k, turn in enumerate(trajectory.turns):
        at += len(turn.context_ids) if k else 0  # the prompt is left out
        found.append((at, at + len(turn.completion.token_ids)))
        at = found[-1][1]
    return found
