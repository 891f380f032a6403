"""Environments of plain functions: threads call them, at most so many at once, and never two in one episode."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Coroutine
from typing import Any, ClassVar

import pytest

from turnstile.config import Recipe
from turnstile.envs import threads as threads_module
from turnstile.envs.base import Rates, Start, Step, rates_of
from turnstile.envs.check import check_env
from turnstile.envs.guess import GuessEnv
from turnstile.envs.threads import Threads
from turnstile.errors import SandboxError
from turnstile.tasks.demonstration import call
from turnstile.types import Message, Task
from turnstile.wiring.world import make_world

TASK = Task(id="t", env="plain")
SAY = Message(role="assistant", content="go")


class Plain:
    """Counts its steps, and calls `during` in each."""

    rates: ClassVar[Rates] = {"stepped": lambda played: bool(played.turns)}

    def __init__(self, during: Any = lambda: None) -> None:
        self.during = during
        self.steps = 0
        self.calls: list[str] = []

    def reset(self, task: Task) -> Start:
        self.steps = 0
        return Start(messages=(Message(role="user", content=task.id),))

    def step(self, message: Message) -> Step:
        self.calls.append("step begins")
        self.during()
        self.calls.append("step ends")
        self.steps += 1
        return Step(signals={"steps": self.steps}, truncated=self.steps == 3)

    def measure(self) -> dict[str, int]:
        self.calls.append("measure")
        return {"steps": self.steps}

    def state_key(self) -> str:
        return str(self.steps)

    def close(self) -> None:
        self.calls.append("close")


async def test_plain_methods_can_be_awaited() -> None:
    assert await check_env(Plain, TASK, actions=[SAY] * 3) == []
    world = make_world(Recipe(), env=Plain)
    env = world.make_env()
    assert (await env.reset(TASK)).messages[0].content == "t"
    assert (await env.step(SAY)).signals == {"steps": 1}
    assert (await env.measure(), env.state_key()) == ({"steps": 1}, "1")
    assert rates_of(env) is Plain.rates
    await env.close()
    await world.close()


async def test_an_async_environment_is_returned_unchanged() -> None:
    threads = Threads(workers=1)
    assert type(threads.around(GuessEnv)()) is GuessEnv
    await threads.close()


async def test_plain_and_async_methods_may_be_mixed() -> None:
    class Mixed(GuessEnv):
        def close(self) -> None:  # type: ignore[override]
            self.thread = threading.current_thread()

    inner = Mixed()
    threads = Threads(workers=1)
    env = threads.around(lambda: inner)()
    await env.reset(Task(id="g", env="guess", data={"secret": 3}))
    assert (await env.step(call("guess", number=3))).terminated
    await env.close()
    assert inner.thread is not threading.current_thread()
    await threads.close()


@pytest.mark.parametrize("workers", [1, 3])
async def test_as_many_calls_run_at_once_as_there_are_threads(workers: int) -> None:
    lock, now, most = threading.Lock(), 0, 0
    together = threading.Barrier(workers)

    def during() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        together.wait(timeout=20)  # breaks unless that many are in here
        with lock:
            now -= 1

    threads = Threads(workers=workers)
    made = threads.around(lambda: Plain(during))
    await asyncio.gather(*(made().step(SAY) for _ in range(3 * workers)))
    assert most == workers
    await threads.close()


async def test_a_call_that_was_given_up_on_ends_before_the_next_begins() -> None:
    begun, go = threading.Event(), threading.Event()

    def during() -> None:
        begun.set()
        assert go.wait(timeout=20)

    inner, threads = Plain(during), Threads(workers=2)
    env = threads.around(lambda: inner)()
    step = asyncio.ensure_future(env.step(SAY))
    await asyncio.to_thread(begun.wait, 20)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    measured = asyncio.ensure_future(env.measure())
    await asyncio.sleep(0.05)
    assert inner.calls == ["step begins"]
    go.set()
    assert await measured == {"steps": 1}
    await env.close()
    assert inner.calls == ["step begins", "step ends", "measure", "close"]
    await threads.close()


async def test_a_coroutine_returned_by_a_call_that_was_given_up_on_is_closed() -> None:
    """A plain function may return a coroutine; one that is left lying would be a warning whenever it is collected."""
    begun, go = threading.Event(), threading.Event()
    left: list[Coroutine[Any, Any, Step]] = []

    class Decorated(Plain):
        def step(self, message: Message) -> Any:
            begun.set()
            assert go.wait(timeout=20)
            left.append(GuessEnv().step(message))
            return left[0]

    threads = Threads(workers=1)
    env = threads.around(Decorated)()
    step = asyncio.ensure_future(env.step(SAY))
    await asyncio.to_thread(begun.wait, 20)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    go.set()
    await env.close()
    assert inspect.getcoroutinestate(left[0]) == inspect.CORO_CLOSED
    await threads.close()


async def test_a_call_that_never_ends_is_an_infrastructure_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads_module, "GRACE", 0.05)
    go = threading.Event()
    threads = Threads(workers=1)
    env = threads.around(lambda: Plain(go.wait))()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await env.step(SAY)
    with pytest.raises(SandboxError, match=r"Plain\.step of the environment went on for 0\.05 s"):
        await env.measure()
    go.set()
    await env.close()
    await threads.close()


async def test_hanging_calls_do_not_use_up_the_threads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threads_module, "GRACE", 0.05)
    go = threading.Event()

    class Hangs(Plain):
        def measure(self) -> dict[str, int]:
            go.wait()
            return {}

    threads = Threads(workers=2)
    hung = [threads.around(Hangs)() for _ in range(3)]
    for env in hung:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await env.measure()
    assert "Hangs.measure was given up on before it had a thread; busy: 2 x Hangs.measure" in caplog.text
    for env in hung[:2]:
        with pytest.raises(SandboxError, match=r"Hangs\.measure of the environment went on"):
            await env.close()
    await hung[2].close()  # its call had not begun
    together = threading.Barrier(2)
    others = [threads.around(lambda: Plain(lambda: together.wait(timeout=20)))() for _ in range(2)]
    await asyncio.gather(*(env.step(SAY) for env in others))  # both places are free, though both threads hang
    go.set()
    await hung[0].close()
    await threads.close()


async def test_an_error_in_a_plain_method_propagates() -> None:
    def during() -> None:
        raise KeyError("no such room")

    threads = Threads(workers=1)
    env = threads.around(lambda: Plain(during))()
    with pytest.raises(KeyError, match="no such room"):
        await env.step(SAY)
    await env.close()
    await threads.close()
