from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from turnstile.errors import ConfigError
from turnstile.lookup import KINDS, check_types, nearest, resolve


@pytest.mark.parametrize(("room", "kind"), [(room, kind) for room, table in KINDS.items() for kind in table])
def test_every_kind_in_the_tables_is_there(room: str, kind: str) -> None:
    assert callable(resolve(room, kind))


def test_anything_importable_can_be_named() -> None:
    assert resolve("reward", "json:dumps") is json.dumps


def test_an_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown credit kind 'grppo'; did you mean 'grpo'\?.*package\.module:name"):
        resolve("credit", "grppo")


def test_a_kind_far_from_all_lists_them() -> None:
    with pytest.raises(ConfigError, match="known: direct, gated"):
        resolve("compose", "zzzzzz")


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"there is no module 'no_such\.thing' .*start in the folder that holds it"):
        resolve("loss", "no_such.thing:f")


def test_an_attribute_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="json has no 'dunps'; did you mean 'dumps'"):
        resolve("loss", "json:dunps")


def test_a_broken_import_inside_ones_own_module_is_shown_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_reward_module.py").write_text("import a_package_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError, match="a_package_nobody_has"):
        resolve("reward", "own_reward_module:f")


@pytest.mark.parametrize(
    ("word", "known", "said"),
    [("stepps", ["steps", "groups"], "did you mean 'steps'?"), ("q", ["b", "a"], "known: a, b"), ("q", [], "known: ")],
)
def test_nearest(word: str, known: list[str], said: str) -> None:
    assert nearest(word, known) == said


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
) -> None: ...


@pytest.mark.parametrize(
    ("knobs", "wanted"),
    [
        ({"maybe": "x"}, "maybe = 'x' is not a number"),
        ({"table": 3}, r"table = 3 is not a table, \{ name = \.\.\. \}"),
        ({"table": {"a": "x"}}, "is not a table in which each is a number"),
        ({"several": "x"}, "several = 'x' is not a list"),
        ({"several": ["x", 1]}, "is not a list in which each is a string"),
        ({"one_or_more": 1}, "one_or_more = 1 is not a string or a list"),
        ({"pair": ["x"]}, "is not a list of 2"),
        ({"pair": [1, 2]}, "is not a list of 2 with a string in its place"),
        ({"nested": {"a": {"b": 1}}}, "is not a table in which each is a table in which each is a list of 2"),
        ({"mode": "c"}, "mode = 'c' is not known; known: a, b"),
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
        {"path": Path("x"), "mode": "a", "unknown": object()},
        {"path": 3},  # a union with a type that is not looked at may be anything
    ],
)
def test_a_value_of_its_type_is_taken(knobs: dict[str, Any]) -> None:
    check_types("here", typed, knobs)
