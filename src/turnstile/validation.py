"""Validation of values against type hints by pydantic, with one-line descriptions of what does not fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Strict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from turnstile.errors import ConfigError
from turnstile.lookup import nearest

Place = tuple[str | int, ...]
"""The keys and indices that lead to a value nested in another."""


def check_types(where: str, function: Callable[..., Any], knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the knobs after checking their types. Tables become instances of the dataclass that annotates them.

    Raises ConfigError for a knob that does not have the annotated type or range. Only plain types, Literals,
    dataclasses, and tables, lists and unions of these are checked.
    """
    hints = _hints(function)
    return {knob: _fitting(where, hints.get(knob, Any), knob, value) for knob, value in knobs.items()}


def _fitting(where: str, hint: Any, name: str, value: Any) -> Any:
    if isinstance(hint, type) and is_dataclass(hint) and not isinstance(value, hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: {name} = {value!r} {_WRONG['dict'].format()}")
        known = [field.name for field in fields(hint)]
        for key in value:
            if key not in known:
                raise ConfigError(f"{where}: {name} has no key {key!r}; {nearest(key, known)}")
        hints = _hints(hint)
        return hint(**{key: _fitting(where, hints[key], f"{name}.{key}", one) for key, one in value.items()})
    if problem := misfit(adapter(hint), name, value):
        raise ConfigError(f"{where}: {problem}")
    return value


def _hints(function: Any) -> dict[str, Any]:
    """Return the type hints of a function's parameters, or {} if they use names imported only for type checkers."""
    try:
        thing = vars(function).get("__init__", function) if isinstance(function, type) else function
        return get_type_hints(thing, include_extras=True)
    except (NameError, TypeError):
        return {}


def adapter(hint: Any, *, finite: bool = False) -> TypeAdapter[Any]:
    """Return a validator for a type hint. With `finite`, numbers must not be infinite or NaN."""
    return TypeAdapter(_strict(hint), config=ConfigDict(allow_inf_nan=not finite))


def misfit(adapter: TypeAdapter[Any], name: str, value: object) -> str | None:
    """Return a line that says why the value called `name` does not fit, or None if it fits."""
    try:
        adapter.validate_python(value)
    except ValidationError as error:
        place, problems, _ = first_problem(error, value)
        return f"{format_place((name, *place))} {wrong(problems)}"
    return None


def _strict(hint: Any) -> Any:
    """Return a strict version of a type hint.

    Scalars are not coerced, lists and tuples are interchangeable, and unsupported types become Any.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in (bool, int, float, str):
        return Annotated[hint, Strict()]
    if hint in (None, NoneType, ...) or origin is Literal:
        return hint
    if origin is Annotated:
        parts = (_strict(arguments[0]), *arguments[1:])
    elif origin in (Mapping, dict):
        parts = (Any, _strict(arguments[1]))  # TOML keys are strings
    elif origin in (Union, UnionType, Sequence, list, tuple):
        parts = tuple(map(_strict, arguments))
    else:
        return Any
    generic: Any = {UnionType: Union, Sequence: list}.get(origin, origin)  # a Sequence of Any would accept a string
    return generic[parts]


def first_problem(error: ValidationError, value: object) -> tuple[Place, list[ErrorDetails], int]:
    """Return the place of the first problem in `value`, all problems at that place, and the number of other places.

    If each type of a union rejects a value, the problem is that of the type that matched furthest.
    """
    found = [(_place(each, value), each) for each in error.errors()]
    first = found[0][0]
    place = max((place for place, _ in found if place[: len(first)] == first), key=len)
    others = {other for other, _ in found if other[: len(first)] != first}
    return place, [each for other, each in found if other == place], len(others)


def _place(problem: ErrorDetails, value: Any) -> Place:
    """Return the place of a problem in `value`, without the parts that pydantic adds for the types of a union."""
    found: list[str | int] = []
    for part in problem["loc"]:
        held = value if isinstance(value, Mapping) else range(len(value)) if isinstance(value, list | tuple) else ()
        if part in held:
            found.append(part)
            value = value[part]
        elif problem["type"] == "missing" and part == problem["loc"][-1]:
            found.append(part)
    return tuple(found)


_WRONG = {
    "int": "is not a whole number",
    "float": "is not a number",
    "finite_number": "is not a finite number",
    "bool": "is not true or false",
    "string": "is not a string",
    "none": "",
    "tuple": "is not a list",
    "list": "is not a list",
    "greater_than_equal": "must be at least {ge:g}",
    "greater_than": "must be above {gt:g}",
    "less_than_equal": "must be at most {le:g}",
    "less_than": "must be below {lt:g}",
    "too_short": "must be a list of {min_length}",
    "too_long": "must be a list of {max_length}",
    "model": "is not a section",
    "dict": "is not a table, {{ name = ... }}",
}
"""Descriptions of problems by the beginning of pydantic's problem type."""


def wrong(problems: Sequence[ErrorDetails]) -> str:
    """Return what a value is and what is wrong with it, such as "= 'x' is not a number" or "is missing"."""
    if problems[0]["type"] == "missing":
        return "is missing"
    clauses = list(dict.fromkeys(filter(None, map(_words, problems))))
    return f"= {problems[0]['input']!r} " + " or ".join(
        [*clauses[:1], *(one.removeprefix("is not ") for one in clauses[1:])]
    )


def _words(problem: ErrorDetails) -> str:
    about = problem.get("ctx", {})
    if problem["type"] == "literal_error":
        known = re.findall(r"'([^']*)'", about["expected"])
        if known and isinstance(problem["input"], str):
            return f"is not known; {nearest(problem['input'], known)}"
        return f"is not one of {about['expected'].replace(' or ', ', ')}"
    words = next((words for name, words in _WRONG.items() if problem["type"].startswith(name)), None)
    return f"cannot be read: {problem['msg']}" if words is None else words.format(**about)


def format_place(place: Place) -> str:
    """Return a place as it is written in a recipe, such as rewards.terms[1].gate."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
