from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from turnstile.errors import ConfigError
from turnstile.lookup import KINDS, load, nearest, resolve


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


@pytest.mark.parametrize("path", ["", "module", "module:", ":name", ":"])
def test_a_malformed_path_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="is not of the form package"):
        load(path, "credit")
