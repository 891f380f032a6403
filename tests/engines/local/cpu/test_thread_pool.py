"""Threads of a pool exist while their thread computes, and no longer."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import byte_tokenizer, tiny_llama
from turnstile.engines.local.cpu.thread_pool import in_torch_threads, release_torch_threads
from turnstile.engines.local.transformers import TransformersEngine
from turnstile.types import Sampling

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not any("/libgomp" in line for line in Path("/proc/self/maps").read_text().splitlines()),
    reason="for torch with libgomp",
)
MEMBERS = 5


def compute() -> None:
    torch.set_num_threads(MEMBERS)  # of the calling thread
    torch.ones(10**6).exp().sum()


def tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def settles(count: int) -> bool:
    """Return whether the number of threads becomes this: a thread that has ended stays listed for some moments."""
    ends = time.monotonic() + 10
    while tasks() != count and time.monotonic() < ends:
        time.sleep(0.01)
    return tasks() == count


def calm() -> int:
    """Return the number of threads once it has not changed for a while."""
    count, since = tasks(), time.monotonic()
    while time.monotonic() < since + 0.3:
        time.sleep(0.01)
        if tasks() != count:
            count, since = tasks(), time.monotonic()
    return count


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    release_torch_threads()
    yield None
    torch.set_num_threads(before)
    release_torch_threads()


@pytest.mark.usefixtures("threads")
def test_release_ends_the_pools_threads() -> None:
    alone = calm()
    compute()
    assert settles(alone + MEMBERS - 1)
    release_torch_threads()
    assert settles(alone)
    compute()  # they come back
    assert settles(alone + MEMBERS - 1)


@pytest.mark.usefixtures("threads")
def test_all_threads_of_a_pool_run_at_once() -> None:
    """They are the threads that compute for torch."""
    compute()
    seen: list[int] = []
    meet = threading.Barrier(MEMBERS, timeout=20)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def work(address: int) -> None:
        seen.append(ctypes.c_int64.from_address(address).value)
        meet.wait()

    class Args(ctypes.Structure):
        _fields_ = (("number", ctypes.c_int64),)

    before = tasks()
    in_torch_threads(ctypes.cast(work, ctypes.c_void_p).value or 0, Args(number=7))
    assert seen == [7] * MEMBERS
    assert tasks() == before  # no other threads than torch's


@pytest.mark.usefixtures("threads")
def test_release_keeps_other_pools() -> None:
    with ThreadPoolExecutor(1) as other:
        other.submit(compute).result()
        both = calm()
        release_torch_threads()
        assert calm() == both
        other.submit(release_torch_threads).result()
        assert settles(both - (MEMBERS - 1))


@pytest.mark.usefixtures("threads")
def test_idle_engine_has_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """And while the engine computes, the calling thread has none."""
    words = byte_tokenizer()
    engine = TransformersEngine(tiny_llama(len(words)), words)
    step, seen = engine._step, []

    def computing(*arguments: object) -> None:
        seen.append((threading.current_thread() is threading.main_thread(), bool(seen) or settles(alone + 1)))
        compute()
        step(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "_step", computing)

    async def ask() -> None:
        session = engine.open("g")
        for _ in range(2):
            compute()  # as planning may
            await engine.generate(np.arange(3, 9, dtype=np.int32), Sampling(max_tokens=3), session)
        assert engine._driver is not None
        await engine._driver
        engine.close(session)

    alone = calm()
    asyncio.run(ask())
    assert not any(main for main, _ in seen)
    assert seen[0] == (False, True)  # the engine's thread, and nobody's team
    release_torch_threads()
    assert settles(alone + 1)
