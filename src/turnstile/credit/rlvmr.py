"""RLVMR's advantage, which compares attempts within their group, and turns with the same cognitive tag."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from turnstile.credit.base import Advantages, Scores, reads, signal_name
from turnstile.credit.stats import Eps, Of, Scale, normaliser, relative
from turnstile.credit.turns import turns_of
from turnstile.types import Group


@reads("tag")
def rlvmr(
    groups: Sequence[Group],
    scores: Scores,
    *,
    alpha: float = 1.0,
    tag: str = "tag",
    of: Of = "outcome",
    scale: Scale = "std",
    ddof: int = 1,
    eps: Eps = 1e-6,
) -> Advantages:
    """A_{i,t} = A_R(i) + alpha A_tag(i,t) (RLVMR, arXiv 2507.22844).

    A_R compares the outcomes of the group's attempts. A_tag compares the step reward r_{i,t} among the group's turns
    with the same tag (planning, exploring, reflecting ...). The environment or the parser records the tag as the turn's
    signal named `tag`. A turn without a tag has A_tag = 0, and a run warns if no turn has one. The weight `alpha` is
    our knob: the paper's own weight could not be checked.

    Statistics are float64 over trajectories in the baseline. Raises TrainingError if a reward is not finite.
    """
    normalise = normaliser("rlvmr", scale, ddof=ddof, eps=eps)
    step = turns_of(groups, scores)
    outcome = relative("rlvmr", groups, scores, normalise, of=of)[step.trajectory]
    labels: list[Hashable] = [
        (int(group), name) if (name := signal_name(turn, tag)) else place
        for place, (group, turn) in enumerate(zip(step.group, step.turns, strict=True))
    ]
    return step.to_tokens(outcome + alpha * step.within(labels, step.rewards, normalise))
