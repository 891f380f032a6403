"""Knobs of functions, and values that are not of their types."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from turnstile.lookup import KINDS, resolve


def wrong_knobs(room: str, given: Sequence[str] = ()) -> list[Any]:
    """(kind, knob, a value of the wrong type) for every knob of every kind in a room whose type says one."""
    return [(kind, *pair) for kind in sorted(KINDS[room]) for pair in _wrong(resolve(room, kind), given)]


def _wrong(function: Any, given: Sequence[str]) -> Iterator[tuple[str, Any]]:
    hints = typing.get_type_hints(function.__init__ if isinstance(function, type) else function)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and name not in given and name in hints:
            yield name, _not_a(hints[name])


def _not_a(hint: Any) -> Any:
    """A value that a recipe can hold and that is not of this type."""
    origin = get_origin(hint)
    parts = get_args(hint) if origin in (Union, types.UnionType) else (hint,)
    for value in ("zzz", 7, True, ["zzz"], {"zzz": "zzz"}):
        if not any(_could_be(part, value) for part in parts):
            return value
    raise AssertionError(f"everything could be {hint}")


def _could_be(hint: Any, value: Any) -> bool:
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint)
    if origin is not None:
        wanted = dict if issubclass(origin, Mapping) else list
        return isinstance(value, wanted)
    plain: dict[Any, tuple[type, ...]] = {float: (int, float), int: (int,), str: (str,), bool: (bool,)}
    if hint in plain:
        return isinstance(value, plain[hint]) and (hint is bool or not isinstance(value, bool))
    return False
