"""A recipe's kinds with their knobs: what does not fit is one clear line before anything runs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest

from turnstile.config import Kind
from turnstile.credit.base import GIVEN, estimate
from turnstile.errors import ConfigError
from turnstile.sandboxes.containers.provider import PoolSize, Resources
from turnstile.wiring.kinds import bind


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"gama": 0.9}, "credit kind 'gigpo' has no knob 'gama'; did you mean 'gamma'"),
        ({"gamma": "0.9"}, "credit kind 'gigpo': gamma = '0.9' is not a number"),
        ({"gamma": True}, "gamma = True is not a number"),
        ({"ddof": 1.0}, "ddof = 1.0 is not a whole number"),
        ({"scale": "stdd"}, "scale = 'stdd' is not known; did you mean 'std'"),
        ({"scale": 1}, "scale = 1 is not one of 'std', 'none'"),
    ],
)
def test_a_knob_that_does_not_fit_is_named(knobs: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bind("credit", Kind(kind="gigpo", **knobs), given=GIVEN)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_knobs_that_fit_are_bound() -> None:
    bound = bind("credit", Kind(kind="gigpo", gamma=1, scale="none"), given=GIVEN)
    assert estimate(bound, [], [], {}, {}) == ([], {})


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Kind(kind="container", image=3), "image = 3 is not a string"),
        (Kind(kind="container", isolation={"read_only": "no"}), "isolation.read_only = 'no' is not true or false"),
        (Kind(kind="container", isolation={"user": "a", "usr": 1}), "isolation has no key 'usr'; did you mean 'user'?"),
        (
            Kind(kind="container", resources={"ulimits": {"nofile": "x"}}),
            "resources.ulimits.nofile = 'x' is not",
        ),
        (Kind(kind="container", pool=3), "pool = 3 is not a table, { name = ... }"),
        (Kind(kind="container", pool={"most": 0}), "pool.most = 0 must be above 0"),
    ],
)
def test_classes_too(kind: Kind, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bind("sandbox", kind)
    assert message in str(caught.value)


def test_a_table_becomes_what_the_class_wants() -> None:
    kind = Kind(kind="container", image="x", pool={"warm": 0}, resources={"cpus": 2, "ulimits": {"nofile": 9}})
    bound = bind("sandbox", kind)
    assert isinstance(bound, functools.partial)
    assert bound.keywords == {
        "image": "x",
        "pool": PoolSize(warm=0),
        "resources": Resources(cpus=2, ulimits={"nofile": 9}),
    }
