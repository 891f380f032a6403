"""AEM's advantage: turns where the policy was sure weigh more, by a measure that a group sets itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from turnstile.credit.base import EQUAL, Advantages, Scores
from turnstile.credit.invariants import WHOLE_STEP, at, declare
from turnstile.credit.stats import F64, Flags, Of, Scale, check_knob, check_range, normaliser, relative
from turnstile.credit.turns import Turns, turns_of
from turnstile.types import Group


@declare(at(), at({3: WHOLE_STEP}, measure="surprisal", among="batch"))
def aem(
    groups: Sequence[Group],
    scores: Scores,
    *,
    strength: float = 1.0,
    measure: Literal["entropy", "surprisal"] = "entropy",
    among: Literal["group", "batch"] = "group",
    of: Of = "outcome",
    scale: Scale = "std",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Advantages:
    """A_{i,t} = A_i w_{i,t}, w = exp(-strength U_t) / mean exp(-strength U) (AEM, arXiv 2605.00425).

    A_i is `grpo`'s. U_t says how unsure the policy was of the whole turn: the mean entropy of its tokens, or with
    `measure = "surprisal"` the mean of -log p of those that were sampled, scaled to [0, 1] by the least and the
    greatest `among` the group's turns (or the step's), over which the mean is taken too, so the average weight stays 1.
    A sure turn of a failed attempt is pushed down harder, which spreads the policy while most attempts fail; a sure
    turn of a solved one is pushed up harder, which gathers it once most succeed.

    Measure by turn, normalised by its length and within the group, and a factor on the advantage are what summaries of
    the paper say; the form of w and that it falls with U are our reading of its analysis, not checked against its
    formula. In EMPG (`empg` with `zeta = 0`) the same is done over the step and then centred.

    Statistics in float64 over trajectories in the baseline. Raises TrainingError where the entropies asked for are
    missing, and for a reward that is not finite.
    """
    check_knob("aem", "measure", measure, ("entropy", "surprisal"))
    check_knob("aem", "among", among, ("group", "batch"))
    check_range("aem", 0.0, np.inf, strength=strength)
    step = turns_of(groups, scores)
    own = relative("aem", groups, scores, normaliser("aem", scale, ddof=ddof, eps=eps), of=of)[step.trajectory]
    takes_part = (step.counted | step.learning) & step.valued
    unsure = np.zeros_like(own)
    unsure[takes_part] = _unsure(step, takes_part, measure)

    def weights(values: F64, counted: Flags) -> F64:
        if not counted.any():
            return np.ones_like(values)
        low, high = values[counted].min(), values[counted].max()
        raw = np.exp(-strength * (values - low) / (high - low)) if high - low >= EQUAL else np.ones_like(values)
        return np.asarray(raw / raw[counted].mean(), dtype=np.float64)

    known = replace(step, counted=step.counted & step.valued)
    labels = step.group.tolist() if among == "group" else [0] * len(own)
    return step.to_tokens(own * known.within(labels, unsure, weights))


def _unsure(step: Turns, chosen: Flags, measure: str) -> list[float]:
    """Return the uncertainty of each chosen turn, in nats a token."""
    if measure == "entropy":
        return [float(values.mean()) for values in step.entropies("aem", chosen)]
    sampled = [step.turns[t].completion.logprobs for t in np.flatnonzero(chosen).tolist()]
    return [-float(logprobs.mean(dtype=np.float64)) for logprobs in sampled]
