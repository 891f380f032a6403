"""The knobs of every built-in kind, with their types and ranges and the extra that it needs, without loading the kind.

`make docs` generates `knobs.json` from the code, and `make check` verifies that it is up to date. A recipe can
therefore be checked in a moment, even without torch.
"""

from __future__ import annotations

import collections.abc
import functools
import importlib.util
import json
import operator
import pathlib
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter

from turnstile.errors import ConfigError
from turnstile.hints import hint
from turnstile.lookup import KINDS, nearest
from turnstile.validation import adapter, misfit

SECTIONS = ("credit", "loss", "env", "sandbox", "loss_aggregation")
"""Rooms that have a recipe section of the same name."""
TABLE = pathlib.Path(__file__).with_name("knobs.json")


@functools.cache
def table() -> Mapping[str, Mapping[str, Any]]:
    """Return room -> kind -> {"knobs": {name: knob}, "any"?, "needs"?, "rewardless"?}.

    A knob is {"type", "default"?, "least"?, "above"?, "most"?, "below"?}; a knob that is a table also has {"keys":
    {name: knob}}.
    """
    found: dict[str, dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def check_kind(room: str, where: str, kind: str, knobs: Mapping[str, Any], *, also: Collection[str] = ()) -> str | None:
    """Raise ConfigError for an unknown kind, an unknown or missing knob, a wrong value, or a missing extra.

    Errors name `where`, the kind's key in a recipe. `also` names keys that every section of this room has. Returns a
    line saying that a kind of the user's own is checked later, or None for a built-in kind.
    """
    if ":" in kind:
        return f"{where} = {kind!r} is checked at start"
    kinds, section = table()[room], where.removesuffix(".kind")
    if kind not in kinds:
        others = [other for other, table in KINDS.items() if kind in table and other != room]
        if others:
            there = f"write {others[0]}.kind = {kind!r}" if others[0] in SECTIONS else nearest(kind, kinds)
            raise ConfigError(f"{where} = {kind!r} is no {room} but a kind of {others[0]}; {there}")
        raise ConfigError(
            f"{section}: unknown {room} kind {kind!r}; {nearest(kind, kinds)} (or write your own as "
            "package.module:name)"
        )
    own = kinds[kind]
    for name, value in knobs.items():
        if name in own["knobs"]:
            check_value(f"{section}.{name}", own["knobs"][name], value)
        elif not own.get("any"):
            inside = _knob_path(own, name)
            near = f"it is {section}.{inside}" if inside else _knob_hint(room, name, own["knobs"], also)
            raise ConfigError(f"{section}: {room} kind {kind!r} has no knob {name!r}; {near}")
    lacking = [name for name, knob in own["knobs"].items() if "default" not in knob and name not in knobs]
    if lacking and "name" not in lacking:
        raise ConfigError(f"{section}.{lacking[0]} is missing, which {kind!r} needs")
    if (needs := own.get("needs")) and importlib.util.find_spec(needs["package"]) is None:
        raise ConfigError(
            f"{where} = {kind!r} needs an optional dependency; install it with: "
            f"pip install 'turnstile-rl[{needs['extra']}]'"
        )
    return None


def _knob_path(entry: Mapping[str, Any], name: str) -> str | None:
    """Return the dotted name of a knob of a kind, which may be in one of its tables, or None if it has none."""
    if name in entry["knobs"]:
        return name
    return next((f"{table}.{name}" for table, knob in entry["knobs"].items() if name in knob.get("keys", ())), None)


def _knob_hint(room: str, name: str, own: Iterable[str], also: Iterable[str]) -> str:
    """Return which kinds have a knob that this one lacks, or a hint with the nearest name."""
    having = [
        other if place == name else f"{other} ({place})"
        for other, entry in sorted(table()[room].items())
        if (place := _knob_path(entry, name))
    ]
    if having:
        return f"kinds that have it: {', '.join(having)}"
    known = [*own, *also]
    return hint(name, known) if known else "it has none"


def check_value(where: str, knob: Mapping[str, Any], value: Any) -> None:
    """Raise ConfigError for a value that is not of the knob's type or is out of its range."""
    if "keys" in knob and isinstance(value, Mapping):
        for key, one in value.items():
            if key not in knob["keys"]:
                raise ConfigError(f"unknown key '{where}.{key}'; {hint(key, knob['keys'])}")
            check_value(f"{where}.{key}", knob["keys"][key], one)
    if problem := misfit(_adapter(knob["type"]), where, value):
        raise ConfigError(problem)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if not all(holds(value, knob[name]) for name, (_, holds) in ENDS.items() if name in knob):
        ends = [f"{words} {knob[name]:g}" for name, (words, _) in ENDS.items() if name in knob]
        raise ConfigError(f"{where} = {value!r} must be {' and '.join(ends)}")


ENDS: Mapping[str, tuple[str, Callable[[float, float], bool]]] = {
    "least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "most": ("at most", operator.le),
    "below": ("below", operator.lt),
}
"""Bounds of a range by key, each with its description and the comparison that holds within the range."""


@functools.cache
def _adapter(text: str) -> TypeAdapter[Any]:
    """Return the validator for an annotation given as text, in the form that `typing` prints."""
    names = {"collections": collections, "pathlib": pathlib, "typing": typing}
    return adapter(eval(text, names), finite=True)  # only text from our own table
