"""Several servers as one engine: real ones on loopback, some of which disappear and come back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest

from modelserver import tiny_engine, tiny_server
from turnstile.engines.base import Engine
from turnstile.engines.check import check_engine
from turnstile.engines.remote.openai import OpenAIEngine
from turnstile.engines.remote.router import Router
from turnstile.errors import ConfigError, EngineError, EngineGoneError
from turnstile.types import I32, Completion, Sampling

PROMPT = np.array([7, 8, 9], np.int32)


class Site:
    """A server that can disappear and come back at its address, and counts its requests."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.asked: Counter[str] = Counter()  # by session
        self.url = ""
        self._stack = AsyncExitStack()

    def open(self, share: str) -> str:
        return self.inner.open(share)

    def close(self, session: str) -> None:
        self.inner.close(session)

    async def generate(self, prompt_ids: I32, sampling: Sampling, session: str) -> Completion:
        self.asked[str(sampling.seed)] += 1
        return await self.inner.generate(prompt_ids, sampling, session)

    async def start(self) -> None:
        port = int(self.url.split(":")[-1].partition("/")[0]) if self.url else 0
        self.url = await self._stack.enter_async_context(tiny_server(self).listening("127.0.0.1", port))

    async def stop(self) -> None:
        await self._stack.aclose()


@pytest.fixture
async def sites(bytes_: Any) -> AsyncIterator[list[Site]]:
    inner = tiny_engine(bytes_)  # one network, as all servers of a model have
    found = [Site(inner), Site(inner)]
    for site in found:
        await site.start()
    yield found
    for site in found:
        await site.stop()


@pytest.fixture
async def router(sites: list[Site]) -> AsyncIterator[Router]:
    made = Router([OpenAIEngine(site.url, retries=0, key="") for site in sites], health_interval=0.02)
    yield made
    await made.disconnect()


def seeded(seed: int) -> Sampling:
    return Sampling(max_tokens=3, seed=seed)


async def test_passes_check_engine(router: Router, bytes_: Any) -> None:
    prompts = [np.array(ids, np.int32) for ids in ([5, 6, 7], [9] * 8)]
    assert await check_engine(router, prompts, decode=lambda ids: str(bytes_.decode(ids.tolist()))) == []


async def test_the_sessions_of_a_share_stay_together_and_shares_spread(router: Router, sites: list[Site]) -> None:
    await router.connect(PROMPT)
    assert router.context == 4096
    sessions = [router.open(share) for share in ("a", "a", "b", "b")]
    for site in sites:
        site.asked.clear()
    for _ in range(2):
        await asyncio.gather(*(router.generate(PROMPT, seeded(i), one) for i, one in enumerate(sessions)))
    assert [dict(site.asked) for site in sites] == [{"0": 2, "1": 2}, {"2": 2, "3": 2}]


async def test_unreachable_server_is_left_and_used_again_after_return(
    router: Router, sites: list[Site], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = router.open("a"), router.open("b")
    before = await router.generate(PROMPT, seeded(1), one)
    await router.generate(PROMPT, seeded(2), other)
    await sites[0].stop()
    after = await router.generate(PROMPT, seeded(1), one)
    assert after.token_ids.tolist() == before.token_ids.tolist()
    assert (sites[0].asked["1"], sites[1].asked["1"]) == (1, 1)  # once each: nothing was sampled twice at one
    assert "its sessions move to other servers until it is back" in caplog.text
    await sites[0].start()
    while "server 0 is back" not in caplog.text:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    third = router.open("c")
    await router.generate(PROMPT, seeded(3), third)
    assert (sites[0].asked["3"], sites[1].asked["3"]) == (1, 0)


async def test_all_unreachable_is_an_error(router: Router, sites: list[Site]) -> None:
    session = router.open("a")
    for site in sites:
        await site.stop()
    with pytest.raises(EngineGoneError, match="none of 2 servers answers; the last: the server at"):
        await router.generate(PROMPT, seeded(1), session)
    assert not await router.healthy()
    with pytest.raises(EngineGoneError):
        await router.connect(PROMPT)


async def test_refused_request_moves_no_session(router: Router, sites: list[Site]) -> None:
    session = router.open("a")
    with pytest.raises(EngineError, match="refuses a request") as caught:
        await router.generate(np.full(5000, 7, np.int32), seeded(1), session)
    assert not isinstance(caught.value, EngineGoneError)
    assert await router.healthy()
    with pytest.raises(ConfigError, match="needs a server at least"):
        Router([])
