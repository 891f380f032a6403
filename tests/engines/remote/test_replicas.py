"""Several servers that training gives weights: some lose them, refuse them, disappear, hang and come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modelserver import changing_server, given
from turnstile.engines.remote.openai import OpenAIEngine
from turnstile.engines.remote.router import Router
from turnstile.errors import ConfigError, EngineGoneError
from turnstile.gateway.server import EngineServer
from turnstile.types import Completion, Sampling

PROMPT = np.array([7, 8, 9], np.int32)
AGAIN = 0.02
Before = Callable[[str], Awaitable[ASGIApp | None]]


class Site:
    """A server at an address, new each time that it starts.

    `before` is awaited before a request to a path is answered, and may answer it; if `lost`, the answer is
    cut off after its head.
    """

    def __init__(self, below: Path) -> None:
        self.url = ""
        self.asked: list[str] = []
        self.server: EngineServer | None = None
        self.before: Before | None = None
        self.lost: Callable[[str], bool] = lambda path: False
        self._below = below
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        self.server = changing_server(self._below)
        self.server.app = self._between(self.server.app)
        port = int(self.url.split(":")[-1].partition("/")[0]) if self.url else 0
        self.url = await self._stack.enter_async_context(self.server.listening("127.0.0.1", port))

    async def stop(self) -> None:
        await self._stack.aclose()

    def _between(self, app: ASGIApp) -> ASGIApp:
        async def between(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_head(message: Message) -> None:
                if message["type"] == "http.response.start":
                    await send(message)

            path = scope["path"]
            self.asked.append(path)
            refusal = await self.before(path) if self.before is not None else None
            await (refusal or app)(scope, receive, send_head if self.lost(path) else send)

        return between


@pytest.fixture
async def sites(tmp_path: Path) -> AsyncIterator[list[Site]]:
    found = [Site(tmp_path), Site(tmp_path)]
    for site in found:
        await site.start()
    yield found
    for site in found:
        await site.stop()


@pytest.fixture
async def router(sites: list[Site], tmp_path: Path) -> AsyncIterator[Router]:
    made = Router(
        [OpenAIEngine(site.url, retries=0, key="", training=True) for site in sites],
        health_interval=AGAIN,
        reconnect_timeout=60,
    )
    await made.connect(PROMPT)
    made.publish(given(tmp_path, 1))
    yield made
    await made.disconnect()


async def asked(router: Router, share: str, seed: int = 1, tokens: int = 5) -> Completion:
    session = router.open(share)
    try:
        return await router.generate(PROMPT, Sampling(max_tokens=tokens, seed=seed, regex=f"[ab]{{{tokens}}}"), session)
    finally:
        router.close(session)


def versions(found: Completion) -> list[int]:
    return sorted(set(found.versions.tolist()))


async def until(true: Callable[[], object]) -> None:
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(AGAIN / 2)


async def test_every_server_has_the_newest_weights_before_it_samples(
    router: Router, sites: list[Site], tmp_path: Path
) -> None:
    for version in (1, 2, 3):
        router.publish(given(tmp_path, version))
        sessions = [router.open(share) for share in "ab"]
        found = [await router.generate(PROMPT, Sampling(max_tokens=3, seed=1), session) for session in sessions]
        assert [versions(one) for one in found] == [[version]] * 2
        assert found[0].token_ids.tolist() == found[1].token_ids.tolist()
        for session in sessions:
            router.close(session)
    for site in sites:
        assert site.asked.count("/v1/weights") == 3


async def test_restarted_server_gets_weights_and_nothing_is_counted_twice(
    router: Router, sites: list[Site], caplog: pytest.LogCaptureFixture
) -> None:
    before = await asked(router, "a")
    router.take_stats()
    await sites[0].stop()
    await sites[0].start()  # nobody has noticed
    again = await asked(router, "a")
    assert (again.token_ids.tolist(), versions(again)) == (before.token_ids.tolist(), [1])
    assert router.take_stats()["requests"] == 1
    assert "gone" in caplog.text or "lost the weights" in caplog.text or "does not answer" in caplog.text


async def test_requests_under_way_move_to_another_server(
    router: Router, sites: list[Site], caplog: pytest.LogCaptureFixture
) -> None:
    whole = await asked(router, "a", tokens=300)
    router.take_stats()
    before = sites[0].asked.count("/v1/completions")
    going = asyncio.ensure_future(asked(router, "b", tokens=300))
    await until(lambda: sites[0].asked.count("/v1/completions") > before)
    await sites[0].stop()
    found = await going
    assert (found.token_ids.tolist(), versions(found)) == (whole.token_ids.tolist(), [1])
    taken = router.take_stats()
    assert (taken["requests"], taken["tokens_sampled"]) == (1, 300)
    await sites[0].start()
    await until(lambda: "server 0 is back" in caplog.text)
    assert [path for path in sites[0].asked if path != "/v1/models"][-1] == "/v1/weights"  # before it is asked anything
    assert versions(await asked(router, "c")) == [1]


async def test_lost_response_is_retried_and_counted_once(
    router: Router, sites: list[Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = await asked(router, "a")
    router.take_stats()
    cuts = 1
    for place in router._replicas:
        monkeypatch.setattr(place.engine.endpoint, "_retries", 1)

    def cut(path: str) -> bool:
        nonlocal cuts
        lost = path == "/v1/completions" and cuts > 0
        cuts -= lost
        return lost

    sites[0].lost = cut
    asked_before = sum(site.asked.count("/v1/completions") for site in sites)
    found = await asked(router, "a")
    assert found.token_ids.tolist() == whole.token_ids.tolist()
    assert sum(site.asked.count("/v1/completions") for site in sites) >= asked_before + 2  # it was answered twice
    taken = router.take_stats()
    assert (taken["requests"], taken["tokens_asked"], taken["tokens_sampled"]) == (1, 3, 5)


async def test_server_that_fails_to_load_is_left_out_until_it_loads(
    router: Router, sites: list[Site], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await asked(router, "a")
    refusing = True

    async def refuse(path: str) -> ASGIApp | None:
        return Response("no", 422) if path == "/v1/weights" and refusing else None

    sites[0].before = refuse
    router.publish(given(tmp_path, 2))
    assert versions(await asked(router, "a")) == [2]
    assert versions(await asked(router, "b")) == [2]
    assert "it did not load the weights; its sessions move to other servers" in caplog.text
    refusing = False
    await until(lambda: "server 0 is back" in caplog.text)
    router.publish(given(tmp_path, 3))
    found = await asyncio.gather(*(asked(router, share) for share in "abcd"))
    assert [versions(one) for one in found] == [[3]] * 4
    assert [path for path in sites[0].asked if path != "/v1/models"][-1] == "/v1/completions"


async def test_health_checks_find_a_hanging_server(
    router: Router, sites: list[Site], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("turnstile.engines.remote.openai.HEALTH_TIMEOUT", 0.1)
    await asked(router, "a")
    held = asyncio.Event()

    async def hang(path: str) -> None:
        await held.wait()

    sites[0].before = hang
    assert versions(await asked(router, "a")) == [1]
    assert "does not answer health checks" in caplog.text
    held.set()
    await until(lambda: "server 0 is back" in caplog.text)


async def test_server_that_hangs_while_loading_is_left_out_until_it_loads(
    router: Router, sites: list[Site], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("turnstile.engines.remote.openai.HEALTH_TIMEOUT", 0.1)
    sessions = [router.open(share) for share in "ab"]  # one at each server
    held, loading = asyncio.Event(), asyncio.Event()

    async def hang(path: str) -> None:
        if path == "/v1/weights":
            loading.set()
        if loading.is_set():
            await held.wait()

    sites[0].before = hang
    router.publish(given(tmp_path, 2))
    asking = [router.generate(PROMPT, Sampling(max_tokens=3, seed=1), session) for session in sessions]
    found = await asyncio.gather(*asking)
    assert [versions(one) for one in found] == [[2], [2]]
    assert "does not answer health checks; its sessions move to other servers" in caplog.text
    assert "/v1/completions" not in sites[0].asked[sites[0].asked.index("/v1/weights", 1) :]
    held.set()
    await until(lambda: "server 0 is back" in caplog.text)
    for session in sessions:
        router.close(session)
    sites[0].asked.clear()
    assert [versions(await asked(router, share)) for share in "ab"] == [[2], [2]]


async def test_server_that_hangs_in_its_first_load_after_return_is_retried(
    router: Router, sites: list[Site], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("turnstile.engines.remote.openai.HEALTH_TIMEOUT", 0.1)
    await asked(router, "a")
    await sites[0].stop()
    await asked(router, "a")
    held, loads = asyncio.Event(), 0

    async def hang(path: str) -> None:
        nonlocal loads
        loads += path == "/v1/weights"
        if loads == 1 and not held.is_set():
            await held.wait()

    sites[0].before = hang
    await sites[0].start()
    await until(lambda: loads)
    place = router._replicas[0]
    await until(lambda: not place._requests)  # it was given up
    held.set()
    await until(lambda: "server 0 is back" in caplog.text)
    assert loads == 2


async def test_waits_for_a_server_if_all_are_unreachable(
    router: Router, sites: list[Site], caplog: pytest.LogCaptureFixture
) -> None:
    before = await asked(router, "a")
    for site in sites:
        await site.stop()
    waiting = [asyncio.ensure_future(asked(router, share)) for share in "abc"]
    await until(lambda: caplog.text.count("its sessions move to other servers") == 2)
    assert not any(one.done() for one in waiting)
    await sites[1].start()
    found = await asyncio.gather(*waiting)
    assert [one.token_ids.tolist() for one in found] == [before.token_ids.tolist()] * 3
    await sites[1].stop()
    router._reconnect_timeout = 0.1
    with pytest.raises(EngineGoneError, match="none of 2 servers answers"):
        await asked(router, "a")


async def test_rejects_servers_of_another_run(router: Router, sites: list[Site], tmp_path: Path) -> None:
    await asked(router, "a")
    other = OpenAIEngine(sites[0].url, retries=0, key="", training=True)
    await other.connect(PROMPT)
    await other.load(given(tmp_path, 2, owner="you"))
    await other.disconnect()
    with pytest.raises(ConfigError, match="samples with weights that another run gave it"):
        await asked(router, "a")


async def test_rejects_an_address_that_keeps_losing_weights(router: Router, sites: list[Site]) -> None:
    """As with several processes behind one address, of which only one has loaded the weights."""

    async def forget(path: str) -> None:
        for site in sites:
            assert site.server is not None
            assert site.server._reload is not None
            site.server._reload.labels = dict.fromkeys(site.server._reload.labels, "")

    for site in sites:
        site.before = forget
    with pytest.raises(ConfigError, match="run exactly one server at this address"):
        await asked(router, "a")
