"""The episode loop: every stop reason, and the trajectory that is kept."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from plays import SCAFFOLD, TASK, FakeEnv, hang, once_then, says, scripted
from turnstile.agents.base import Context, Scaffold
from turnstile.agents.renderer import LinesRenderer
from turnstile.batching.rows import rows_of
from turnstile.envs.base import Rates, Step
from turnstile.errors import EngineError, SandboxError, VerifierError
from turnstile.rollout.episode import Attempt, Limits, Seeds, play
from turnstile.types import I32, JSON, Completion, Message, Sampling, Stage, Stop, Task, Trajectory, Turn

ATTEMPT = Attempt(group="train/1/0/t", number=2, seed=7)
LOOK = [*b"look\n"]


async def played(
    env: FakeEnv,
    *lines: str,
    limits: Limits | None = None,
    sampling: Sampling | None = None,
    scaffold: Scaffold = SCAFFOLD,
    engine: Any = None,
) -> Trajectory:
    engine = engine or scripted(says(*(lines or ("look",))))
    return await play(
        TASK,
        ATTEMPT,
        env=env,
        engine=engine,
        session=engine.open("g"),
        scaffold=scaffold,
        sampling=sampling or Sampling(max_tokens=16),
        limits=limits or Limits(turns=3),
    )


def read(ids: I32) -> str:
    return str(SCAFFOLD.renderer.tokenizer.decode(ids.tolist()))


async def test_an_episode_and_its_tokens() -> None:
    found = await played(FakeEnv(), "look", "submit")
    assert (found.task_id, found.group, found.attempt) == ("t", "train/1/0/t", 2)
    assert (found.stop, found.error) == (Stop.SUBMITTED, None)
    assert [read(turn.context_ids) for turn in found.turns] == ["Go.\nCommands: look | submit\n", "ok\n"]
    assert [read(turn.completion.token_ids) for turn in found.turns] == ["look\n", "submit\n"]
    assert [turn.message.tool_calls[0].name for turn in found.turns] == ["look", "submit"]
    assert [turn.observation[0].content for turn in found.turns] == ["ok", "ok"]
    assert [turn.state_key for turn in found.turns] == ["after 0", "after 1"]  # of the state the action is taken in
    assert [turn.rewards for turn in found.turns] == [{"bonus": 0.5}] * 2
    assert [turn.signals for turn in found.turns] == [{"seen": False}, {"seen": True}]
    assert [turn.fresh for turn in found.turns] == [False, False]
    assert found.signals == {"steps": 2}
    assert found.times.keys() == {"generate", "environment", "measure", "total"}
    (row,) = rows_of(found, [np.ones(5, np.float32), np.ones(7, np.float32)])
    assert read(row.token_ids) == "Go.\nCommands: look | submit\nlook\nok\nsubmit\n"


class Rated(FakeEnv):
    rates: ClassVar[Rates] = {
        "looked": lambda played: bool(played.turns),
        "won": lambda played: played.signals["steps"] > 2,
    }


class Solved(FakeEnv):
    async def measure(self) -> dict[str, JSON]:
        return {"resolved": True}


async def test_an_episode_says_which_rates_of_its_environment_it_reached() -> None:
    assert (await played(Rated(), "look", "submit")).rates == {"looked": True, "won": False}
    assert (await played(Rated(), "look")).rates == {"looked": True, "won": True}
    assert (await played(Rated({"step": SandboxError("it died")}))).rates == {}
    assert (await played(FakeEnv())).rates == {}
    assert (await played(Solved(), "submit")).rates == {"resolution": True}
    assert (await played(Solved(), "look")).rates == {"resolution": False}  # it came to no end of its own


async def test_the_environment_is_measured_once_and_not_closed() -> None:
    env = FakeEnv()
    await played(env)
    assert env.did == ["reset", "step", "step", "step", "measure"]


@pytest.mark.parametrize(
    ("env", "limits", "lines", "stop", "turns"),
    [
        ({}, Limits(turns=5), ("look", "submit"), Stop.SUBMITTED, 2),
        ({"step": Step(terminated=True)}, Limits(turns=5), ("look",), Stop.DONE, 1),
        ({}, Limits(turns=4), ("look",), Stop.TURNS, 4),
        ({"step": Step(truncated=True)}, Limits(turns=5), ("look",), Stop.TURNS, 1),
        ({}, Limits(turns=9, unparsed=2), ("what?", "look", "what?", "what?"), Stop.PARSE, 4),
        ({}, Limits(turns=9, tokens=10), ("look",), Stop.TOKENS, 2),
        ({}, Limits(turns=9, context=28 + 5 + 3 + 5), ("look",), Stop.CONTEXT, 2),
        ({}, Limits(turns=9, context=28), ("look",), Stop.CONTEXT, 0),
        ({"step": hang}, Limits(turns=9, seconds=0.05), ("look",), Stop.TIMEOUT, 1),
        ({"step": SandboxError("it died")}, Limits(turns=9), ("look",), Stop.ERROR, 1),
    ],
)
async def test_every_stop_reason(
    env: dict[str, Any], limits: Limits, lines: tuple[str, ...], stop: Stop, turns: int
) -> None:
    fake = FakeEnv(env)
    found = await played(fake, *lines, limits=limits)
    assert (found.stop, len(found.turns)) == (stop, turns)
    assert ("measure" in fake.did) is (stop is not Stop.ERROR)
    assert (found.signals == {}) is (stop is Stop.ERROR)


def test_every_stop_reason_is_tested() -> None:
    (marks,) = [mark for mark in test_every_stop_reason.pytestmark if mark.name == "parametrize"]
    assert {case[3] for case in marks.args[1]} == set(Stop)


async def test_no_limits() -> None:
    """0 means none: this episode ends by itself."""
    found = await played(FakeEnv(), *["look"] * 30, "submit", limits=Limits(turns=0, seconds=0))
    assert (found.stop, len(found.turns)) == (Stop.SUBMITTED, 31)


async def test_readable_turn_resets_the_count_of_unreadable_ones() -> None:
    found = await played(FakeEnv(), "what?", "look", "what?", "submit", limits=Limits(turns=9, unparsed=2))
    assert found.stop is Stop.SUBMITTED


async def test_max_tokens_fits_the_budget() -> None:
    """Of 12 tokens for the episode, 5 and 5 leave 2; the context leaves what it does not hold."""
    found = await played(FakeEnv(), limits=Limits(turns=9, tokens=12))
    assert [turn.completion.sampling.max_tokens for turn in found.turns] == [12, 7, 2]
    assert [turn.completion.finish for turn in found.turns] == ["stop", "stop", "length"]
    assert found.stop is Stop.TOKENS
    found = await played(FakeEnv(), limits=Limits(turns=9, context=40))
    assert [turn.completion.sampling.max_tokens for turn in found.turns] == [12, 4]
    assert found.stop is Stop.CONTEXT
    held = sum(len(turn.context_ids) + len(turn.completion.token_ids) for turn in found.turns)
    assert held == 40


async def test_requests_have_the_given_sampling() -> None:
    sampling = Sampling(temperature=0.6, top_k=5, max_tokens=9, seed=1, stop=("never",))
    found = await played(FakeEnv(), sampling=sampling)
    asked = [turn.completion.sampling for turn in found.turns]
    assert {(each.temperature, each.top_k, each.max_tokens, each.stop) for each in asked} == {(0.6, 5, 9, ("\n",))}
    assert len({each.seed for each in asked}) == 3


IDS = np.array([3, 1, 2**31 - 1], np.int32)


def seed(attempt: Attempt = ATTEMPT, task: Task = TASK, ids: I32 = IDS, before: Sequence[I32] = ()) -> int:
    """Return the seed of a request with these ids, after requests with the prompts of `before`."""
    seeds = Seeds(task, attempt)
    for each in before:
        seeds.draw(each)
    return seeds.draw(ids)


def test_seeds_depend_on_run_task_attempt_and_prompt() -> None:
    others = [replace(ATTEMPT, group="train/2/0/t"), replace(ATTEMPT, number=3), replace(ATTEMPT, seed=8)]
    found = [seed(), *(seed(other) for other in others), seed(task=replace(TASK, id="u"))]
    found += [seed(ids=IDS[:2]), seed(ids=IDS[::-1]), seed(before=[IDS]), seed(before=[IDS, IDS])]
    assert len(set(found)) == 9
    assert all(0 <= each < 2**56 for each in found)
    assert seed() == seed(Attempt(group="train/1/0/t", number=2, seed=7, hint="is in the prompt"))
    shared = [seed(replace(ATTEMPT, group=name, stream="s")) for name in ("eval/a/0/t", "eval/b/7/t")]
    assert shared[0] == shared[1]
    assert shared[0] not in found


def test_seeds_do_not_depend_on_the_order_of_other_requests() -> None:
    """Parallel requests and branches: another prompt in between changes nothing."""
    other = np.array([9], np.int32)
    assert seed(before=[other, other]) == seed()
    assert seed(before=[IDS, other]) == seed(before=[other, IDS]) == seed(before=[IDS])


def test_seeds_are_equal_on_every_platform() -> None:
    """The digest is of little-endian 32-bit numbers on every machine."""
    ids = struct.pack("<3i", 3, 1, 2**31 - 1)
    prompt = hashlib.blake2b(ids, digest_size=16).hexdigest()
    wanted = hashlib.blake2b(f"7/t/train/1/0/t/2/{prompt}/0".encode(), digest_size=7).hexdigest()
    assert seed() == int(wanted, 16) == 13954534893091800
    assert seed(ids=IDS.astype(">i4")) == seed(ids=IDS.astype(np.int64)) == seed(ids=np.repeat(IDS, 2)[::2]) == seed()


async def test_repeated_prompt_has_another_seed() -> None:
    """The context is rewritten to that of the first turn."""

    class Forgets(LinesRenderer):
        def observation(self, history: Any, new: Any, tools: Any, sampled: I32) -> Context:
            return Context(ids=self.prompt([Message(role="user", content="Go.")], tools), fresh=True)

    scaffold = Scaffold(Forgets(SCAFFOLD.renderer.tokenizer), SCAFFOLD.parser)
    found = await played(FakeEnv(), scaffold=scaffold)
    prompt, seeds = found.turns[0].context_ids, Seeds(TASK, ATTEMPT)
    assert [turn.context_ids.tolist() for turn in found.turns] == [prompt.tolist()] * 3
    assert [turn.completion.sampling.seed for turn in found.turns] == [seeds.draw(prompt) for _ in range(3)]


@pytest.mark.parametrize(
    ("broken", "turns", "text"),
    [
        ({"reset": SandboxError("no room")}, 0, "SandboxError: no room"),
        ({"measure": VerifierError("no verdict")}, 3, "VerifierError: no verdict"),
        ({"reset": hang}, 0, "SandboxError: the environment did not open within 0.05 s"),
    ],
)
async def test_infrastructure_failures_keep_the_turns_so_far(broken: dict[str, Any], turns: int, text: str) -> None:
    found = await played(FakeEnv(broken), limits=Limits(turns=3, seconds=0.05 if "reset" in broken else 60))
    assert (found.stop, found.error, len(found.turns)) == (Stop.ERROR, text, turns)


async def test_hung_measurement_is_an_infrastructure_failure() -> None:
    found = await played(FakeEnv({"measure": hang}), limits=Limits(turns=3, measure_seconds=0.05))
    assert (found.stop, len(found.turns), found.signals) == (Stop.ERROR, 3, {})
    assert found.error is not None
    assert found.error.startswith("VerifierError: the environment did not measure the episode within 0.05 s")
    assert "episode.measure_seconds" in found.error
    assert "measure" in found.times  # so that it is not part of what the turns took


async def test_measuring_does_not_count_towards_the_time_limit() -> None:
    async def slow(_: FakeEnv) -> None:
        await asyncio.sleep(0.2)

    found = await played(FakeEnv({"measure": slow}), limits=Limits(turns=3, seconds=0.1, measure_seconds=60))
    assert (found.stop, found.signals) == (Stop.TURNS, {"steps": 3})


async def test_a_failure_after_two_turns() -> None:
    steps = 0

    async def dies(_: FakeEnv) -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise SandboxError("killed")

    found = await played(FakeEnv({"step": dies}), limits=Limits(turns=9))
    assert (found.stop, len(found.turns), found.signals) == (Stop.ERROR, 3, {})
    assert [turn.stage for turn in found.turns] == [Stage.COMPLETED, Stage.COMPLETED, Stage.DELIVERED]


async def test_trajectory_has_the_action_at_the_time_limit() -> None:
    """Its tokens are at the end of the row, and get their advantages."""
    steps = 0

    async def stuck(env: FakeEnv) -> None:
        nonlocal steps
        steps += 1
        if steps == 2:
            await hang(env)

    found = await played(FakeEnv({"step": stuck}), "look", "submit", limits=Limits(turns=9, seconds=0.1))
    assert (found.stop, found.signals) == (Stop.TIMEOUT, {"steps": 2})
    first, last = found.turns
    assert (first.stage, last.stage) == (Stage.COMPLETED, Stage.DELIVERED)
    assert (read(last.completion.token_ids), last.state_key) == ("submit\n", "after 1")
    assert (last.observation, last.rewards, last.signals) == ((), {}, {})
    (row,) = rows_of(found, [np.ones(5, np.float32), np.full(7, -2.0, np.float32)])
    assert read(row.token_ids) == "Go.\nCommands: look | submit\nlook\nok\nsubmit\n"
    assert row.loss_mask[-7:].all()
    assert row.advantages[-7:].tolist() == [-2.0] * 7


async def test_on_turn_is_called_at_each_stage() -> None:
    env, heard = FakeEnv(), []

    def on_turn(number: int, turn: Turn) -> None:
        heard.append((number, turn.stage, turn.state_key, len(turn.observation), env.did.count("step")))

    engine = scripted(says("look", "submit"))
    await play(
        TASK,
        ATTEMPT,
        env=env,
        engine=engine,
        session=engine.open("g"),
        scaffold=SCAFFOLD,
        sampling=Sampling(max_tokens=16),
        limits=Limits(),
        on_turn=on_turn,
    )
    assert heard == [
        (0, Stage.SAMPLED, "", 0, 0),
        (0, Stage.DELIVERED, "after 0", 0, 0),
        (0, Stage.COMPLETED, "after 0", 1, 1),
        (1, Stage.SAMPLED, "", 0, 1),
        (1, Stage.DELIVERED, "after 1", 0, 1),
        (1, Stage.COMPLETED, "after 1", 1, 2),
    ]


async def test_an_engine_that_fails() -> None:
    class Broken:
        def open(self, share: str) -> str:
            return share

        async def generate(self, prompt_ids: I32, sampling: Sampling, session: str) -> Completion:
            raise EngineError("sampling failed")

        def close(self, session: str) -> None: ...

    found = await played(FakeEnv(), engine=Broken())
    assert (found.stop, found.error) == (Stop.ERROR, "EngineError: sampling failed")


@pytest.mark.parametrize("place", ["reset", "step", "measure"])
@pytest.mark.parametrize("fault", [ZeroDivisionError("a bug"), TimeoutError("its own")])
async def test_program_errors_propagate(place: str, fault: Exception) -> None:
    with pytest.raises(type(fault), match=str(fault)):
        await played(FakeEnv({place: once_then(fault)}))


async def test_slow_agent_times_out_and_is_measured() -> None:
    """A time limit reached while the model samples is the agent's: its work so far is measured."""

    class Slow:
        def __init__(self) -> None:
            self.quick = scripted(says("look"))
            self.open, self.close, self.calls = self.quick.open, self.quick.close, 0

        async def generate(self, prompt_ids: I32, sampling: Sampling, session: str) -> Completion:
            self.calls += 1
            if self.calls == 3:
                await hang(FakeEnv())
            return await self.quick.generate(prompt_ids, sampling, session)

    found = await played(FakeEnv(), engine=Slow(), limits=Limits(turns=9, seconds=0.2))
    assert (found.stop, len(found.turns), found.signals) == (Stop.TIMEOUT, 2, {"steps": 2})


class Forgetful(LinesRenderer):
    """Shows only the last observation after the second turn."""

    def observation(self, history: Any, new: Any, tools: Any, sampled: I32) -> Context:
        added = super().observation(history, new, tools, sampled)
        if sum(message.role == "assistant" for message in history) == 2:
            return Context(ids=self.prompt([Message(role="user", content="Again."), *new], tools), fresh=True)
        return added


async def test_a_rewritten_context_is_the_whole_prompt() -> None:
    asked: list[str] = []
    engine = scripted(says("look"))
    sample = engine.generate

    async def generate(prompt_ids: I32, sampling: Sampling, session: str) -> Completion:
        asked.append(read(prompt_ids))
        return await sample(prompt_ids, sampling, session)

    engine.generate = generate  # type: ignore[method-assign]
    scaffold = Scaffold(Forgetful(SCAFFOLD.renderer.tokenizer), SCAFFOLD.parser)
    found = await played(FakeEnv(), scaffold=scaffold, limits=Limits(turns=4), engine=engine)
    told = "Commands: look | submit\n"
    second = f"Again.\nok\n{told}"
    assert asked == [f"Go.\n{told}", f"Go.\n{told}look\nok\n", second, f"{second}look\nok\n"]
    assert [turn.fresh for turn in found.turns] == [False, False, True, False]
    rows = rows_of(found, [np.ones(5, np.float32)] * 4)
    assert [read(row.token_ids) for row in rows] == [f"Go.\n{told}look\nok\nlook\n", f"{second}look\nok\nlook\n"]
    assert [row.origin for row in rows] == [found.key] * 2
