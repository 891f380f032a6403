"""The guessing game."""

from __future__ import annotations

import random

import pytest

from turnstile.envs.check import check_env
from turnstile.envs.guess import GuessEnv, demonstrate, guess_tasks, oracle, random_agent
from turnstile.errors import ConfigError
from turnstile.tasks.demonstration import Agent
from turnstile.types import Message, Task, ToolCall


def guess(number: object) -> Message:
    call = ToolCall(id="call00000", name="guess", arguments={"number": number})
    return Message(role="assistant", tool_calls=(call,))


async def opened(secret: int = 11, **knobs: int) -> GuessEnv:
    env = GuessEnv(**knobs)
    await env.reset(Task(id="t", env="guess", data={"secret": secret}))
    return env


async def test_bisection_finds_the_secret():
    env = await opened(11)
    steps = [await env.step(guess(number)) for number in (8, 12, 10, 11)]
    assert [step.messages[0].content for step in steps] == ["higher", "lower", "higher", "right"]
    assert [step.terminated for step in steps] == [False, False, False, True]
    assert [step.signals["consistent"] for step in steps] == [True] * 4
    assert await env.measure() == {"resolved": True, "submitted": True, "modified": True, "rounds": 4}


async def test_a_guess_against_the_answers_is_not_consistent():
    env = await opened(11)
    steps = [await env.step(guess(number)) for number in (8, 8, 3, 9)]
    assert [step.signals["consistent"] for step in steps] == [True, False, False, True]


async def test_the_rounds_end_the_game_and_garbage_costs_one():
    env = await opened(11, rounds=3)
    nothing = await env.step(Message(role="assistant", content="hm"))
    assert nothing.messages == (Message(role="user", content="guess from 1 to 15"),)
    assert (nothing.signals["parsed"], nothing.signals["succeeded"]) == (False, False)
    outside = await env.step(guess(16))
    assert (outside.signals["parsed"], outside.signals["succeeded"], outside.truncated) == (True, False, False)
    last = await env.step(guess(1))
    assert (last.truncated, last.terminated) == (True, False)
    assert await env.measure() == {"resolved": False, "submitted": False, "modified": True, "rounds": 3}


async def test_the_state_key_holds_what_is_known_and_the_rounds_used():
    one, two = await opened(11), await opened(11)
    for env, numbers in ((one, (5, 8)), (two, (8, 5))):
        for number in numbers:
            await env.step(guess(number))
    assert one.state_key() == two.state_key() == "t:9-15:2"


async def test_secrets_come_from_seeds():
    secrets = set()
    for task in guess_tasks(60):
        env = GuessEnv()
        await env.reset(task)
        for number in range(1, 16):
            if (await env.step(guess(number))).terminated:
                secrets.add(number)
    assert secrets == set(range(1, 16))
    assert guess_tasks(3, seed=1) == guess_tasks(3, seed=1) != guess_tasks(3, seed=2)


async def test_demonstrations_follow_the_answers():
    won = 0
    for number, task in enumerate(guess_tasks(40)):
        env = GuessEnv()
        await env.reset(task)
        steps = demonstrate(task, random.Random(number))
        answers = [await env.step(step.message) for step in steps]
        assert all(answer.signals["consistent"] for answer in answers)
        assert answers[-1].terminated or len(steps) == 5
        won += answers[-1].terminated
    assert 20 < won <= 40


async def games(agents: dict[str, Agent], high: int, rounds: int) -> list[dict[str, object]]:
    """What each task's agent came to."""
    found = []
    for task in guess_tasks(len(agents)):
        env = GuessEnv(high=high, rounds=rounds)
        await env.reset(task)
        while not (step := await env.step(agents[task.id](()))).terminated and not step.truncated:
            assert step.signals["succeeded"]
        found.append(dict(await env.measure()))
    return found


@pytest.mark.parametrize("secret", range(1, 16))
def test_the_oracle_finds_every_secret_in_the_fewest_tries(secret: int) -> None:
    agent = oracle(Task(id="t", env="guess", data={"secret": secret}))
    tries = [agent([]).tool_calls[0].arguments["number"] for _ in range(4)]
    assert secret in tries
    assert len({*tries[: tries.index(secret) + 1]}) == tries.index(secret) + 1


async def test_the_oracle_halves_what_is_left():
    """Three rounds are always enough for seven numbers, and one is enough for the middle one alone."""
    tasks = guess_tasks(40)
    won = await games({task.id: oracle(task, high=7) for task in tasks}, 7, 3)
    assert all(game["resolved"] for game in won)
    assert {game["rounds"] for game in won} == {1, 2, 3}


async def test_the_random_agent_wins_by_chance():
    """1 - (6/7)^3 = 0.37 of its games."""
    agents = {task.id: random_agent(task, random.Random(task.id), high=7) for task in guess_tasks(300)}
    won = sum(bool(game["resolved"]) for game in await games(agents, 7, 3))
    assert 0.28 < won / 300 < 0.46


async def test_keeps_the_promises_of_an_environment():
    task = guess_tasks(1)[0]
    assert await check_env(GuessEnv, task) == []
    assert await check_env(GuessEnv, task, actions=[guess(n) for n in range(1, 16)]) == []


def test_an_impossible_game_is_refused():
    with pytest.raises(ConfigError, match="low <= high"):
        GuessEnv(low=3, high=2)
