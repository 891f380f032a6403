"""SALT's advantage, which averages the credit of steps that several attempts have in common."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence

from turnstile.credit.base import Advantages, Scores
from turnstile.credit.stats import Eps, Of, Scale, normaliser, relative
from turnstile.credit.turns import turns_of
from turnstile.types import Group, Turn


def salt(
    groups: Sequence[Group],
    scores: Scores,
    *,
    of: Of = "total",
    scale: Scale = "std",
    ddof: int = 1,
    eps: Eps = 1e-6,
) -> Advantages:
    """A_{i,t} = mean of A_j over the turns of the group with the same state and action (SALT, arXiv 2510.20022).

    A_j is the advantage of `grpo` of the attempt to which such a turn belongs. The attempts of a group form a graph, in
    which a turn is an edge out of its state (`state_key`), labelled by its action: the tool calls, or else the text.
    Edges with the same state and action are merged, so a step that good and bad attempts have in common is neither
    rewarded nor penalised. All other turns, including those without a state key, keep their attempt's advantage.

    Statistics are float64 over trajectories in the baseline. Raises TrainingError if a reward is not finite.
    """
    step = turns_of(groups, scores)
    own = relative("salt", groups, scores, normaliser("salt", scale, ddof=ddof, eps=eps), of=of)[step.trajectory]
    edges: list[Hashable] = [(place, action(turn)) for place, turn in zip(step.states(), step.turns, strict=True)]
    return step.to_tokens(step.mean_within(edges, own))


def action(turn: Turn) -> str:
    """Return the action of a turn: its tool calls with their arguments, or else its text."""
    calls = [(call.name, call.arguments) for call in turn.message.tool_calls]
    return json.dumps(calls, sort_keys=True, default=str) if calls else turn.message.content.strip()
