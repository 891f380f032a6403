"""The shell-and-editor environment: its tools, what it says, what it measures; over sandboxes of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from helpers import bug_task
from turnstile.envs.shell import ShellEnv
from turnstile.sandboxes.local import LocalSandboxes
from turnstile.tasks.demonstration import call
from turnstile.tasks.swe.grading.grader import Grader
from turnstile.tasks.swe.grading.testrun import PRELOAD
from turnstile.tasks.swe.problems.problems import Problems
from turnstile.tasks.swe.shell_oracle import oracle
from turnstile.types import Task

FILE = "tinyrange/__init__.py"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Task]:
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURNSTILE_CACHE", str(cache))
        yield bug_task(cache)


@pytest.fixture(scope="module")
def problems() -> Iterator[Problems]:
    sandboxes = LocalSandboxes(preload=PRELOAD)
    yield Problems(Grader(sandboxes))
    asyncio.run(sandboxes.close())


@pytest.fixture
async def env(problems: Problems, task: Task) -> AsyncIterator[ShellEnv]:
    env = ShellEnv(problems=problems)
    await env.reset(task)
    yield env
    await env.close()


async def said(env: ShellEnv, name: str, **arguments: Any) -> str:
    step = await env.step(call(name, **arguments))
    return "\n".join(message.content for message in step.messages)


async def test_the_oracle_resolves(env: ShellEnv, task: Task) -> None:
    act = oracle(task)
    steps = [await env.step(act(())) for _ in range(5)]
    assert [step.signals["command"] for step in steps] == ["bash", "view", "str_replace", "bash", "submit"]
    assert [step.submitted for step in steps] == [False] * 4 + [True]
    assert "1 failed" in steps[0].messages[0].content
    assert "1 passed" in steps[3].messages[0].content
    assert steps[0].signals["ran_tests"]
    assert not steps[0].signals["modified"]
    assert steps[1].signals["looked_at_failing_code"]
    assert steps[2].signals["modified"]
    signals = dict(await env.measure())
    patch = str(signals.pop("patch"))
    assert signals == {
        "submitted": True, "modified": True, "resolved": True, "f2p_passed": 2, "f2p_total": 2, "p2p_passed": 1,
        "p2p_total": 1, "ignored": 0, "problem": "",
    }  # fmt: skip
    assert patch.startswith(f"diff --git a/{FILE} b/{FILE}\n--- a/{FILE}\n+++ b/{FILE}\n@@ ")
    assert "-        if value > low:\n+        if value < low:\n" in patch
