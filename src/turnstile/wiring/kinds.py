"""Conversion of a recipe's `kind` sections to callables: the named functions with their knobs checked and bound."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from turnstile.config import Kind
from turnstile.errors import ConfigError
from turnstile.lookup import load, nearest, part_of, resolve, unbound
from turnstile.validation import check_types


def bind(room: str, kind: Kind, *, given: Collection[str] = ()) -> Callable[..., Any]:
    """Return the function or class that `kind` names in `room`, with its knobs bound as keyword arguments.

    The table of the kind's part is not bound, but it is checked (`bind_part`). `given` names the parameters that the
    caller will pass. Raises ConfigError for an unknown kind, an unknown knob (naming the nearest), or a value of the
    wrong type.
    """
    function, knobs = resolve(room, kind.kind), kind.knobs
    if (part := part_of(function)) is not None and knobs.pop(part.section, None) is not None:
        bind_part(room, kind)
    return with_knobs(f"{room} kind {kind.kind!r}", function, knobs, given=given)


OFFERED = ("learner", "targets", "sampling", "renderer")
"""Parameters through which the class of a part is given objects of the run."""


def bind_part(room: str, kind: Kind) -> functools.partial[Any] | None:
    """Return the class of the part that a kind declares, with the keys of its table bound, or None if it declares none.

    Raises ConfigError as `bind` does.
    """
    if (part := part_of(resolve(room, kind.kind))) is None:
        return None
    where, table = f"{room}.{part.section}", kind.knobs.get(part.section, {})
    made = load(part.path, f"{where} of {kind.kind!r}")
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} = {table!r} is not a table, {{ key = value }}")
    return with_knobs(where, made, table, given=OFFERED)


def make_part(bound: Callable[..., Any], **offered: Any) -> Any:
    """Return the part made by `bound` from those of the `offered` arguments that its class has parameters for."""
    return bound(**{name: value for name, value in offered.items() if takes(bound, name)})


def with_knobs(
    where: str, function: Any, knobs: Mapping[str, Any], *, given: Collection[str] = ()
) -> functools.partial[Any]:
    """Return `function` with `knobs` checked and bound as in `bind`. Error messages begin with `where`."""
    if not callable(function):
        raise ConfigError(f"{where} is {type(function).__name__}, not something that can be called")
    parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        known = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        taken = [name for name in known if name not in given]
        for knob in knobs:
            if knob not in taken:
                hint = nearest(knob, taken) if taken else "it has none"
                raise ConfigError(f"{where} has no knob {knob!r}; {hint}")
    return functools.partial(function, **check_types(where, function, knobs))


def takes(function: Callable[..., Any], name: str) -> bool:
    """Return whether `function` has a parameter of that name."""
    return name in inspect.signature(unbound(function)).parameters
