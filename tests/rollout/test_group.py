"""Many episodes at once: their order and retries, and that none waits for another."""

from __future__ import annotations

import asyncio
import logging
import math
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers import tiny_llama
from plays import LOOKS, FakeEnv, hang, once_then, player, says, scripted, tasks
from turnstile.engines.local.transformers import TransformersEngine
from turnstile.errors import ConfigError, EngineError, SandboxError
from turnstile.rewards.graders import Stateless
from turnstile.rollout import group as rollout
from turnstile.rollout.deadlines import Deadlines
from turnstile.rollout.episode import Attempt, Limits
from turnstile.rollout.failures import Failures
from turnstile.rollout.group import EpisodeCallback
from turnstile.tracking.board import EpisodeStatus, StatusBoard
from turnstile.types import Group, Stop, Trajectory, Turn


class Remembers(Stateless):
    """A grader that remembers its training steps and awaits `then`."""

    def __init__(self, then: Callable[[], Awaitable[None]] | None = None) -> None:
        self.steps: list[int] = []
        self.then = then

    async def grade(self, groups: Sequence[Group], step: int | None) -> list[Group]:
        if step is not None:
            self.steps.append(step)
        if self.then is not None:
            await self.then()
        return list(groups)

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps}  # its own, and not a copy

    def restore(self, state: Mapping[str, Any]) -> None:
        self.steps = list(state["steps"])


async def test_restores_grader_state_when_grading_is_cancelled() -> None:
    """The step is graded again when the run resumes, and must not count twice."""
    begun = asyncio.Event()

    async def hangs() -> None:
        begun.set()
        await asyncio.Event().wait()

    first, second = Remembers(), Remembers(hangs)
    some = player(FakeEnv, graders=(first, second))
    first.steps.append(1)
    playing = asyncio.ensure_future(some.groups(tasks(1), 1, label="train/2", seed=0, step=2))
    await begun.wait()
    assert some.board.counts()[EpisodeStatus.GRADING] == 1
    assert (first.steps, second.steps) == ([1, 2], [2])
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert (first.state(), second.state()) == ({"steps": [1]}, {"steps": []})
    assert not any(some.board.counts().values())


async def test_board_shows_episode_status() -> None:
    board, both, go = StatusBoard(), asyncio.Barrier(3), asyncio.Event()

    async def wait(_: FakeEnv) -> None:
        if not go.is_set():
            await both.wait()
        await go.wait()

    some = player(lambda: FakeEnv({"step": wait}), concurrent=2, board=board)
    playing = asyncio.ensure_future(some.groups(tasks(3), 1, label="x", seed=0))
    await both.wait()
    assert {place: count for place, count in board.counts().items() if count} == {
        EpisodeStatus.WAITING: 1,
        EpisodeStatus.ACTING: 2,
    }
    go.set()
    (*_, last) = await playing
    assert not any(board.counts().values())
    turns = 3 * len(last.trajectories[0].turns)
    assert board.tokens >= turns > 0


async def test_board_is_empty_after_an_error_stops_the_episodes() -> None:
    some = player(lambda: FakeEnv({"step": KeyError("a fault")}), concurrent=1)
    with pytest.raises(KeyError):
        await some.groups(tasks(3), 2, label="x", seed=0)
    assert not any(some.board.counts().values())


async def test_environment_that_does_not_close_stops_no_episode(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rollout, "CLOSE_TIMEOUT", 0.05)
    (found,) = await player(lambda: FakeEnv({"close": hang})).groups(tasks(1), 2, label="x", seed=0)
    assert [one.stop for one in found.trajectories] == [Stop.TURNS] * 2
    assert caplog.text.count("was not closed within 0.05 s") == 2


DETERMINISTIC = pytest.mark.parametrize("deterministic", [False, True])


class Counting:
    """An engine that tracks its open sessions and their maximum."""

    def __init__(self, speak: Any = LOOKS) -> None:
        self.inner = scripted(speak)
        self.open_now: set[str] = set()
        self.most = 0
        self.opened: list[str] = []

    def open(self, share: str) -> str:
        session = self.inner.open(share)
        self.opened.append(share)
        self.open_now.add(session)
        self.most = max(self.most, len(self.open_now))
        return session

    async def generate(self, *arguments: Any) -> Any:
        return await self.inner.generate(*arguments)

    def close(self, session: str) -> None:
        self.inner.close(session)
        self.open_now.remove(session)


@DETERMINISTIC
async def test_groups_come_in_the_order_of_their_tasks(deterministic: bool) -> None:
    ended: list[Trajectory] = []
    engine = Counting()
    some = player(FakeEnv, engine=engine, concurrent=4, deterministic=deterministic)
    found = await some.groups(tasks(3), 3, label="train/7", seed=1, done=ended.append)
    assert [group.id for group in found] == ["train/7/0/t0", "train/7/1/t1", "train/7/2/t2"]
    assert [group.task.id for group in found] == ["t0", "t1", "t2"]
    for group in found:
        assert [(t.group, t.attempt, t.task_id) for t in group.trajectories] == [
            (group.id, number, group.task.id) for number in range(3)
        ]
    assert sorted(t.key for t in ended) == sorted(t.key for group in found for t in group.trajectories)
    assert engine.opened == [group.id for group in found for _ in range(3)]
    assert (engine.open_now, engine.most) == (set(), 4)


@DETERMINISTIC
async def test_each_episode_closes_its_own_environment(deterministic: bool) -> None:
    made: list[FakeEnv] = []

    def make() -> FakeEnv:
        made.append(FakeEnv())
        return made[-1]

    await player(make, deterministic=deterministic).groups(tasks(2), 2, label="x", seed=0)
    assert len(made) == 4
    assert all(env.did == ["reset", "step", "step", "step", "measure", "close"] for env in made)


async def test_retries_infrastructure_failures_from_the_start() -> None:
    made: list[FakeEnv] = []
    breaks = once_then(SandboxError("gone"))

    def make() -> FakeEnv:
        made.append(FakeEnv({"step": breaks}))
        return made[-1]

    (group,) = await player(make, says("look", "submit")).groups(tasks(1), 1, label="x", seed=0)
    (found,) = group.trajectories
    assert (found.stop, found.error, len(found.turns)) == (Stop.SUBMITTED, None, 2)
    assert [env.did[-1] for env in made] == ["close", "close"]


@pytest.mark.parametrize("retries", [0, 2])
async def test_retries_are_limited(retries: int) -> None:
    made: list[FakeEnv] = []

    def make() -> FakeEnv:
        made.append(FakeEnv({"step": SandboxError("gone")}))
        return made[-1]

    engine = Counting()
    (group,) = await player(make, engine=engine, retries=retries).groups(tasks(1), 1, label="x", seed=0)
    assert group.trajectories[0].stop is Stop.ERROR
    assert (len(made), engine.open_now) == (retries + 1, set())


async def test_a_retry_draws_the_same_tokens(bytes_: Any) -> None:
    def play(make: Any) -> Any:
        engine = TransformersEngine(tiny_llama(300, context=512), bytes_)
        return player(make, engine=engine).groups(tasks(1), 1, label="x", seed=3)

    breaks = once_then(SandboxError("gone"))
    (again,) = await play(lambda: FakeEnv({"step": breaks}))
    (straight,) = await play(FakeEnv)
    ids = [[turn.completion.token_ids.tolist() for turn in group.trajectories[0].turns] for group in (again, straight)]
    assert ids[0] == ids[1]
    assert sum(map(len, ids[0])) > 10


@DETERMINISTIC
async def test_failed_episode_leaves_the_others_alone(deterministic: bool) -> None:
    made: list[FakeEnv] = []

    def make() -> FakeEnv:
        made.append(FakeEnv({"step": SandboxError("gone")} if len(made) == 2 else {}))
        return made[-1]

    found = await player(make, retries=0, deterministic=deterministic).groups(tasks(2), 2, label="x", seed=0)
    stops = [trajectory.stop for group in found for trajectory in group.trajectories]
    assert sorted(stops) == [Stop.ERROR, *[Stop.TURNS] * 3]


@DETERMINISTIC
async def test_raises_program_errors_unchanged(deterministic: bool) -> None:
    """One line for the user, and no session left open."""
    engine = Counting()
    some = player(
        lambda: FakeEnv({"step": ConfigError("no such tool")}), engine=engine, deterministic=deterministic, concurrent=2
    )
    with pytest.raises(ConfigError, match="no such tool"):
        await some.groups(tasks(3), 1, label="x", seed=0)
    assert engine.open_now == set()


@DETERMINISTIC
async def test_error_notes_its_episode(deterministic: bool) -> None:
    """The error keeps its traceback, and a note names the episode."""
    made: list[FakeEnv] = []

    def make() -> FakeEnv:
        made.append(FakeEnv({"step": ZeroDivisionError("a mistake")} if len(made) == 1 else {}))
        return made[-1]

    with pytest.raises(ZeroDivisionError, match="a mistake") as caught:
        await player(make, deterministic=deterministic).groups(tasks(2), 1, label="x", seed=0)
    text = "".join(traceback.format_exception(caught.value))
    assert "in task 't1', attempt 0 of group 'x/1/t1'" in text
    assert ", in step\n" in text


class Faults:
    """Makes environments; the first `bad` of them raise `fault` in `what`."""

    def __init__(self, bad: int, what: str = "step", fault: Exception | None = None) -> None:
        self.bad, self.what, self.fault = bad, what, fault or ZeroDivisionError("a mistake")
        self.made = 0

    def __call__(self) -> FakeEnv:
        self.made += 1
        return FakeEnv({self.what: self.fault} if self.made <= self.bad else {})


@DETERMINISTIC
@pytest.mark.parametrize("what", ["reset", "step", "measure"])
async def test_tolerates_and_logs_errors_up_to_a_limit(
    deterministic: bool, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The attempt is not retried, the others continue, and the log has the error's traceback."""
    make, failures, board, engine = Faults(2, what), Failures(2), StatusBoard(), Counting()
    some = player(make, engine=engine, failures=failures, board=board, deterministic=deterministic, concurrent=2)
    found = await some.groups(tasks(3), 2, label="x", seed=0)
    played = [trajectory for group in found for trajectory in group.trajectories]
    assert sorted(one.stop for one in played) == [Stop.ERROR] * 2 + [Stop.TURNS] * 4
    assert {one.error for one in played} == {None, "ZeroDivisionError: a mistake"}
    assert (make.made, failures.count, board.failures) == (6, 2, {"ZeroDivisionError": 2})
    assert engine.open_now == set()
    first, second = caplog.records
    assert first.getMessage().endswith(
        ": ZeroDivisionError: a mistake; this attempt is given up, the others continue "
        "(1 of at most 2, rollout.max_failures)"
    )
    assert first.exc_info is not None
    assert "(2 of at most 2" in second.getMessage()


@DETERMINISTIC
async def test_raises_the_error_after_the_limit(deterministic: bool) -> None:
    """Errors are counted over all calls of the player, and of copies of it."""
    failures, engine = Failures(2), Counting()
    some = player(Faults(3), engine=engine, failures=failures, deterministic=deterministic, concurrent=1)
    await some.groups(tasks(2), 1, label="x", seed=0)
    with pytest.raises(ZeroDivisionError, match="a mistake") as caught:
        await replace(some, retries=0).groups(tasks(1), 1, label="y", seed=0)
    assert caught.value.__notes__ == [
        "in task 't0', attempt 0 of group 'y/0/t0'; 2 attempts had failed before it (rollout.max_failures)"
    ]
    assert engine.open_now == set()


async def test_error_in_close_keeps_the_result() -> None:
    failures = Failures(1)
    (found,) = await player(Faults(1, "close"), failures=failures).groups(tasks(1), 1, label="x", seed=0)
    assert (found.trajectories[0].stop, failures.count) == (Stop.TURNS, 1)
    with pytest.raises(ZeroDivisionError):
        await player(Faults(1, "close"), failures=failures).groups(tasks(1), 1, label="x", seed=0)


async def test_infrastructure_failure_is_not_a_program_error() -> None:
    failures = Failures(1)
    make = Faults(2, "step", SandboxError("gone"))
    (found,) = await player(make, failures=failures).groups(tasks(1), 1, label="x", seed=0)
    assert (found.trajectories[0].stop, make.made, failures.count) == (Stop.TURNS, 3, 0)


async def test_never_tolerates_turnstile_errors_and_engine_errors() -> None:
    class Broken(Counting):
        async def generate(self, *arguments: Any) -> Any:
            raise IndexError("out of range")

    failures = Failures(9)
    make = Faults(1, "step", ConfigError("no such tool"))
    with pytest.raises(ConfigError, match="no such tool"):
        await player(make, failures=failures).groups(tasks(1), 1, label="x", seed=0)
    with pytest.raises(IndexError, match="out of range"):
        await player(FakeEnv, engine=Broken(), failures=failures).groups(tasks(1), 1, label="x", seed=0)
    assert failures.count == 0


async def test_never_tolerates_errors_in_callbacks() -> None:
    class Full(EpisodeCallback):
        def on_turn(self, attempt: Attempt, number: int, turn: Turn) -> None:
            raise OSError(28, "No space left on device")

    failures = Failures(9)
    with pytest.raises(OSError, match="No space left"):
        await player(FakeEnv, failures=failures).groups(tasks(1), 1, label="x", seed=0, callback=Full())
    assert failures.count == 0


async def test_shared_engine_error_names_no_episode(bytes_: Any) -> None:
    def misshapen(*_: Any) -> None:
        torch.ones(2, 3) @ torch.ones(2, 3)

    model = tiny_llama(300, context=512)
    engine = TransformersEngine(model, bytes_)
    model.get_decoder().register_forward_pre_hook(misshapen)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        await player(FakeEnv, engine=engine).groups(tasks(3), 2, label="x", seed=0)
    assert caught.value.__notes__ == ["in the engine, while 6 requests were sampled together"]


async def test_warns_of_an_environment_that_cannot_be_closed(caplog: pytest.LogCaptureFixture) -> None:
    some = player(lambda: FakeEnv({"close": SandboxError("stuck")}))
    with caplog.at_level(logging.WARNING):
        (group,) = await some.groups(tasks(1), 1, label="x", seed=0)
    assert group.trajectories[0].stop is Stop.TURNS
    assert "stuck" in caplog.text


async def test_one_slow_environment_does_not_hold_up_the_others() -> None:
    """The slow one waits until all others have ended."""
    others_done = asyncio.Event()
    ended: list[tuple[str, int]] = []

    async def waits(_: FakeEnv) -> None:
        await others_done.wait()

    made: list[FakeEnv] = []

    def make() -> FakeEnv:
        made.append(FakeEnv({"step": waits} if not made else {}))
        return made[-1]

    def done(trajectory: Trajectory) -> None:
        ended.append(trajectory.key)
        if len(ended) == 5:
            others_done.set()

    some = player(make, limits=Limits(turns=3, seconds=60))
    found = await some.groups(tasks(3), 2, label="x", seed=0, done=done)
    assert all(t.stop is Stop.TURNS for group in found for t in group.trajectories)
    assert ended[-1] == ("x/0/t0", 0)


async def test_a_slow_environment_does_not_hold_up_sampling(bytes_: Any) -> None:
    """The same with a model: the engine goes on decoding for those that wait for tokens."""
    others_done = asyncio.Event()
    ended = 0

    async def waits(_: FakeEnv) -> None:
        await others_done.wait()

    made: list[FakeEnv] = []

    def make() -> FakeEnv:
        made.append(FakeEnv({"step": waits} if not made else {}))
        return made[-1]

    def done(_: Trajectory) -> None:
        nonlocal ended
        ended += 1
        if ended == 3:
            others_done.set()

    engine = TransformersEngine(tiny_llama(300, context=512), bytes_)
    (group,) = await player(make, engine=engine).groups(tasks(1), 4, label="x", seed=0, done=done)
    assert [t.stop for t in group.trajectories] == [Stop.TURNS] * 4


async def test_free_slots_are_reused_at_once() -> None:
    """With two slots, three episodes use one of them while the fourth keeps the other."""
    others_done = asyncio.Event()
    ended: list[int] = []

    async def waits(_: FakeEnv) -> None:
        await others_done.wait()

    made: list[FakeEnv] = []

    def make() -> FakeEnv:
        made.append(FakeEnv({"step": waits} if not made else {}))
        return made[-1]

    def done(trajectory: Trajectory) -> None:
        ended.append(trajectory.attempt)
        if len(ended) == 3:
            others_done.set()

    engine = Counting()
    await player(make, engine=engine, concurrent=2).groups(tasks(1), 4, label="x", seed=0, done=done)
    assert ended == [1, 2, 3, 0]
    assert engine.most == 2


async def test_hung_environment_ends_at_its_own_time_limit() -> None:
    made: list[FakeEnv] = []

    def make() -> FakeEnv:
        made.append(FakeEnv({"step": hang} if not made else {}))
        return made[-1]

    some = player(make, limits=Limits(turns=3, seconds=0.3))
    (group,) = await some.groups(tasks(1), 2, label="x", seed=0)
    assert [t.stop for t in group.trajectories] == [Stop.TIMEOUT, Stop.TURNS]
    assert all(env.did[-1] == "close" for env in made)


async def test_error_in_opening_a_session_is_raised() -> None:
    class Full(Counting):
        def open(self, share: str) -> str:
            raise EngineError("no room")

    with pytest.raises(EngineError, match="no room"):
        await player(FakeEnv, engine=Full()).groups(tasks(1), 1, label="x", seed=0)


@DETERMINISTIC
async def test_same_seed_samples_the_same_tokens(deterministic: bool, bytes_: Any) -> None:
    def ids(groups: list[Group]) -> list[list[int]]:
        return [turn.completion.token_ids.tolist() for g in groups for t in g.trajectories for turn in t.turns]

    async def play(seed: int, concurrent: int = 64) -> list[list[int]]:
        engine = TransformersEngine(tiny_llama(300, context=512).double(), bytes_, deterministic=deterministic)
        some = replace(player(FakeEnv, engine=engine), deterministic=deterministic, concurrent=concurrent)
        return ids(await some.groups(tasks(2), 2, label="x", seed=seed))

    first = await play(1)
    assert first == await play(1) == await play(1, concurrent=3)
    assert first != await play(2)


async def test_deadline_is_a_multiple_of_the_longest_episode() -> None:
    """Ten times the longest of the first four; timed-out episodes count for the next deadline."""
    deadlines = Deadlines(10)
    task, other = tasks(2)
    known = player(FakeEnv, deadlines=deadlines)
    assert deadlines.seconds(task) == math.inf
    (first,) = await known.groups([task], 4, label="a", seed=0)
    longest = max(t.times["total"] - t.times["measure"] for t in first.trajectories)
    assert deadlines.seconds(task) == pytest.approx(10 * longest)
    assert deadlines.seconds(other) == math.inf
    hanging = player(lambda: FakeEnv({"step": hang}), deadlines=deadlines)
    (second,) = await hanging.groups([task], 2, label="b", seed=0)
    assert [t.stop for t in second.trajectories] == [Stop.TIMEOUT, Stop.TIMEOUT]
    assert deadlines.seconds(task) >= 100 * longest


async def test_failed_episodes_set_no_deadline() -> None:
    deadlines = Deadlines(10)
    broken = player(lambda: FakeEnv({"step": SandboxError("gone")}), deadlines=deadlines, retries=0)
    await broken.groups(tasks(1), 4, label="a", seed=0)
    assert deadlines.seconds(tasks(1)[0]) == math.inf
