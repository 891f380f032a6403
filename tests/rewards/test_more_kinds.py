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
from turnstile.rewards.shaping import bounded, centred, potential, self_correction
from turnstile.rewards.tested import share_of_tests
from turnstile.types import Stop, Task, Trajectory

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
    assert self_correction(TASK, recorded([{"tests_passed": v} for v in verdicts]), bonus=2.0) == expected


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
        (self_correction, {}, "needs the signal 'tests_passed'"),
        (tags, {"rewards": {}}, "needs the signal 'tag'"),
        (novelty, {"form": "frist"}, "did you mean 'first'"),
        (reward_machine, {"states": {"start": {"x": ["y"]}}}, "start.x = ['y'] is not [next state, reward]"),
        (reward_machine, {"states": {"start": {"x": 5}}}, "start.x = 5 is not [next state, reward]"),
        (reward_machine, {"states": {"start": ["y", 1]}}, "start.EVENT = ['y', 1] is not [next state, reward]"),
        (reward_machine, {"states": {"begin": {}}}, "there is no state start = 'start'"),
    ],
)
def test_bad_input_is_one_clear_line(function: Any, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        function(TASK, said("x"), **knobs)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
