from __future__ import annotations

import asyncio

import pytest

from turnstile.errors import VerifierError
from turnstile.swe.grading.memo import Memo


async def test_equal_requests_share_a_run_and_old_ones_are_forgotten() -> None:
    memo: Memo[int] = Memo(2, passing=lambda _: False)
    open_ = asyncio.Event()

    async def run() -> int:
        await open_.wait()
        return memo.runs

    both = asyncio.gather(memo.get("a", run), memo.get("a", run))
    await asyncio.sleep(0)
    open_.set()
    assert sorted(await both) == [(1, False), (1, True)]
    assert await memo.get("a", run) == (1, True)
    for key in "bc":
        await memo.get(key, run)
    assert await memo.get("a", run) == (4, False)
    assert (memo.runs, memo.reused) == (4, 2)


async def test_a_transient_result_is_tried_twice_and_not_remembered() -> None:
    memo: Memo[int] = Memo(9, passing=lambda found: found < 3)

    async def run() -> int:
        return memo.runs

    assert [await memo.get("a", run) for _ in range(3)] == [(2, False), (3, False), (3, True)]


async def test_errors_are_not_remembered_and_a_run_survives_a_cancelled_caller() -> None:
    memo: Memo[str] = Memo(9, passing=lambda _: False)

    async def fail() -> str:
        raise VerifierError("it broke")

    async def work() -> str:
        await asyncio.sleep(0.01)
        return "done"

    with pytest.raises(VerifierError):
        await memo.get("a", fail)
    impatient = asyncio.ensure_future(memo.get("a", work))
    patient = asyncio.ensure_future(memo.get("a", work))
    await asyncio.sleep(0)
    impatient.cancel()
    assert await patient == ("done", True)
    running = asyncio.ensure_future(memo.get("b", work))
    await asyncio.sleep(0)
    await memo.close()
    with pytest.raises(asyncio.CancelledError):
        await running
