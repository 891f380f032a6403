"""Threads that help to compute are there while somebody computes, and no longer."""

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
from turnstile.engines.local.cpu.thread_pool import in_torch_threads, leave_torch_threads
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
    """Whether there come to be so many: a thread that has ended is in the list for some moments more."""
    ends = time.monotonic() + 10
    while tasks() != count and time.monotonic() < ends:
        time.sleep(0.01)
    return tasks() == count


def calm() -> int:
    """How many there are, once nobody has come or gone for a while."""
    count, since = tasks(), time.monotonic()
    while time.monotonic() < since + 0.3:
        time.sleep(0.01)
        if tasks() != count:
            count, since = tasks(), time.monotonic()
    return count


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    leave_torch_threads()
    yield None
    torch.set_num_threads(before)
    leave_torch_threads()


@pytest.mark.usefixtures("threads")
def test_who_leaves_its_team_ends_its_threads() -> None:
    alone = calm()
    compute()
    assert settles(alone + MEMBERS - 1)
    leave_torch_threads()
    assert settles(alone)
    compute()  # they come back
    assert settles(alone + MEMBERS - 1)


@pytest.mark.usefixtures("threads")
def test_all_of_a_team_work_at_once() -> None:
    """Those that compute for torch, too."""
    compute()
    seen: list[int] = []
    meet = threading.Barrier(MEMBERS, timeout=20)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def work(address: int) -> None:
        seen.append(ctypes.c_int64.from_address(address).value)
        meet.wait()

    class Given(ctypes.Structure):
        _fields_ = (("number", ctypes.c_int64),)

    before = tasks()
    in_torch_threads(ctypes.cast(work, ctypes.c_void_p).value or 0, Given(number=7))
    assert seen == [7] * MEMBERS
    assert tasks() == before  # no other threads than torch's


@pytest.mark.usefixtures("threads")
def test_others_keep_theirs() -> None:
    with ThreadPoolExecutor(1) as other:
        other.submit(compute).result()
        both = calm()
        leave_torch_threads()
        assert calm() == both
        other.submit(leave_torch_threads).result()
        assert settles(both - (MEMBERS - 1))


@pytest.mark.usefixtures("threads")
def test_an_engine_with_nothing_to_do_has_no_team(monkeypatch: pytest.MonkeyPatch) -> None:
    """And while it computes, the thread that asks it has none."""
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
    leave_torch_threads()
    assert settles(alone + 1)
