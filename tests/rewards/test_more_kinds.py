"""Rewards of answers, length, tests, potentials and events, against numbers computed by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from made_groups import attempt
from turnstile.credit.samples import sample_trajectory
from turnstile.errors import ConfigError
from turnstile.rewards.answers import exact, regex, well_formed
from turnstile.rewards.events import novelty, reward_machine, tags
from turnstile.rewards.length import efficiency, long_trajectory, overlong
from turnstile.rewards.penalties import multiplicative, tool_bonus
from turnstile.rewards.shaping import bounded, centred, information_gain, potential, self_correction
from turnstile.swe.rewards import share_of_tests, weighted_tests
from turnstile.types import Message, Stop, Task, ToolCall, Trajectory

TASK = Task(id="t", env="e", data={"answer": 42})


def said(*texts: str) -> Trajectory:
    return attempt(0, [1] * len(texts), said=texts)


def recorded(turns: Sequence[Mapping[str, Any]], **signals: Any) -> Trajectory:
    return sample_trajectory([1] * len(turns), turn_signals=turns, signals=signals)


def test_exact() -> None:
    assert exact(TASK, said("41", " 42\n")) == 1.0
    assert exact(TASK, said("42", "41")) == 0.0
    assert exact(TASK, said("so 41, no: the answer is 42."), pattern=r"is (\d+)") == 1.0
    assert exact(TASK, said("1, then 42"), pattern=r"\d+") == 1.0
    assert exact(TASK, said("none"), pattern=r"\d+") == 0.0
    assert exact(TASK, said("the answer is 42"), pattern=r"\d*") == 1.0  # the empty match at the end does not count
    assert exact(TASK, said("(empty)"), pattern=r"(\d+)?\(") == 0.0  # a group that took no part
    word = Task(id="t", env="e", data={"answer": "Yes"})
    assert (exact(word, said("YES")), exact(word, said("YES"), ignore_case=False)) == (1.0, 0.0)
    assert exact(TASK, said()) == 0.0
    assert exact(TASK, replace(said("42"), stop=Stop.ERROR)) is None


def test_regex_and_format() -> None:
    assert regex(TASK, said("a", "x\ny"), pattern="x.y") == 1.0
    assert regex(TASK, said("x y", "b"), pattern="x.y") == 0.0
    assert well_formed(TASK, said("<a>1</a>", "<a>1</a> and"), pattern="<a>.*</a>", malus=0.5).tolist() == [1.0, -0.5]


def test_overlong() -> None:
    def of(tokens: Sequence[int]) -> float | None:
        return overlong(TASK, sample_trajectory(tokens), limit=10, buffer=4)

    assert [of([6]), of([4, 3]), of([10]), of([8, 8])] == [0.0, -0.25, -1.0, -1.0]


def test_long_trajectory() -> None:
    found = [long_trajectory(TASK, sample_trajectory([1] * k), threshold=2, most=6) for k in (1, 2, 3, 6, 8)]
    assert found == [0.0, 0.0, -0.25, -1.0, -1.0]


def test_efficiency() -> None:
    trajectory = recorded([{}, {}, {}], resolved=True)
    assert efficiency(TASK, trajectory, signal="resolved", gamma=0.5) == 0.25
    assert efficiency(TASK, recorded([{}], resolved=None), name="resolved") is None
    assert efficiency(TASK, recorded([{}] * 9, score=-0.5), name="score") == -0.5  # failing longer is no better


def verdict(f2p: Any, p2p: Any) -> Trajectory:
    return recorded([{}], f2p_passed=f2p, f2p_total=4, p2p_passed=p2p, p2p_total=10)


def test_share_of_tests() -> None:
    assert share_of_tests(TASK, verdict(3, 10)) == 0.75
    assert share_of_tests(TASK, verdict(3, 9)) == 0.0
    assert share_of_tests(TASK, verdict(3, 9), unbroken=False, kept=0.5) == pytest.approx(0.375 + 0.45)
    assert share_of_tests(TASK, verdict(None, None)) is None
    bare = recorded([{}], f2p_passed=1, f2p_total=1, p2p_passed=0, p2p_total=0)
    assert share_of_tests(TASK, bare, kept=0.5) == 1.0


def weighed(passed: Any, weights: Any, *, kept: Any = 3) -> Trajectory:
    counts = {"f2p_passed": 2, "f2p_total": 4, "p2p_passed": kept, "p2p_total": 3}
    return recorded([{}], f2p_tests=passed, test_weights=weights, **counts)


def test_weighted_tests() -> None:
    passed = {"easy": True, "fair": True, "hard": False}
    weights = {"easy": 0.125, "fair": 0.25, "hard": 0.625, "gone": 9.0}
    assert weighted_tests(TASK, weighed(passed, weights)) == 0.375
    assert weighted_tests(TASK, weighed(passed | {"hard": True}, weights)) == 1.0
    assert weighted_tests(TASK, weighed(passed, dict.fromkeys(passed, 0.0))) == 0.5  # everybody passes: two of four
    assert weighted_tests(TASK, weighed({}, {})) == 0.5
    assert weighted_tests(TASK, weighed(passed, weights, kept=2)) == 0.0
    assert weighted_tests(TASK, weighed(passed, weights, kept=2), unbroken=False) == 0.375
    assert weighted_tests(TASK, weighed(passed, weights, kept=None)) is None
    assert weighted_tests(TASK, weighed(None, weights)) is None
    for wrong in (math.nan, -1.0, None, "0.5"):
        with pytest.raises(ConfigError, match=r"gives 'hard' the weight .*, not a number of 0 or more"):
            weighted_tests(TASK, weighed(passed, weights | {"hard": wrong}))


def test_multiplicative() -> None:
    plain = {"outcome": 0.5, "slips": 0, "late": False, "escaped": 0}

    def of(**signals: Any) -> float | None:
        factors = {"slips": 0.5, "late": 0.8}
        return multiplicative(TASK, recorded([{}], **plain | signals), penalties=factors, hard=["escaped"], cost=2.0)

    found = [of(), of(slips=1), of(slips=2), of(late=True), of(slips=2, late=True)]
    assert found == pytest.approx([0.5, 0.25, 0.125, 0.4, 0.1])
    assert of(escaped=True) == of(escaped=3, outcome=1.0, slips=1) == -2.0
    assert of(outcome=0.0, slips=1) == 0.0
    assert of(outcome=None) is of(slips=None) is of(escaped=None) is None
    assert multiplicative(TASK, recorded([{}], resolved=True), signal="resolved") == 1.0
    for signals, line in (({"outcome": -0.1}, "wants outcome >= 0"), ({"outcome": math.nan}, "wants a number, but the"),
                          ({"slips": -1}, "wants a count of 0 or more"), ({"slips": "x"}, "slips = 'x'")):  # fmt: skip
        with pytest.raises(ConfigError, match=line):
            of(**signals)


def calling(*names: Sequence[str], step: int | None) -> Trajectory:
    plain = recorded([{}] * len(names), training_step=step)
    calls = [tuple(ToolCall(id="c", name=name, arguments={}) for name in of_turn) for of_turn in names]
    turns = zip(plain.turns, calls, strict=True)
    return replace(plain, turns=tuple(
        replace(turn, message=Message(role="assistant", tool_calls=of_turn)) for turn, of_turn in turns
    ))  # fmt: skip


def test_tool_bonus_fades() -> None:
    calls = [["run", "view"], [], ["submit"]]
    found = [tool_bonus(TASK, calling(*calls, step=step), steps=4) for step in (0, 1, 2, 3, 4, 9)]
    expected = [0.3, 0.3 * (1 + math.sqrt(0.5)) / 2, 0.15, 0.3 * (1 - math.sqrt(0.5)) / 2, 0.0, 0.0]
    assert found == pytest.approx(expected)
    assert tool_bonus(TASK, calling(*calls, step=0), steps=4, but=["submit"]) == pytest.approx(0.2)
    assert tool_bonus(TASK, calling(*[["run"]] * 20, step=0), steps=4) == 1.0
    assert tool_bonus(TASK, calling(*calls, step=None), steps=4) == 0.0  # in an evaluation
    assert tool_bonus(TASK, replace(calling(*calls, step=0), stop=Stop.ERROR), steps=4) is None


def test_information_gain() -> None:
    known = recorded([{}] * 3, answer_probabilities=[0.25, 0.5, 0.375, 1.0])
    assert information_gain(TASK, known).tolist() == [0.25, -0.125, 0.0]
    assert information_gain(TASK, known, last=True).tolist() == [0.25, -0.125, 0.625]
    assert information_gain(TASK, recorded([{}] * 2, answer_probabilities=None)).tolist() == [0.0, 0.0]
    for wrong in ([0.5] * 3, [0.5, math.nan, 0.5, 0.5], [0.5, 1.5, 0.5, 0.5], "high", [None] * 4):
        with pytest.raises(ConfigError, match="wants 4 probabilities for the 3 turns of task 't'"):
            information_gain(TASK, recorded([{}] * 3, answer_probabilities=wrong))


def test_potential_telescopes_to_its_start() -> None:
    trajectory = recorded([{"phi": 1.0}, {"phi": 3.0}, {"phi": 5.0}])
    found = potential(TASK, trajectory, signal="phi", gamma=0.5, start=2.0)
    assert found.tolist() == [0.5 * 1 - 2, 0.5 * 3 - 1, 0.0 - 3]  # the last state counts as an end
    assert sum(0.5**t * value for t, value in enumerate(found)) == pytest.approx(-2.0)


def test_bounded() -> None:
    trajectory = recorded([{"p": 0.25}, {"p": 0.75}, {"p": 0.5}])
    delta = bounded(TASK, trajectory, signal="p")
    assert delta.tolist() == [-0.5, 0.75, 0.0]
    assert np.cumsum(delta[::-1])[::-1].tolist() == [0.25, 0.75, 0.0]  # what is to come is p_t, the outcome aside
    assert bounded(TASK, trajectory, signal="p", form="clip", eta=0.5).tolist() == [-0.25, 0.0, 0.0]


def test_centred() -> None:
    found = centred(TASK, recorded([{}], r=2.0, reference=[1.0, 2.0]), signal="r")
    assert found == pytest.approx((1 / (1 + math.exp(-1)) + 0.5) / 2)
    assert centred(TASK, recorded([{}], r=-2000.0, reference=0.0), signal="r") == 0.0
    assert centred(TASK, recorded([{}], r=None, reference=0.0), signal="r") is None


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [([False, None, True], 2.0), ([True, False], -2.0), ([True, False, True], 0.0), ([None, None], 0.0), ([], 0.0)],
)
def test_self_correction(verdicts: Sequence[bool | None], expected: float) -> None:
    played = recorded([{"tests_passed": verdict} for verdict in verdicts])
    assert self_correction(TASK, played, signal="tests_passed", bonus=2.0) == expected


def test_tags() -> None:
    trajectory = recorded([{"tag": "plan"}, {"tag": "act"}, {"tag": None}])
    assert tags(TASK, trajectory, rewards={"plan": 0.5, "reflect": 1.0}).tolist() == [0.5, 0.0, 0.0]


def test_novelty() -> None:
    trajectory = attempt(0, [1] * 6, states=["a", "b", "a", "b", "", ""])
    assert novelty(TASK, trajectory).tolist() == [1, 0, 0, 0, 0, 0]
    half = 1 / math.sqrt(2)
    assert novelty(TASK, trajectory, form="count").tolist() == pytest.approx([1, half, half, 0, 0, 0])


def test_reward_machine() -> None:
    states = {"start": {"test": ["seen", 0.25]}, "seen": {"edit": ["start", 0.5], "test": ["seen", -0.125]}}
    trajectory = recorded([{"command": c} for c in ("edit", "test", "look", "test", "edit", "edit", "test")])
    found = reward_machine(TASK, trajectory, states=states)
    assert found.tolist() == [0, 0.25, 0, -0.125, 0.5, 0, 0.25]


@pytest.mark.parametrize(
    ("function", "knobs", "message"),
    [
        (exact, {"key": "reply"}, "task 't' has no 'reply' in its data (there: answer)"),
        (regex, {"pattern": "("}, "'(' is no regular expression"),
        (overlong, {"limit": 3, "buffer": 4}, "wants 0 < buffer <= limit, got 4 and 3"),
        (long_trajectory, {"threshold": 3, "most": 3}, "wants 0 <= threshold < most"),
        (efficiency, {"gamma": 0.0}, "wants 0 < gamma <= 1"),
        (share_of_tests, {"kept": 2.0}, "wants kept in [0, 1]"),
        (potential, {"signal": "phi"}, "needs the signal 'phi', which a turn did not record"),
        (bounded, {"form": "clp"}, "form = 'clp' is not known"),
        (centred, {}, "needs the signal 'outcome', which the episode did not record"),
        (self_correction, {"signal": "tests_passed"}, "needs the signal 'tests_passed'"),
        (tags, {"rewards": {}}, "needs the signal 'tag'"),
        (novelty, {"form": "frist"}, "did you mean 'first'"),
        (reward_machine, {"states": {"start": {"x": ["y"]}}}, "start.x = ['y'] is not [next state, reward]"),
        (reward_machine, {"states": {"start": {"x": 5}}}, "start.x = 5 is not [next state, reward]"),
        (reward_machine, {"states": {"start": ["y", 1]}}, "start.EVENT = ['y', 1] is not [next state, reward]"),
        (reward_machine, {"states": {"begin": {}}}, "there is no state start = 'start'"),
        (multiplicative, {"penalties": {"x": 1.5}}, "wants penalties in [0, 1], got x = 1.5"),
        (multiplicative, {"cost": -1.0}, "wants cost >= 0"),
        (tool_bonus, {"steps": 0}, "wants steps > 0"),
        (tool_bonus, {"steps": 1}, 'add [[graders]] kind = "clock" to the recipe'),
        (weighted_tests, {}, "needs the signal 'f2p_passed'"),
        (information_gain, {}, "needs the signal 'answer_probabilities'"),
    ],
)
def test_bad_input_is_one_clear_line(function: Any, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        function(TASK, said("x"), **knobs)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
