"""Episodes whose engine is unreachable for longer than their time limit: an error, never an outcome."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from modelserver import Answer, always, bare_server
from plays import TASK, FakeEnv, player, says, scripted
from turnstile.engines.remote.downtime import record_downtime
from turnstile.engines.remote.openai import OpenAIEngine
from turnstile.engines.remote.router import MAX_MOVES, Router
from turnstile.errors import RequestFailedError
from turnstile.rollout.deadlines import MIN_EPISODES, Deadlines
from turnstile.rollout.episode import Limits
from turnstile.types import Sampling, Stop, Trajectory

PROMPT = np.array([7, 8, 9], np.int32)
SHORT = Limits(turns=3, seconds=0.2)
ONE = {"choices": [{"finish_reason": "length", "token_ids": [1], "logprobs": {"token_logprobs": [0.0]}}]}


async def played(engine: Any, limits: Limits = SHORT) -> tuple[list[FakeEnv], Trajectory]:
    """Play one attempt with one retry; return the environments that it used as well."""
    envs: list[FakeEnv] = []

    def make() -> FakeEnv:
        envs.append(FakeEnv())
        return envs[-1]

    (group,) = await player(make, engine=engine, limits=limits, retries=1).groups([TASK], 1, label="l", seed=1)
    (trajectory,) = group.trajectories
    return envs, trajectory


def given_up(envs: list[FakeEnv], found: Trajectory) -> bool:
    assert found.error is not None
    assert "episode.seconds passed while the model's server was down" in found.error
    return found.stop is Stop.ERROR and not found.signals and [env.did for env in envs] == [["reset", "close"]] * 2


def until(silent: asyncio.Event, answer: Answer) -> Answer:
    """Answer until `silent` is set, then hang."""

    async def say(request: web.Request) -> web.StreamResponse:
        if silent.is_set():
            await asyncio.Event().wait()
        return await answer(request)

    return say


def paths(silent: asyncio.Event) -> dict[str, Answer]:
    answers = {"/v1/models": {"data": [{"id": "m"}]}, "/v1/completions": ONE}
    return {path: until(silent, always(body)) for path, body in answers.items()}


async def test_server_that_accepts_and_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnstile.engines.remote.openai.HEALTH_TIMEOUT", 0.1)
    silent = asyncio.Event()
    async with bare_server(paths(silent)) as url:
        engine = OpenAIEngine(url, retries=0, key="")
        await engine.connect(PROMPT)
        silent.set()
        assert given_up(*await played(engine))
        await engine.disconnect()


@pytest.mark.parametrize("retries", [0, 9])
async def test_unreachable_servers(retries: int) -> None:
    """While the request waits for a server, and while it is retried."""
    async with bare_server(paths(asyncio.Event())) as url:
        router = Router([OpenAIEngine(url, retries=retries, key="")], health_interval=0.02, reconnect_timeout=60)
        await router.connect(PROMPT)
    assert given_up(*await played(router))
    await router.disconnect()


async def test_busy_server() -> None:
    busy = {"/v1/models": always({"data": [{"id": "m"}]}), "/v1/completions": always({}, 503, {"Retry-After": "30"})}
    async with bare_server(busy) as url:
        engine = OpenAIEngine(url, key="")
        assert given_up(*await played(engine))
        await engine.disconnect()


LONG = Limits(turns=3, seconds=60.0)


@pytest.mark.parametrize("how", ["fails", "hangs"])
async def test_unanswerable_turn_ends_its_attempt(how: str) -> None:
    """The server passes health checks and gets one request from each attempt: it stays, and no session leaves it."""
    sent = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        if (await request.json())["max_tokens"] == 1:  # to find out what it can do
            return web.json_response(ONE)
        sent += 1
        if how == "hangs":
            await asyncio.Event().wait()
        return web.json_response({"error": "this prompt breaks it"}, status=500)

    async with bare_server({"/v1/models": always({"data": [{"id": "m"}]}), "/v1/completions": answer}) as url:
        router = Router([OpenAIEngine(url, retries=0, key="", timeout=0.3)], health_interval=0.02, reconnect_timeout=60)
        envs, found = await played(router, LONG)
        assert router._replicas[0].unreachable is None
        await router.disconnect()
    assert (found.stop, sent, len(envs)) == (Stop.ERROR, 2, 2)
    assert found.error is not None
    assert found.error.startswith("RequestFailedError: the server at http://127.0.0.1:")
    assert found.times.get("downtime", 0.0) == 0.0


async def test_request_that_crashes_its_server_is_given_up() -> None:
    """The server comes back and is asked again, but not forever."""
    sent, down = 0, 0  # how many more health checks find it down

    async def fall(request: web.Request) -> web.StreamResponse:
        nonlocal sent, down
        if (await request.json())["max_tokens"] == 1:
            return web.json_response(ONE)
        sent, down = sent + 1, 5
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def health(request: web.Request) -> web.StreamResponse:
        nonlocal down
        status, down = 503 if down else 200, max(0, down - 1)
        return web.json_response({"data": [{"id": "m"}]}, status=status)

    async with bare_server({"/v1/models": health, "/v1/completions": fall}) as url:
        router = Router([OpenAIEngine(url, retries=0, key="")], health_interval=0.01, reconnect_timeout=60)
        _, found = await played(router, LONG)
        await router.disconnect()
    assert found.stop is Stop.ERROR
    assert MAX_MOVES + 1 <= sent <= 2 * (MAX_MOVES + 1)  # the second attempt may begin while the server is not back yet
    assert found.error is not None
    assert f"a request has lost its server {MAX_MOVES + 1} times" in found.error


async def test_interrupted_response_does_not_mark_a_healthy_server() -> None:
    """The server was reached: the request is retried `engine.retries` times, and no other session leaves the server."""
    sent = 0

    async def broken(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        if (await request.json())["max_tokens"] == 1:
            return web.json_response(ONE)
        sent += 1
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with bare_server({"/v1/models": always({"data": [{"id": "m"}]}), "/v1/completions": broken}) as url:
        router = Router([OpenAIEngine(url, retries=1, key="")], health_interval=0.01, reconnect_timeout=60)
        await router.connect(PROMPT)
        session = router.open("g")
        with pytest.raises(RequestFailedError, match="broke off its answer"):
            await router.generate(PROMPT, Sampling(max_tokens=4), session)
        assert router._replicas[0].unreachable is None
        await router.disconnect()
    assert sent == 2


async def test_failing_server_without_health_is_unreachable() -> None:
    ok, down = {"data": [{"id": "m"}]}, asyncio.Event()

    def either(body: Any) -> Answer:
        async def answer(request: web.Request) -> web.StreamResponse:
            return web.json_response({} if down.is_set() else body, status=503 if down.is_set() else 200)

        return answer

    async with bare_server({"/v1/models": either(ok), "/v1/completions": either(ONE)}) as url:
        router = Router([OpenAIEngine(url, retries=0, key="")], health_interval=0.02, reconnect_timeout=60)
        await router.connect(PROMPT)
        session = router.open("g")
        down.set()
        asking = asyncio.ensure_future(router.generate(PROMPT, Sampling(max_tokens=4), session))
        while router._replicas[0].unreachable is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        down.clear()
        assert (await asking).token_ids.tolist() == [1]
        await router.disconnect()


async def test_long_downtime_ends_the_episode() -> None:
    """The deadline is extended up to a limit."""
    engine = scripted(says("look"))
    sample, limits = engine.generate, replace(SHORT, seconds=0.3, max_downtime=0.5)

    async def generate(*asked: Any) -> Any:
        while True:
            since = time.monotonic()
            await asyncio.sleep(0.05)
            record_downtime("it was gone", since)

    engine.generate = generate  # type: ignore[method-assign]
    _, found = await played(engine, limits)
    assert found.stop is Stop.ERROR
    assert found.error == "EngineError: episode.seconds passed while the model's server was down: it was gone"
    engine.generate = sample  # type: ignore[method-assign]
    assert (await played(engine, limits))[1].stop is Stop.TURNS


async def test_slow_server_uses_the_episodes_time() -> None:
    silent = asyncio.Event()
    answers = paths(silent) | {"/v1/models": always({"data": [{"id": "m"}]})}
    async with bare_server(answers) as url:
        engine = OpenAIEngine(url, retries=0, key="")
        await engine.connect(PROMPT)
        silent.set()
        assert (await played(engine))[1].stop is Stop.TIMEOUT
        await engine.disconnect()


async def test_slow_local_engine_uses_the_episodes_time() -> None:
    engine = scripted(says("look"))
    engine.generate = lambda *_: asyncio.sleep(60)  # type: ignore[method-assign,assignment,return-value]
    assert (await played(engine))[1].stop is Stop.TIMEOUT


async def test_downtime_extends_the_deadline() -> None:
    engine = scripted(says("look"))
    sample = engine.generate

    async def generate(*asked: Any) -> Any:
        since = time.monotonic()
        await asyncio.sleep(0.7)
        record_downtime("it was gone", since)
        record_downtime("the same again", since)
        return await sample(*asked)

    engine.generate = generate  # type: ignore[method-assign]
    _, found = await played(engine, Limits(turns=3, seconds=1.5))
    assert (found.stop, len(found.turns)) == (Stop.TURNS, 3)
    assert found.times["downtime"] <= found.times["generate"]


async def test_downtime_does_not_lengthen_deadlines() -> None:
    _, found = await played(scripted(says("look")))
    deadlines = Deadlines(2.0)
    for _ in range(MIN_EPISODES):
        deadlines.observe(replace(found, times={"total": 103.0, "measure": 1.0, "downtime": 100.0}))
    assert deadlines.seconds(TASK) == 4.0
    deadlines.observe(replace(found, stop=Stop.ERROR, error="away", times={"total": 105.0, "downtime": 104.0}))
    assert deadlines.seconds(TASK) == 4.0
