"""A recipe's `kind` sections to callables: the function it names with its knobs bound and checked."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, Literal, get_args, get_origin, get_type_hints

from turnstile.config import Kind
from turnstile.errors import ConfigError
from turnstile.lookup import nearest, resolve


def bind(room: str, kind: Kind, *, given: Collection[str] = ()) -> Callable[..., Any]:
    """The function or class that `kind` names in `room` with its knobs as keyword arguments.

    `given` names the parameters that will be passed at the call. Raises ConfigError for an unknown kind, for a knob
    that the function does not take, naming the nearest it does, and for a value that is not of the knob's type.
    """
    function = resolve(room, kind.kind)
    if not callable(function):
        raise ConfigError(f"{room} kind {kind.kind!r} is {type(function).__name__}, not something that can be called")
    parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        known = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        knobs = [name for name in known if name not in given]
        for knob in kind.knobs:
            if knob not in knobs:
                hint = nearest(knob, knobs) if knobs else "it has none"
                raise ConfigError(f"{room} kind {kind.kind!r} has no knob {knob!r}; {hint}")
    hints = _hints(function)
    for knob, value in kind.knobs.items():
        if wanted := _misfit(hints.get(knob), value):
            raise ConfigError(f"{room} kind {kind.kind!r}: {knob} = {value!r} is not {wanted}")
    return functools.partial(function, **kind.knobs)


PLAIN: dict[Any, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    str: ("a string", (str,)),
}


def _hints(function: Any) -> dict[str, Any]:
    """The types of a function's parameters; none where they name what is there for a type checker alone."""
    try:
        return get_type_hints(vars(function).get("__init__", function) if isinstance(function, type) else function)
    except (NameError, TypeError):
        return {}


def _misfit(hint: Any, value: object) -> str | None:
    """What a plain type or a Literal would have a value be, where the value is not; None for every other type."""
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        if value in choices:
            return None
        known = [choice for choice in choices if isinstance(choice, str)]
        if isinstance(value, str) and known:
            return f"known; {nearest(value, known)}"
        return "one of " + ", ".join(map(repr, choices))
    if hint not in PLAIN:
        return None
    wanted, types = PLAIN[hint]
    fits = isinstance(value, types) and (hint is bool or not isinstance(value, bool))
    return None if fits else wanted


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether `function` has a parameter of that name."""
    inner = function.func if isinstance(function, functools.partial) else function
    return name in inspect.signature(inner).parameters
