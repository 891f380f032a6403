from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from turnstile.errors import ConfigError
from turnstile.validation import check_types


def typed(
    *,
    plain: float = 0.0,
    maybe: float | None = None,
    table: Mapping[str, float] | None = None,
    several: Sequence[str] = (),
    one_or_more: str | tuple[str, ...] = "",
    pair: tuple[str, float] = ("", 0.0),
    nested: Mapping[str, Mapping[str, tuple[str, float]]] | None = None,
    path: str | Path = "",
    mode: Literal["a", "b"] | None = None,
    share: Annotated[float, Field(ge=0, lt=1)] | None = None,
    either: bool | Literal["auto"] = True,
) -> None: ...


@pytest.mark.parametrize(
    ("knobs", "wanted"),
    [
        ({"maybe": "x"}, "maybe = 'x' is not a number"),
        ({"table": 3}, r"table = 3 is not a table, \{ name = \.\.\. \}"),
        ({"table": {"a": "x"}}, "here: table.a = 'x' is not a number"),
        ({"several": "x"}, "several = 'x' is not a list"),
        ({"several": ["x", 1]}, r"several\[1\] = 1 is not a string"),
        ({"one_or_more": 1}, "one_or_more = 1 is not a string or a list"),
        ({"one_or_more": ["x", 1]}, r"one_or_more\[1\] = 1 is not a string"),
        ({"pair": ["x"]}, r"pair\[1\] is missing"),
        ({"pair": ["x", 1, 2]}, r"pair = \['x', 1, 2\] must be a list of 2"),
        ({"pair": [1, 2]}, r"pair\[0\] = 1 is not a string"),
        ({"nested": {"a": {"b": 1}}}, "nested.a.b = 1 is not a list"),
        ({"mode": "c"}, "mode = 'c' is not known; known: a, b"),
        ({"mode": 3}, "mode = 3 is not one of 'a', 'b'"),
        ({"share": -1}, "share = -1 must be at least 0"),
        ({"share": True}, "share = True is not a number"),
        ({"either": 3}, "either = 3 is not true or false or one of 'auto'"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(knobs: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        check_types("here", typed, knobs)


@pytest.mark.parametrize(
    "knobs",
    [
        {"maybe": 1, "table": {"a": 1.0, "b": 2}, "several": ["x"], "one_or_more": ["x", "y"], "pair": ["x", 1]},
        {"maybe": None, "table": {}, "several": [], "one_or_more": "x", "nested": {"a": {"b": ["c", 0.5]}}},
        {"several": ("x",), "either": "auto", "maybe": float("inf")},
        {"path": Path("x"), "mode": "a", "unknown": object(), "share": 0},
        {"path": 3},  # a union with a type that is not looked at may be anything
    ],
)
def test_a_value_of_its_type_is_taken(knobs: dict[str, Any]) -> None:
    check_types("here", typed, knobs)


@dataclass(frozen=True, kw_only=True)
class Size:
    """A table of two keys."""

    width: int = 1
    height: int = 1


def sized(*, size: Size = Size()) -> None: ...


def test_a_table_of_a_dataclass_takes_its_keys_alone() -> None:
    assert check_types("here", sized, {"size": {"width": 3}}) == {"size": Size(width=3)}
    with pytest.raises(ConfigError, match="here: size has no key 'witdh'; did you mean 'width'"):
        check_types("here", sized, {"size": {"witdh": 3}})
