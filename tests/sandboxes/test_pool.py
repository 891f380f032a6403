from __future__ import annotations

import asyncio
import time

import pytest

from turnstile.errors import SandboxError
from turnstile.sandboxes.pool import Pool


class Part:
    """A member that knows whether it is alive."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.well = True
        self.ended = False

    async def alive(self) -> bool:
        return self.well

    async def end(self) -> None:
        self.ended = True


class Maker:
    """Makes parts, except the first `fail` times; knows how many it made at once at most."""

    def __init__(self, fail: int = 0) -> None:
        self.made: list[Part] = []
        self.calls = 0
        self.fail = fail
        self.now = self.most = 0

    async def __call__(self, kind: str) -> Part:
        self.calls += 1
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.01)
        self.now -= 1
        if self.calls <= self.fail:
            raise SandboxError("not today")
        self.made.append(Part(kind))
        return self.made[-1]


async def until_ready(pool: Pool[str, Part], count: int) -> None:
    async with asyncio.timeout(20):
        while pool.ready < count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_spares_are_kept_ready_and_few_start_at_once() -> None:
    maker = Maker()
    pool = Pool(maker, warm=3, most=20, starts=2)
    taken = await asyncio.gather(*(pool.take("a") for _ in range(9)))
    assert len(set(map(id, taken))) == 9
    await until_ready(pool, 3)
    assert (maker.calls, maker.most) == (12, 2)
    spare = await pool.take("a")
    assert spare in maker.made[9:]
    await pool.close()
    assert all(part.ended for part in maker.made if part not in (*taken, spare))


async def test_a_spare_that_died_is_not_handed_out() -> None:
    maker = Maker()
    pool = Pool(maker, warm=2, most=4, starts=2)
    await pool.take("a")
    await until_ready(pool, 2)
    for part in maker.made:
        part.well = False
    assert (await pool.take("a")).well
    assert all(part.ended for part in maker.made[1:3])
    await pool.close()


async def test_a_place_has_to_be_free() -> None:
    pool = Pool(Maker(), warm=0, most=2, starts=2, patience=0.05)
    await pool.take("a")
    await pool.take("a")
    with pytest.raises(SandboxError, match=r"all 2 are in use; raise sandbox\.pool\.most"):
        await pool.take("a")
    pool.leave()
    await pool.take("a")
    await pool.close()


async def test_a_struggling_maker_is_given_time_and_then_up() -> None:
    maker = Maker(fail=2)
    pool = Pool(maker, warm=0, most=1, starts=1, tries=3, pause=0.01)
    await pool.take("a")
    assert maker.calls == 3
    await pool.close()
    maker = Maker(fail=5)
    pool = Pool(maker, warm=0, most=1, starts=1, tries=3, pause=0.01)
    with pytest.raises(SandboxError, match="not today"):
        await pool.take("a")
    assert maker.calls == 3
    assert await pool.take("a")  # its place was given back, and it is the sixth call that succeeds
    await pool.close()


async def test_pauses_after_failures_double_up_to_the_longest() -> None:
    pool = Pool(Maker(fail=9), warm=0, most=1, starts=1, tries=1, pause=100, longest=700)
    for pause in (100, 200, 400, 700, 700):
        with pytest.raises(SandboxError, match="not today"):
            await pool.take("a")
        left, pool._not_before = pool._not_before - time.monotonic(), 0.0
        assert 0.75 * pause - 1 < left < 1.25 * pause
    await pool.close()


async def test_a_member_without_spares_takes_a_place_but_none_of_the_spares() -> None:
    maker = Maker()
    pool = Pool(maker, warm=1, most=3, starts=1)
    await pool.take("a")
    await until_ready(pool, 1)
    assert await pool.take("a", spares=False) is maker.made[2]
    assert pool.ready == 1
    await pool.close()


async def test_spares_are_of_the_kind_that_is_asked_for() -> None:
    maker = Maker()
    pool = Pool(maker, warm=2, most=8, starts=1)
    await pool.take("a")
    await until_ready(pool, 2)
    first, second = maker.made[1:3]
    assert (await pool.take("b")).kind == "b"
    await until_ready(pool, 2)
    assert (first.ended, second.ended) == (True, False)
    spare = maker.made[-1]
    assert await pool.take("b") is spare
    assert await pool.take("a") is second
    await pool.close()


def test_a_pool_goes_on_in_another_event_loop() -> None:
    maker = Maker()
    pool = Pool(maker, warm=1, most=1, starts=1)

    async def once() -> Part:
        part = await pool.take("a")
        pool.leave()
        await until_ready(pool, 1)
        return part

    first = asyncio.run(once())
    assert asyncio.run(once()) is not first
    asyncio.run(pool.close())


@pytest.mark.parametrize("knobs", [{"warm": -1}, {"most": 0}, {"starts": 0}])
def test_sizes_make_sense(knobs: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="room"):
        Pool(Maker(), **{"warm": 0, "most": 1, "starts": 1, **knobs})
