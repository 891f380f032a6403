"""Verdicts on a function's seven invariants: each holds, is broken, is declared broken, or does not apply."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from turnstile.conform.padded import NAMES, examine_padded
from turnstile.conform.padded_losses import examine_padded_loss
from turnstile.credit.base import GIVEN as CREDIT_GIVEN
from turnstile.credit.base import SHAPE
from turnstile.credit.check import examine_estimator
from turnstile.credit.invariants import DoesNotApply, Finding, declarations
from turnstile.errors import ConfigError, TurnstileError
from turnstile.lookup import resolve
from turnstile.losses.check import examine_loss
from turnstile.losses.multipliers import with_multipliers

Form = Literal["estimator", "loss", "loss_multiplier", "padded"]
FORMS: tuple[Form, ...] = get_args(Form)
SHAPES: Mapping[Form, str] = {
    "estimator": SHAPE,
    "loss": "(logprobs f32[N], batch, **knobs) -> (loss f32[N], metrics)",
    "loss_multiplier": "(batch, **knobs) -> (multiplier f32[N], metrics)",
    "padded": "(token_level_rewards, response_mask, index, ...) -> advantages [B, L], or (old_log_prob, log_prob, "
    "advantages, response_mask, ...) -> a scalar",
}
GIVEN: Mapping[Form, tuple[str, ...]] = {
    "estimator": CREDIT_GIVEN,
    "loss": ("logprobs", "batch", "values"),
    "loss_multiplier": ("batch",),
    "padded": tuple(name for names in NAMES.values() for name in names),
}
"""The parameters of each form that are not knobs."""
ROOMS: Mapping[str, Form] = {"credit": "estimator", "loss": "loss", "loss_multiplier": "loss_multiplier"}
"""The tables of built-in kinds, and the form of their functions."""

Standing = Literal["holds", "broken", "declared", "does not apply"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result for one invariant. `note` is the counterexample, the declared reason, or why it does not apply."""

    number: int
    standing: Standing
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A function with its knobs bound, its form, and the invariants it declares broken: number -> reason."""

    name: str
    form: Form
    function: Callable[..., Any]
    exempt: Mapping[int, str] = field(default_factory=dict)


def form_of(name: str, function: Callable[..., Any]) -> Form:
    """Return the form of a function, judged by its parameter names. Raises ConfigError if they match no form."""
    parameters = set(inspect.signature(function).parameters)
    if {"groups", "scores"} <= parameters:
        return "estimator"
    if "batch" in parameters:
        return "loss" if parameters & {"logprobs", "values"} else "loss_multiplier"
    if parameters & {*NAMES["rewards"], *NAMES["logprobs"], *NAMES["predictions"]}:
        return "padded"
    listed = ", ".join(sorted(parameters)) or "nothing"
    raise ConfigError(
        f"{name} takes {listed}: that is no form known here; say which with --as ({', '.join(FORMS)}), or give an "
        "adapter of your own, --as module:function, that makes one of it"
    )


def conform(subject: Subject, *, seed: int = 0) -> list[Verdict]:
    """Return the verdict on each invariant.

    Raises ConfigError if the function cannot be called in its form, or if it returns non-finite values or a wrong shape
    for ordinary input.
    """
    try:
        with np.errstate(all="ignore"):
            findings = _examine(subject, seed)
    except TurnstileError:
        raise
    except (AssertionError, DoesNotApply) as error:
        why = str(error) or f"an assertion of its own failed ({_location(error)})"
        raise ConfigError(f"{subject.name} cannot be held to the invariants: {why}") from error
    except Exception as error:
        raise ConfigError(
            f"{subject.name} raised {type(error).__name__}: {error} ({_location(error)}); "
            f"as {_with_article(subject.form)} it is called as {SHAPES[subject.form]}"
        ) from error
    return [_verdict(number, finding, subject.exempt.get(number)) for number, finding in findings.items()]


def _location(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}, line {last.lineno}"


def _with_article(form: Form) -> str:
    return {"estimator": "an estimator", "padded": "a padded function"}.get(form, f"a {form}")


def _examine(subject: Subject, seed: int) -> dict[int, Finding]:
    function = subject.function
    match subject.form:
        case "estimator":
            return examine_estimator(function, seed=seed)
        case "loss":
            return examine_loss(function, seed=seed)
        case "loss_multiplier":
            return examine_loss(with_multipliers(resolve("loss", "ppo"), [function]), seed=seed)
        case "padded":
            takes = set(inspect.signature(function).parameters)
            to_advantages = takes & set(NAMES["rewards"])
            return (examine_padded if to_advantages else examine_padded_loss)(function, seed=seed)


def _verdict(number: int, finding: Finding, reason: str | None) -> Verdict:
    if finding.seen:
        standing: Standing = "broken" if reason is None else "declared"
        return Verdict(number=number, standing=standing, note=finding.seen if reason is None else reason)
    if finding.why:
        return Verdict(number=number, standing="does not apply", note=finding.why)
    note = f"declared broken ({reason}), but holds" if reason is not None else ""
    return Verdict(number=number, standing="holds", note=note)


def ours() -> list[Subject]:
    """Return every built-in estimator, loss and loss multiplier, with each set of knobs that it declares."""
    return [
        Subject(
            name=_full_name(f"{room}:{each.kind}", each.knobs),
            form=form,
            function=functools.partial(resolve(room, each.kind), **each.knobs),
            exempt=each.exempt,
        )
        for room, form in ROOMS.items()
        for each in declarations(room)
    ]


def _full_name(name: str, knobs: Mapping[str, Any]) -> str:
    return " ".join([name, *(f"{knob}={value}" for knob, value in knobs.items())])
