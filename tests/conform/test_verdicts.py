"""Everything of ours against the seven invariants, in the way that `turnstile conform` takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from turnstile.conform.verdicts import ROOMS, Subject, conform, form_of, ours
from turnstile.credit.invariants import exempt_of
from turnstile.errors import ConfigError
from turnstile.lookup import KINDS, resolve


@pytest.mark.parametrize("subject", ours(), ids=lambda subject: subject.name.replace(" ", "-"))
@pytest.mark.parametrize("seed", [0, 1])
def test_ours_keep_what_they_do_not_declare_and_declare_no_more(subject: Subject, seed: int) -> None:
    verdicts = conform(subject, seed=seed)
    assert [each.number for each in verdicts] == [1, 2, 3, 4, 5, 6, 7]
    assert [each for each in verdicts if each.standing == "broken"] == []
    assert {each.number for each in verdicts if each.standing == "declared"} == set(subject.exempt)


def test_every_kind_of_the_tables_is_among_ours() -> None:
    names = {subject.name.partition(" ")[0] for subject in ours()}
    assert names == {f"{room}:{kind}" for room in ROOMS for kind in KINDS[room]}


def test_what_is_declared_follows_the_knobs() -> None:
    assert set(exempt_of(resolve("credit", "grpo"), {})) == set()
    assert set(exempt_of(resolve("credit", "grpo"), {"scale": "batch_std"})) == {3}
    assert set(exempt_of(resolve("credit", "turn_return"), {"gamma": 0.8})) == {3, 7}  # unheard of: what it says of any


def test_a_form_is_read_from_names() -> None:
    assert form_of("x", resolve("credit", "rloo")) == "estimator"
    assert form_of("x", resolve("loss", "ppo")) == "loss"
    assert form_of("x", resolve("loss", "value")) == "loss"
    assert form_of("x", resolve("loss_multiplier", "tis")) == "loss_multiplier"
    assert form_of("x", lambda token_level_rewards, response_mask: None) == "padded"
    assert form_of("x", lambda vpreds, returns, response_mask: None) == "padded"
    with pytest.raises(ConfigError, match=r"x takes a, b: that is no form known here; say which with --as \(estimator"):
        form_of("x", lambda a, b: None)


def _fails(groups: Any, scores: Any, aux: Any) -> Any:
    return aux["what nobody gives"]


def _infinite(groups: Any, scores: Any) -> Any:
    return [[np.log(values * 0) for values in turns] for turns in resolve("credit", "grpo")(groups, scores)]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            _fails,
            r"mine raised KeyError: 'what nobody gives' \(test_verdicts.py, line \d+\); as an estimator it is called",
        ),
        (
            lambda groups: None,
            "cannot be called: too many positional arguments; an estimator is .groups, scores",
        ),
        (
            lambda groups, scores, cap: [],
            "cannot be called: missing a required argument: 'cap'; an estimator is",
        ),
        (
            lambda groups, scores: ([], {}),
            "credit '<lambda>' returned tuple; an estimator is .groups, scores, .*",
        ),
        (
            lambda groups, scores, state: [],
            "'<lambda>' returned list; .* with a parameter `state` .advantages, state",
        ),
        (
            _infinite,
            "mine cannot be held to the invariants: the advantage of turn 0 of attempt 0 of g0 is -inf, of fin",
        ),
        (lambda groups, scores, aux, state: ([], state), "mine cannot be held to the invariants: advantages are not"),
    ],
)
def test_what_cannot_be_called_is_one_clear_line(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as told:
        conform(Subject(name="mine", form="estimator", function=function))
    assert "\n" not in str(told.value)


def test_a_declaration_takes_the_place_of_a_counterexample_and_one_too_many_is_told() -> None:
    def bare(groups: Any, scores: Any) -> Any:
        return resolve("credit", "threshold")(groups, scores, positive=0.1, negative=1.0)

    exempt = {7: "no baseline", 1: "why not"}
    first, *_, last = conform(Subject(name="bare", form="estimator", function=bare, exempt=exempt))
    assert (last.standing, last.note) == ("declared", "no baseline")
    assert (first.standing, first.note) == ("holds", "declared broken (why not), but holds")
    *_, undeclared = conform(Subject(name="bare", form="estimator", function=bare))
    assert undeclared.standing == "broken"
    assert "where all 3 outcomes are 0.1" in undeclared.note
