"""Estimators that look inside an attempt, against numbers computed by hand."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest

from made_groups import attempt, by_turn, group_of, nested, score
from turnstile.credit.broadcast import broadcast
from turnstile.credit.empg import empg
from turnstile.credit.entropy_aware import entropy_aware
from turnstile.credit.gigpo import gigpo
from turnstile.credit.grpo import grpo
from turnstile.credit.igpo import igpo
from turnstile.credit.random_step_group import random_step_group
from turnstile.credit.reinforce_pp import reinforce_pp, token_returns
from turnstile.credit.rlvmr import rlvmr
from turnstile.credit.salt import salt
from turnstile.credit.samples import with_forced, with_untrained
from turnstile.credit.segments import segments
from turnstile.credit.turn_return import turn_return
from turnstile.credit.turns import states_shared, turns_of
from turnstile.errors import ConfigError, TrainingError


def test_reinforce_pp_normalises_over_tokens() -> None:
    # A: one turn of 1 token, S = 3; B: one turn of 3 tokens, S = 1. Token returns 3, 1, 1, 1: mean 1.5, std sqrt(.75)
    g = group_of(attempt(0, [1]), attempt(1, [3]))
    scores = [[score(3.0), score(1.0)]]
    found = nested(reinforce_pp([g], scores, eps=0.0))
    assert found[0][0] == pytest.approx([1.5 / math.sqrt(0.75)])
    assert found[1][0] == pytest.approx([-0.5 / math.sqrt(0.75)] * 3)


def test_reinforce_pp_discounts_from_sampled_token_to_sampled_token() -> None:
    # two turns of 2 tokens, r = (1, 0), R = 4, gamma 1/2. From the back: 4, 2, then 1 + 1 = 2, 1
    g = group_of(attempt(0, [2, 2]))
    found = nested(reinforce_pp([g], [[score(4.0, [1.0, 0.0])]], gamma=0.5, eps=0.0))
    returns = [1.0, 2.0, 2.0, 4.0]
    std = math.sqrt(sum((x - 2.25) ** 2 for x in returns) / 4)
    assert [x for turn in found[0] for x in turn] == pytest.approx([(x - 2.25) / std for x in returns])


def test_rewards_that_float32_rounds_differently_are_equal() -> None:
    # thirty times .1 and ten times .3: as float32 sums they differ by 7e-8
    g = group_of(attempt(0, [1] * 30), attempt(1, [1] * 10))
    scores = [[score(1.0, [0.1] * 30), score(1.0, [0.3] * 10)]]
    first = [turns[0] for turns in by_turn(turn_return([g], scores))]
    assert first == [0.0, 0.0]


def test_reinforce_pp_group_baseline_takes_off_rewards_not_discounted_returns() -> None:
    g = group_of(attempt(0, [2]), attempt(1, [2]))
    found = nested(reinforce_pp([g], [[score(1.0), score(1.0)]], gamma=0.9, baseline="group"))
    assert found == [[[0.0, 0.0]], [[0.0, 0.0]]]


def test_a_turn_without_tokens_is_no_step_of_discount() -> None:
    g = group_of(attempt(0, [1, 0, 0, 1]))
    step = turns_of([g], [[score(1.0, [0, 0, 0, 0])]])
    assert [own.tolist() for own in token_returns(step, 0.5)] == [[0.5], [], [], [1.0]]


def test_reinforce_pp_passes_over_turns_that_are_not_trained() -> None:
    # A: 1 token, 5 that are not trained, 1 token; R = 4, gamma 1/2: 2 and 4 along the trained ones. B: 1 token, R = 0.
    shown = with_untrained(attempt(0, [1, 2, 1]), 1, extra=3)
    g = group_of(shown, attempt(1, [1]))
    found = nested(reinforce_pp([g], [[score(4.0, [0, 0, 0]), score(0.0)]], gamma=0.5, eps=0.0))
    mean, std = 2.0, math.sqrt(8 / 3)
    assert [found[0][0], found[0][2], found[1][0]] == [pytest.approx([(x - mean) / std]) for x in (2.0, 4.0, 0.0)]


def test_a_last_turn_that_is_not_trained_is_no_step_of_discount() -> None:
    g = group_of(with_untrained(attempt(0, [1, 2]), 1))
    step = turns_of([g], [[score(1.0, [0, 0.25])]])
    assert token_returns(step, 0.5)[0].tolist() == [1.25]


def test_reinforce_pp_leaves_out_tokens_that_a_grammar_forced() -> None:
    # A: 1 token and 20 forced ones, R = 1; B: 1 token, R = 0. Over two tokens: 1 and -1
    g = group_of(with_forced(attempt(0, [1]), 0, extra=20), attempt(1, [1]))
    found = nested(reinforce_pp([g], [[score(1.0), score(0.0)]], eps=0.0))
    assert found == [[[1.0, *[0.0] * 20]], [[-1.0]]]


@pytest.mark.parametrize("estimator", [turn_return, functools.partial(broadcast, over="turns"), gigpo])
def test_turns_that_are_not_trained_have_no_part_in_what_others_are_compared_with(estimator: Any) -> None:
    """A turn that is not trained comes last, without a reward."""
    scores = [[score(2.0, [1, 3]), score(0.0, [0, 2]), score(1.0, [2, 0])]]
    plain = [attempt(number, [1, 1]) for number in range(3)]
    longer = with_untrained(attempt(0, [1, 1, 1]), 2)
    (expected,) = (nested(estimator([group_of(*plain)], scores)),)
    scores[0][0] = score(2.0, [1, 3, 0])
    found = nested(estimator([group_of(longer, *plain[1:])], scores))
    assert [found[0][:2], *found[1:]] == expected


def test_reinforce_pp_group_baseline() -> None:
    # group means 2 and 10 are taken off: 1, -1, 2, -2 over one token each; std sqrt(2.5)
    groups = [
        group_of(attempt(0, [1]), attempt(1, [1])),
        group_of(attempt(0, [1], group="h"), attempt(1, [1], group="h"), name="h"),
    ]
    scores = [[score(3.0), score(1.0)], [score(12.0), score(8.0)]]
    found = by_turn(reinforce_pp(groups, scores, baseline="group", eps=0.0))
    assert [turns[0] for turns in found] == pytest.approx([x / math.sqrt(2.5) for x in (1, -1, 2, -2)])


# A goes s -> a, B goes s -> b -> s; outcomes 1 and 0. With gamma 1/2 the returns are A: 1/2, 1 and B: 0, 0, 0.
A = attempt(0, [2, 1], states=["s", "a"])
B = attempt(1, [1, 1, 2], states=["s", "b", "s"])
WON = [[score(1.0, [0, 0]), score(0.0, [0, 0, 0])]]


def test_gigpo_by_hand() -> None:
    # state s: returns 1/2, 0, 0, mean 1/6; a and b are met once
    found = by_turn(gigpo([group_of(A, B)], WON, gamma=0.5, scale="none", omega=2.0))
    assert found[0] == pytest.approx([0.5 + 2 * (1 / 2 - 1 / 6), 0.5])
    assert found[1] == pytest.approx([-0.5 - 2 / 6, -0.5, -0.5 - 2 / 6])
    # with deviations: A_E = +-1/sqrt(2); the three returns have deviation sqrt(1/12)
    found = by_turn(gigpo([group_of(A, B)], WON, gamma=0.5, eps=0.0))
    assert found[0] == pytest.approx([math.sqrt(1 / 2) + (1 / 3) / math.sqrt(1 / 12), math.sqrt(1 / 2)])


def test_gigpo_without_states_is_grpo() -> None:
    bare = group_of(attempt(0, [2, 1]), attempt(1, [1, 1, 2]))
    assert by_turn(gigpo([bare], WON)) == by_turn(grpo([bare], WON))


def test_states_of_two_groups_do_not_meet() -> None:
    groups = [group_of(attempt(0, [1], states=["s"])), group_of(attempt(0, [1], states=["s"], group="h"), name="h")]
    assert by_turn(gigpo(groups, [[score(1.0)], [score(0.0)]])) == [[0.0], [0.0]]


def test_states_shared_is_the_share_of_turns_with_company() -> None:
    # s is met three times in this group, a and b once; the other group's s and the turn without a key are alone
    other = group_of(attempt(0, [1, 1], states=["s", ""], group="h"), name="h")
    assert states_shared([group_of(A, B), other]) == pytest.approx(3 / 7)
    assert states_shared([]) == 0.0


def test_salt_merges_equal_steps() -> None:
    # A and B do x in s and get the mean of +.5 and -.5; then A does y in t and B does z there
    g = group_of(
        attempt(0, [1, 1], states=["s", "t"], said=["x", "y"]),
        attempt(1, [1, 1], states=["s", "t"], said=["x ", "z"]),
        attempt(2, [1, 1], states=["s", "t"], said=["w", "z"]),
    )
    scores = [[score(1.0, [0, 0]), score(0.0, [0, 0]), score(0.5, [0, 0])]]
    assert by_turn(salt([g], scores, scale="none")) == [[0.0, 0.5], [0.0, -0.25], [0.0, -0.25]]


def test_empg_by_hand() -> None:
    # mean entropies A: 0, 1; B: 1/2. Scaled by [0, 1] they stay. A_E = +-1/2.
    g = group_of(attempt(0, [2, 1], entropies=[[0, 0], [1]]), attempt(1, [2], entropies=[[0.25, 0.75]]))
    found = by_turn(empg([g], [[score(1.0, [0, 0]), score(0.0)]], zeta=0.5, scale="none"))
    weights = [1.0, math.exp(-1), math.exp(-0.5)]
    mean = sum(weights) / 3
    raw = [0.5 * weights[0] / mean + 0.5 * math.exp(-1), 0.5 * weights[1] / mean, -0.5 * weights[2] / mean]
    centre = sum(raw) / 3
    assert [*found[0], *found[1]] == pytest.approx([x - centre for x in raw])


def test_entropy_aware_by_hand() -> None:
    # entropies 0, 2 | 1, 1: mean 1, squared deviations 2 -> std sqrt(2/3) with ddof 1
    g = group_of(attempt(0, [2], entropies=[[0, 2]]), attempt(1, [2], entropies=[[1, 1]]))
    found = nested(entropy_aware([g], [[score(1.0), score(0.0)]], alpha=0.2, scale="none", eps=0.0))
    z = 1 / math.sqrt(2 / 3)
    assert found[0][0] == pytest.approx([0.5 * (1 - 0.2 * z), 0.5 * (1 + 0.2 * z)])
    assert found[1][0] == pytest.approx([-0.5, -0.5])


@pytest.mark.parametrize("estimator", [empg, entropy_aware])
def test_missing_entropies_are_one_clear_error(estimator: Any) -> None:
    with pytest.raises(TrainingError, match=r"task 't', turn 0: credit .* needs the entropies"):
        estimator([group_of(attempt(0, [1]), attempt(1, [1]))], [[score(1.0), score(0.0)]])


def test_igpo_by_hand() -> None:
    # rewards A: .2, .3 + 1; B: .1, .0 -> mean .4; centred -.2, .9 | -.3, -.4; sums to go with gamma 1/2
    g = group_of(attempt(0, [1, 1]), attempt(1, [1, 1]))
    scores = [[score(1.0, [0.2, 0.3]), score(0.0, [0.1, 0.0])]]
    found = by_turn(igpo([g], scores, gamma=0.5, scale="none"))
    assert found[0] == pytest.approx([-0.2 + 0.45, 0.9])
    assert found[1] == pytest.approx([-0.3 - 0.2, -0.4])


def test_rlvmr_by_hand() -> None:
    # outcome part +-1/2; tag plan holds rewards 1, 0, 2 (mean 1), tag act is alone; turns without a tag too
    g = group_of(attempt(0, [1, 1], tags=["plan", "act"]), attempt(1, [1, 1, 1], tags=["plan", "plan", ""]))
    scores = [[score(1.0, [1, 5]), score(0.0, [0, 2, 7])]]
    found = by_turn(rlvmr([g], scores, alpha=0.5, scale="none"))
    assert found[0] == pytest.approx([0.5, 0.5])
    assert found[1] == pytest.approx([-0.5 - 0.5, -0.5 + 0.5, -0.5])


def test_broadcast_counts_turns() -> None:
    # outcomes by turn: 1 | 0, 0, 0 -> mean 1/4, std 1/2 with ddof 1
    g = group_of(attempt(0, [1]), attempt(1, [1, 1, 1]))
    scores = [[score(1.0), score(0.0, [0, 0, 0])]]
    assert by_turn(broadcast([g], scores)) == by_turn(grpo([g], scores, of="outcome"))
    found = by_turn(broadcast([g], scores, over="turns", eps=0.0))
    assert found[0] == pytest.approx([1.5])
    assert found[1] == pytest.approx([-0.5] * 3)
    totals = by_turn(broadcast([g], [[score(1.0), score(0.0, [1, 0, 1])]], over="turns", of="total", scale="none"))
    assert totals[0] == pytest.approx([1 - 7 / 4])


def test_segments_by_hand() -> None:
    # outcomes 1, 0: mean 1/2, std sqrt(1/2)
    g = group_of(attempt(0, [1, 1]), attempt(1, [1, 1]))
    scores = [[score(1.0, [0.5, -0.5]), score(0.0, [0.25, 0.0])]]
    std = math.sqrt(1 / 2)
    found = by_turn(segments([g], scores, eps=0.0))
    assert [*found[0], *found[1]] == pytest.approx([0.5 / std, 0.5 / std, -0.5 / std, -0.5 / std])
    found = by_turn(segments([g], scores, process=1.0, eps=0.0))
    assert found[0] == pytest.approx([(1 - 0.5) / std, (0.5 - 0.5) / std])  # 1.5 is clipped to 1
    assert found[1] == pytest.approx([(0.25 - 0.5) / std, -0.5 / std])


def test_segments_with_equal_outcomes_leave_the_process_rewards() -> None:
    g = group_of(attempt(0, [1, 1]), attempt(1, [1]))
    found = by_turn(segments([g], [[score(0.5, [0.25, 0.0]), score(0.5)]], process=1.0))
    assert found == [[0.25, 0.0], [0.0]]


def test_random_step_groups_cover_every_turn_once() -> None:
    # one step group of all eight turns: rewards 0..7 against their mean 3.5, whatever was drawn
    g = group_of(*(attempt(i, [1, 1]) for i in range(4)))
    scores = [[score(0.0 - 4 * i - 1, [2 * i, 2 * i + 1]) for i in range(4)]]  # totals 0: A_E = 0
    found = by_turn(random_step_group([g], scores, size=8, scale="none"))
    assert [x for turns in found for x in turns] == pytest.approx([i - 3.5 for i in range(8)])


def test_random_step_groups_are_drawn_by_seed_and_attempt() -> None:
    g = group_of(*(attempt(i, [1, 1]) for i in range(4)))
    scores = [[score(0.0, [2 * i, 2**i]) for i in range(4)]]
    one = by_turn(random_step_group([g], scores, size=3))
    assert one == by_turn(random_step_group([g], scores, size=3))
    assert one != by_turn(random_step_group([g], scores, size=3, seed=1))


@pytest.mark.parametrize(
    "estimator",
    [reinforce_pp, gigpo, salt, empg, entropy_aware, igpo, rlvmr, broadcast, segments, random_step_group],
)
def test_a_step_without_signal_or_data(estimator: Any) -> None:
    assert estimator([], []) == []
    lone = group_of(attempt(0, [2], states=["s"], tags=["x"], entropies=[[1, 2]]))
    assert by_turn(estimator([lone], [[score(0.0)]])) == [[0.0]]
    failed = replace(score(0.0), outcome=None, in_baseline=False, in_gradient=False)
    assert by_turn(estimator([lone], [[failed]])) == [[0.0]]


@pytest.mark.parametrize(
    ("estimator", "knobs", "message"),
    [
        (gigpo, {"gamma": 1.5}, r"gamma = 1.5 must be within \[0, 1\]"),
        (gigpo, {"scale": "stdd"}, "did you mean 'std'"),
        (salt, {"of": "totl"}, "did you mean 'total'"),
        (empg, {"k": -1.0}, "k = -1.0 must be at least 0"),
        (random_step_group, {"size": 1}, "size = 1 must be at least 2"),
        (random_step_group, {"compare": "rewards"}, "did you mean 'reward'"),
        (reinforce_pp, {"baseline": "groups"}, "did you mean 'group'"),
        (segments, {"ddof": 3}, "ddof = 3"),
    ],
)
def test_bad_knobs(estimator: Any, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        estimator([group_of(A, B)], WON, **knobs)
