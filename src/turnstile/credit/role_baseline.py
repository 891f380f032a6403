"""Self-play credit, which compares each role with its own moving average."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnstile.credit.base import Advantages, Scores, State
from turnstile.credit.invariants import at, declare
from turnstile.credit.stats import check_range
from turnstile.credit.turns import seat_outcomes, turns_of
from turnstile.types import Group


@declare(at({7: "the moving average has yet to reach the rewards"}))
def role_baseline(
    groups: Sequence[Group], scores: Scores, state: State, *, decay: float = 0.95
) -> tuple[Advantages, State]:
    """A_{i,role} = R_{i,role} - b[env, role], with b a moving average (SPIRAL, arXiv 2506.24119).

    This is the paper's role-conditioned advantage estimation. After each game, b <- decay b + (1 - decay) R. The role
    is the agent that speaks (`Turn.agent`), and R its own outcome. The baseline of each environment and role starts at
    0. A step subtracts the baseline from before the step, and then updates it once for its n games by their mean, so
    that their order does not matter: b <- decay^n b + (1 - decay^n) mean R. The baselines are the estimator's `state`,
    which checkpoints store. Equal rewards give 0 only once the average has reached them.

    Computed in float64. Raises TrainingError if a reward is not finite.
    """
    check_range("role_baseline", 0.0, 1.0, decay=decay)
    step = turns_of(groups, scores)
    outcomes = seat_outcomes(step, scores)
    roles = [f"{groups[g].task.env}/{turn.agent}" for g, turn in zip(step.group, step.turns, strict=True)]
    seen: dict[str, dict[int, float]] = {}
    for role, trajectory, outcome, counts in zip(roles, step.trajectory, outcomes, step.in_baseline, strict=True):
        if counts:
            seen.setdefault(role, {})[int(trajectory)] = float(outcome)
    values = outcomes - np.array([state.get(role, 0.0) for role in roles], dtype=np.float64)
    baselines = dict(state)
    for role, found in seen.items():
        kept = decay ** len(found)
        baselines[role] = kept * float(state.get(role, 0.0)) + (1 - kept) * float(np.mean(list(found.values())))
    return step.to_tokens(values), baselines
