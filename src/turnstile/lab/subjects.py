"""The estimators to measure: all kinds of the table with the knobs they declare, and functions of the same form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnstile.credit.base import SHAPE, Estimator
from turnstile.credit.check import DECLARED, check_estimator
from turnstile.errors import ConfigError, ShapeError, TurnstileError
from turnstile.lab.measure import Subject
from turnstile.lookup import KINDS, resolve


def subject(kind: str, knobs: Mapping[str, Any] | None = None) -> Subject:
    """Return the estimator of this kind, with the invariants that `check_estimator` finds broken.

    Raises ConfigError if the kind is unknown, or if the checker cannot call the estimator at all.
    """
    estimator: Estimator = resolve("credit", kind)
    given = dict(knobs or {})
    try:
        broken = check_estimator(estimator, given)
    except (TypeError, AssertionError, ShapeError) as error:
        shape = "" if isinstance(error, ShapeError) else f"; an estimator is {SHAPE}"
        raise ConfigError(f"credit kind {kind!r} cannot be measured: {error}{shape}") from error
    except TurnstileError:
        broken = {}  # it needs something that the made-up groups lack; measuring it will say what
    return Subject(name=kind, estimator=estimator, knobs=given, broken=broken)


def declared_subjects(kind: str) -> list[Subject]:
    """Return one subject for each set of knobs that the kind declares, or one with its defaults if it declares none."""
    knobs = [each.knobs for each in DECLARED if each.kind == kind]
    return [subject(kind, each) for each in knobs or [{}]]


def everyone() -> list[Subject]:
    """Return every kind of the table with each set of knobs that it declares, or with its defaults."""
    return [each for kind in KINDS["credit"] for each in declared_subjects(kind)]
