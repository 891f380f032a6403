"""A recipe's `kind` sections to callables: the function it names with its knobs bound and checked."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from turnstile.config import Kind
from turnstile.errors import ConfigError
from turnstile.lookup import nearest, resolve
from turnstile.validation import check_types


def bind(room: str, kind: Kind, *, given: Collection[str] = ()) -> Callable[..., Any]:
    """The function or class that `kind` names in `room` with its knobs as keyword arguments.

    `given` names the parameters that will be passed at the call. Raises ConfigError for an unknown kind, for a knob
    that the function does not take, naming the nearest it does, and for a value that is not of the knob's type.
    """
    return with_knobs(f"{room} kind {kind.kind!r}", resolve(room, kind.kind), kind.knobs, given=given)


def with_knobs(
    where: str, function: Any, knobs: Mapping[str, Any], *, given: Collection[str] = ()
) -> functools.partial[Any]:
    """`function` with `knobs` bound, checked as in `bind`; errors begin with `where`."""
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
    """Whether `function` has a parameter of that name."""
    inner = function.func if isinstance(function, functools.partial) else function
    return name in inspect.signature(inner).parameters
