"""AEM's advantage, which gives more weight to turns on which the policy was confident."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from turnstile.credit.base import EQUAL, Advantages, Scores
from turnstile.credit.invariants import WHOLE_STEP, at, declare
from turnstile.credit.stats import F64, Eps, Flags, Of, Scale, check_knob, check_range, normaliser, relative
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
    eps: Eps = 1e-6,
) -> Advantages:
    """A_{i,t} = A_i w_{i,t}, w = exp(-strength U_t) / mean exp(-strength U) (AEM, arXiv 2605.00425).

    A_i is the advantage of `grpo`. U_t is the policy's uncertainty about turn t: the mean entropy of its tokens or,
    with `measure = "surprisal"`, the mean of -log p of the sampled tokens. It is scaled to [0, 1] by the minimum and
    maximum `among` the turns of the group (or of the step). The mean in w is over the same turns, so the average weight
    stays 1. A confident turn of a failed attempt is pushed down harder, which spreads the policy while most attempts
    fail. A confident turn of a successful attempt is pushed up harder, which sharpens the policy once most attempts
    succeed.

    Summaries of the paper describe a turn-level measure, normalised by length and within the group, and a factor on the
    advantage. The form of w, and that it falls with U, are our reading of the paper's analysis, not checked against its
    formula. EMPG (`empg` with `zeta = 0`) does the same over the step and then centres the result.

    Statistics are float64 over trajectories in the baseline. Raises TrainingError if the entropies it needs are
    missing, or if a reward is not finite.
    """
    check_knob("aem", "measure", measure, ("entropy", "surprisal"))
    check_knob("aem", "among", among, ("group", "batch"))
    check_range("aem", 0.0, np.inf, strength=strength)
    step = turns_of(groups, scores)
    own = relative("aem", groups, scores, normaliser("aem", scale, ddof=ddof, eps=eps), of=of)[step.trajectory]
    takes_part = (step.in_baseline | step.in_gradient) & step.valued
    unsure = np.zeros_like(own)
    unsure[takes_part] = _unsure(step, takes_part, measure)

    def weights(values: F64, counted: Flags) -> F64:
        if not counted.any():
            return np.ones_like(values)
        low, high = values[counted].min(), values[counted].max()
        raw = np.exp(-strength * (values - low) / (high - low)) if high - low >= EQUAL else np.ones_like(values)
        return np.asarray(raw / raw[counted].mean(), dtype=np.float64)

    known = replace(step, in_baseline=step.in_baseline & step.valued)
    labels = step.group.tolist() if among == "group" else [0] * len(own)
    return step.to_tokens(own * known.within(labels, unsure, weights))


def _unsure(step: Turns, chosen: Flags, measure: str) -> list[float]:
    """Return the uncertainty of each chosen turn, in nats per token."""
    if measure == "entropy":
        return [float(values.mean()) for values in step.entropies("aem", chosen)]
    sampled = [step.turns[t].completion.logprobs for t in np.flatnonzero(chosen).tolist()]
    return [-float(logprobs.mean(dtype=np.float64)) for logprobs in sampled]
