"""Measurements of losses and loss multipliers in every setting, with one line of figures for each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from turnstile.errors import ConfigError
from turnstile.lab.judge import Figures, judge
from turnstile.lab.losses import LossBench, LossSubject, gradients, loss_bench
from turnstile.lab.regularisers import REGULARISERS, VALUE, measure_regulariser, measure_value
from turnstile.lab.study import Line, Setting, line
from turnstile.lookup import KINDS, resolve
from turnstile.losses.base import TokenLoss
from turnstile.losses.check import LOSS_MULTIPLIERS, check_loss
from turnstile.losses.multipliers import with_multipliers

DRIFTS = (0.0, 0.03, 0.1)
"""The distance that the policy has moved since it sampled, in logits."""
GAPS = (0.0, 0.1, 0.3)
"""The difference between the sampler's logits and the trainer's."""
BARE = "no factor"
PLAIN: TokenLoss = resolve("loss", "reinforce")
"""Plain policy gradient, the loss with which loss multipliers are measured."""


def measure_loss(subject: LossSubject, bench: LossBench) -> Figures:
    """Return the figures of `subject` on `bench`, against the gradient of the expected return.

    A loss that ignores advantages is compared with the gradient of the quantity that it regularises. Raises
    TurnstileError if the loss needs something that the lab does not have, or if its objective is unknown.
    """
    if subject.name in REGULARISERS:
        return measure_regulariser(subject, bench)
    if subject.name == VALUE:
        return measure_value(subject, bench)
    if not follows_advantage(subject, bench):
        raise ConfigError("its gradient does not depend on the advantages, and what it regularises the lab cannot tell")
    found = gradients(subject, bench)
    noise = float(found.var(axis=0, ddof=1).sum()) * bench.drawn.paths[0].size
    return judge(bench.controls.mean(found), noise, bench.true, exact=False)


def follows_advantage(subject: LossSubject, bench: LossBench) -> bool:
    """Return whether the gradient depends on the advantages; that of a regulariser does not."""
    few = replace(bench, batches=bench.batches[:8], logits=bench.logits[:8])
    return not np.allclose(gradients(subject, few), gradients(subject, few, scale=-2.0), atol=1e-12)


def study_losses(
    subjects: Sequence[LossSubject],
    settings: Sequence[Setting],
    *,
    drifts: Sequence[float] = DRIFTS,
    done: Callable[[Line], None] = lambda found: None,
) -> list[Line]:
    """Return one line per loss, setting and drift; at drift 0 the policy is still the one that sampled.

    `done` is called with each line as soon as it is measured.
    """
    return _study(subjects, settings, drifts, loss_bench, measure_loss, done)


def study_whole(subjects: Sequence[LossSubject], settings: Sequence[Setting]) -> list[Line]:
    """Return one line per setting and regulariser among `subjects`, at the sampling policy.

    The exact gradient is that of the regulariser's expectation over whole episodes.
    """
    chosen = [each for each in subjects if each.name in REGULARISERS]
    measure = functools.partial(measure_regulariser, whole=True)
    return _study(chosen, settings, DRIFTS[:1], loss_bench, measure, lambda found: None)


def study_factors(
    subjects: Sequence[LossSubject],
    settings: Sequence[Setting],
    *,
    gaps: Sequence[float] = GAPS,
    done: Callable[[Line], None] = lambda found: None,
) -> list[Line]:
    """Return one line per loss multiplier, setting and gap between the logits of sampler and trainer.

    The exact gradient is that of the trainer's policy. `done` is called with each line as soon as it is measured.
    """
    return _study(subjects, settings, gaps, functools.partial(loss_bench, proximal="trainer"), measure_loss, done)


def _study(
    subjects: Sequence[LossSubject],
    settings: Sequence[Setting],
    offsets: Sequence[float],
    make_bench: Callable[..., LossBench],
    measure: Callable[[LossSubject, LossBench], Figures],
    on_line: Callable[[Line], None],
) -> list[Line]:
    lines = []
    for setting in settings:
        for drift in offsets:
            bench = make_bench(setting, drift=drift)
            for each in subjects:
                lines.append(line(setting, each, functools.partial(measure, each, bench), drift=drift))
                on_line(lines[-1])
    return lines


def factor_subject(kind: str, knobs: Mapping[str, Any] | None = None) -> LossSubject:
    """Return plain policy gradient with the loss multiplier of this kind. Raises ConfigError if the kind is unknown."""
    given = dict(knobs or {})
    loss = with_multipliers(PLAIN, [functools.partial(resolve("loss_multiplier", kind), **given)])
    return LossSubject(name=kind, loss=loss, knobs=given, broken=check_loss(loss))


def multiplier_subjects(kind: str) -> list[LossSubject]:
    """Return one subject for the kind with its defaults, and one for each set of knobs that it declares."""
    knobs = [each.knobs for each in LOSS_MULTIPLIERS if each.kind == kind and each.knobs]
    return [factor_subject(kind, each) for each in ({}, *knobs)]


def every_factor() -> list[LossSubject]:
    """Return plain policy gradient without a loss multiplier, then with each loss multiplier of the table."""
    bare = LossSubject(name=BARE, loss=PLAIN, broken=check_loss(PLAIN))
    return [bare, *(each for kind in KINDS["loss_multiplier"] for each in multiplier_subjects(kind))]
