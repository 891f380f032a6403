"""The shell-and-editor environment: its tools, what it says, what it measures; over sandboxes of this machine."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from helpers import bug_task
from turnstile.envs.check import check_env
from turnstile.sandboxes.bubblewrap import BubblewrapSandboxes
from turnstile.sandboxes.local import LocalSandboxes
from turnstile.swe.envs.shell import ShellEnv
from turnstile.swe.grading.grader import CodeGrader
from turnstile.swe.grading.testrun import PRELOAD
from turnstile.swe.packages.source import deps_home
from turnstile.swe.problems.problems import Problems
from turnstile.swe.shell_oracle import demonstrate, oracle
from turnstile.tasks.demonstration import call
from turnstile.types import Message, Task, ToolCall

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
    yield Problems(CodeGrader(sandboxes))
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


async def test_the_oracle_resolves_the_task(env: ShellEnv, task: Task) -> None:
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
        "submitted": True, "modified": True, "resolved": True, "f2p_passed": 2, "f2p_total": 2,
        "f2p_tests": {"tests/test_clamp.py::test_below": True, "tests/test_clamp.py::test_inside": True},
        "p2p_passed": 1, "p2p_total": 1, "ignored": 0, "problem": "",
    }  # fmt: skip
    assert patch.startswith(f"diff --git a/{FILE} b/{FILE}\n--- a/{FILE}\n+++ b/{FILE}\n@@ ")
    assert "-        if value > low:\n+        if value < low:\n" in patch


async def test_a_command_is_answered_with_its_output_and_exit_code(env: ShellEnv) -> None:
    assert await said(env, "bash", command="echo out; echo err >&2; exit 3") == "out\nerr\n[exit code 3]"
    assert await said(env, "bash", command="cd tests") == "[exit code 0]"
    assert "test_clamp.py" not in await said(env, "bash", command="ls")  # each call begins in the root
    step = await env.step(call("bash", command="false"))
    assert (step.signals["succeeded"], step.signals["reason"]) == (False, "exit code 1")
    step = await env.step(call("bash", command=f"cat {FILE}"))
    assert step.signals["looked_at_failing_code"]
    long = await said(env, "bash", command="seq 100000")
    assert len(long) < 11_000
    assert "left out" in long
    assert long.endswith("100000")
    assert await said(env, "bash", command="cat") == "[exit code 0]"  # there is no input
    assert "text of at most" in await said(env, "bash", command="x" * 100_001)
    assert "text of at most" in await said(env, "bash", command="echo \0")


async def test_a_command_is_stopped_at_its_time_limit(problems: Problems, task: Task) -> None:
    env = ShellEnv(problems=problems, seconds=1.0)
    await env.reset(task)
    step = await env.step(call("bash", command="echo begun; sleep 60"))
    await env.close()
    assert step.messages[0].content == "begun\n[timed out after 1 s]"
    assert step.signals["reason"] == "timed out"


async def test_view_shows_lines_and_folders_or_says_why_not(env: ShellEnv) -> None:
    assert await said(env, "view", path=FILE, start=11, end=12) == (
        "    11\t        if value > low:\n    12\t            return low\n[3 more lines]"
    )
    assert await said(env, "view", path=".") == "LICENSE\npyproject.toml\ntests/\ntinyrange/"
    assert await said(env, "view", path=FILE, start=99) == f"{FILE} has 15 lines; lines 99 to its end are none of them."
    assert await said(env, "view", path="clamp/__init__.py") == f"There is no file clamp/__init__.py; there is {FILE}."
    assert "leaves the sandbox" in await said(env, "view", path="../../etc/passwd")
    await env.step(
        call("bash", command="printf 'a\\0b' > data; seq 5000 > long; printf 'caf\\351\\n' > latin; touch no")
    )
    assert await said(env, "view", path="data") == "data is a binary file of 3 bytes."
    assert await said(env, "view", path="latin") == "     1\tcaf?"
    assert await said(env, "view", path="no") == "no is empty."
    long = await said(env, "view", path="long")
    assert long.startswith("     1\t1\n     2\t2\n")
    assert long.endswith("   918\t918\n[lines 919 to 5000 are left out here; view them with start=919]")


async def test_a_large_file_is_not_read(env: ShellEnv) -> None:
    await env.step(call("bash", command="truncate -s 9M large; mkdir folder; ln -s ../large folder/link"))
    say = "large is larger than the 8 MiB that view takes; use bash, with head or sed."
    assert await said(env, "view", path="large") == say
    assert "folder/link is larger" in await said(env, "str_replace", path="folder/link", old="a", new="b")
    assert "is there already" in await said(env, "create", path="large", text="")
    assert await said(env, "view", path="folder") == "link"
    assert "cannot be read" in await said(env, "view", path="a\0b")
    assert "cannot be read" in await said(env, "view", path="a\ud800b")


@pytest.mark.parametrize(
    ("old", "new", "answer"),
    [
        ("value > ", "x", "old occurs 2 times, at lines 11 and 13; give more of the lines around it"),
        ("", "x", "old is empty; give the text"),
        ("return low", "return low", "no change: old and new are the same"),
        ("if value > low:\n    return low", "x", "whitespace or indentation differs. From line 11 it is:\n        if"),
        ("if  value>low:", "x", "whitespace or indentation differs. From line 11 it is:\n        if value > low:"),
        ("    11\t        if value > low:", "x", "it holds the line numbers that view shows, leave them out"),
        (
            "if value > lwo:",
            "x",
            "the nearest that is there:\n    10\t        # below first\n    11\t        if value > low:",
        ),
    ],
)
async def test_an_edit_that_fails_says_why(env: ShellEnv, old: str, new: str, answer: str) -> None:
    step = await env.step(call("str_replace", path=FILE, old=old, new=new))
    assert answer in step.messages[0].content.replace("11, 13", "11 and 13")
    assert not step.signals["succeeded"]
    assert not step.signals["modified"]


async def test_edits_keep_bytes_and_line_ends(env: ShellEnv) -> None:
    await env.step(call("bash", command="printf 'one\\r\\ncaf\\351\\r\\ntwo\\r\\n' > dos.txt"))
    assert "Replaced" in await said(env, "str_replace", path="dos.txt", old="one\ncaf", new="1\n2\ncaf")
    assert await said(env, "bash", command="od -An -c dos.txt | tr -d ' \\n'") == r"1\r\n2\r\ncaf351\r\ntwo\r\n"
    assert await said(env, "create", path="new/file.py", text="A = 1\n") == "Wrote new/file.py."
    assert "is there already" in await said(env, "create", path="new/file.py", text="")
    assert "is a folder" in await said(env, "str_replace", path="new", old="a", new="b")
    assert "needs old and new as text" in await said(env, "str_replace", path=FILE, old=1)


async def test_changed_tests_are_ignored_and_changed_code_is_graded(env: ShellEnv) -> None:
    await env.step(call("bash", command="echo 'def test_below(): pass' > tests/test_clamp.py; echo > conftest.py"))
    found = await env.measure()
    assert (found["modified"], found["ignored"], found["patch"], found["resolved"]) == (False, 2, "", False)
    await env.step(call("bash", command=f"sed -i 's/value > low/value < low/' {FILE}; rm LICENSE; rm -rf .git"))
    found = await env.measure()
    assert (found["modified"], found["ignored"], found["resolved"], found["submitted"]) == (True, 2, True, False)
    assert "deleted file mode 100644\n--- a/LICENSE\n+++ /dev/null\n" in str(found["patch"])


async def test_executable_files_stay_executable_in_grading(env: ShellEnv) -> None:
    command = f"printf '#!/bin/sh\\n' > run.sh; chmod +x run.sh; sed -i 's/value > low/value < low/' {FILE}"
    await env.step(
        call("bash", command=f"{command}; printf 'import subprocess\\nsubprocess.run([\"./run.sh\"])\\n' >> {FILE}")
    )
    found = await env.measure()
    assert (found["resolved"], found["problem"]) == (True, "")


async def test_too_many_changed_files_fail_the_task(env: ShellEnv) -> None:
    await env.step(call("bash", command="mkdir many; cd many; seq 2001 | xargs touch"))
    found = await env.measure()
    assert (found["modified"], found["resolved"]) == (True, False)
    assert found["problem"] == "2001 files were changed; at most 2000 are taken up"


async def test_the_state_key_depends_on_the_files_and_the_view(env: ShellEnv) -> None:
    keys = [env.state_key()]
    for name, arguments in (
        ("view", {"path": FILE}),
        ("bash", {"command": "touch tests/__pycache__.pyc; true"}),
        ("bash", {"command": "echo > new"}),
        ("bash", {"command": "rm new"}),
    ):
        await env.step(call(name, **arguments))
        keys.append(env.state_key())
    assert keys[0] != keys[1] == keys[2] != keys[3]
    assert keys[4] == keys[1]


async def test_a_message_may_hold_several_calls_or_none(env: ShellEnv) -> None:
    calls = tuple(
        ToolCall(id=f"c{number}", name=name, arguments=arguments)
        for number, (name, arguments) in enumerate(
            [("bash", {"command": "false"}), ("view", {"path": FILE}), ("submit", {}), ("view", {"path": FILE})]
        )
    )
    step = await env.step(Message(role="assistant", tool_calls=calls))
    assert [message.tool_call_id for message in step.messages] == ["c0", "c1", "c2"]
    assert (step.submitted, step.signals["command"]) == (True, "bash+view+submit")
    assert (step.signals["succeeded"], step.signals["looked_at_failing_code"]) == (False, True)
    step = await env.step(Message(role="assistant", content="I am done."))
    assert "There is no tool call in this" in step.messages[0].content
    assert not step.signals["parsed"]


async def test_it_keeps_the_promises_of_an_environment(problems: Problems, task: Task) -> None:
    script = [step.message for step in demonstrate(task, random.Random(0), skip_run=1.0)][1:]
    assert [message.tool_calls[0].name for message in script] == ["view", "str_replace", "submit"]
    assert await check_env(lambda: ShellEnv(problems=problems), task, actions=script) == []


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
async def test_the_oracle_resolves_the_task_in_bubblewrap(task: Task, tmp_path_factory: pytest.TempPathFactory) -> None:
    sandboxes = BubblewrapSandboxes(preload=PRELOAD, spare=0, shelf=deps_home())
    env = ShellEnv(problems=Problems(CodeGrader(sandboxes)))
    try:
        await env.reset(task)
        act = oracle(task)
        steps = [await env.step(act(())) for _ in range(5)]
        found = await env.measure()
    finally:
        await env.close()
        await sandboxes.close()
    assert steps[-1].submitted
    assert found["resolved"] is True
