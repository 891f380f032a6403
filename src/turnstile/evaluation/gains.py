"""Breakdowns of a gain by kind of task and by package, and an estimate of how much a sharper prior explains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Literal

import numpy as np

from turnstile.evaluation.metrics import (
    LEVEL,
    RESAMPLES,
    EpisodeResult,
    Interval,
    interval_of,
    paired_difference,
    paired_values,
    rate,
)

Division = Literal["kind", "package"]


def split(results: Iterable[EpisodeResult], by: Division) -> dict[str, list[EpisodeResult]]:
    """Return the results by kind of task or by package, the largest part first and equal ones by name."""
    parts: dict[str, list[EpisodeResult]] = {}
    for result in results:
        parts.setdefault(getattr(result, by), []).append(result)
    return dict(sorted(parts.items(), key=lambda item: (-len(item[1]), item[0])))


def breakdown(
    results: Sequence[EpisodeResult], by: Division, of: str = "resolution", *, seed: int = 0
) -> dict[str, Interval]:
    """Return a rate for each kind of task or each package."""
    return {name: rate(part, of, seed=seed) for name, part in split(results, by).items()}


def paired_breakdown(
    before: Sequence[EpisodeResult],
    after: Sequence[EpisodeResult],
    by: Division,
    of: str = "resolution",
    *,
    seed: int = 0,
) -> dict[str, Interval]:
    """Return a paired difference for each kind of task or each package that both sides have."""
    old = split(before, by)
    return {
        name: paired_difference(old[name], part, of, seed=seed)
        for name, part in split(after, by).items()
        if name in old
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class KindGain:
    """One kind's part of a gain, `contribution` = task_share * gain. Contributions add up to the whole gain."""

    kind: str
    train_share: float
    task_share: float
    gain: float
    contribution: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKinds:
    """The share of the evaluated tasks and of the gain that belongs to the k kinds most frequent in training.

    `contribution` is their part of the gain, with its interval. `gain_share` is that part as a share of the whole gain,
    or NaN if there is no positive gain.
    """

    kinds: tuple[str, ...]
    task_share: float
    contribution: Interval
    gain_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PriorShare:
    """The result of `prior_share`."""

    gain: Interval
    kinds: tuple[KindGain, ...]
    train_weighted_gain: float
    even_gain: float
    top1: TopKinds
    top3: TopKinds


def prior_share(
    before: Sequence[EpisodeResult],
    after: Sequence[EpisodeResult],
    training: Mapping[str, float],
    of: str = "resolution",
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> PriorShare:
    """Return how much of a gain lies in the most frequent kinds of training, where a sharper prior would put it.

    `training` gives how often each kind occurs among the training tasks (counts or shares). With g_k the paired gain on
    the evaluated tasks of kind k, h_k their share and p_k the kind's share in training:

    - the gain splits exactly into sum_k h_k g_k, one contribution for each kind;
    - `train_weighted_gain` = sum_k p_k g_k and `even_gain` = mean_k g_k are the gains if kinds were as frequent as in
      training, and if all were equally frequent. If the first is far above the second, common kinds gained and rare
      ones did not;
    - `top1` and `top3` are the kinds most frequent in training (chosen without looking at the gain), with their shares
      of the gain and of the tasks. If the two shares are equal, the gain is spread like the tasks. If the share of the
      gain is near 1 and that of the tasks small, little more than the prior was learnt.

    This is a hint rather than a proof: skill, too, is learnt first where there is most practice, and a prior also helps
    within a kind. Kinds that are not in training have p_k = 0. Kinds that were not evaluated are left out of both
    averages (p_k is rescaled over the rest).
    """
    pairs = paired_values(before, after, of)
    kind_of = {result.task_id: result.kind for result in after}
    n = len(pairs)
    per_kind: dict[str, list[float]] = {}
    for task, (difference, _) in pairs.items():
        per_kind.setdefault(kind_of[task], []).append(difference)
    seen = sum(training.get(kind, 0.0) for kind in per_kind)
    kinds = [
        KindGain(
            kind=kind,
            train_share=training.get(kind, 0.0) / seen if seen else 0.0,
            task_share=len(values) / n,
            gain=float(np.mean(values)),
            contribution=float(np.sum(values)) / n,
        )
        for kind, values in per_kind.items()
    ]
    kinds.sort(key=lambda part: (-part.train_share, -part.task_share, part.kind))
    gain = paired_difference(before, after, of, level=level, resamples=resamples, seed=seed)

    def top(count: int) -> TopKinds:
        names = tuple(part.kind for part in kinds[:count])
        values = np.array([d if kind_of[task] in names else 0.0 for task, (d, _) in pairs.items()], dtype=np.float64)
        held = interval_of(values, gain.n_episodes, (-1.0, 1.0), level, resamples, seed)
        return TopKinds(
            kinds=names,
            task_share=sum(part.task_share for part in kinds[:count]),
            contribution=held,
            gain_share=held.mean / gain.mean if n and gain.mean > 0 else nan,
        )

    return PriorShare(
        gain=gain,
        kinds=tuple(kinds),
        train_weighted_gain=sum(part.train_share * part.gain for part in kinds) if seen else nan,
        even_gain=float(np.mean([part.gain for part in kinds])) if kinds else nan,
        top1=top(1),
        top3=top(3),
    )
