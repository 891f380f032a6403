"""Working copies: what of them is the agent's doing, and what is the machine's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from turnstile.errors import SandboxError, TaskError
from turnstile.sandboxes.base import ExecResult, Limits, Sandbox
from turnstile.sandboxes.local import LocalSandboxes
from turnstile.swe.formats.instance import Instance
from turnstile.swe.problems.copy import MOST_BYTES, ChangeError, Copy, begin, check_ended
from turnstile.swe.problems.image import run


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[Sandbox]:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a.py").write_text("A = 1\n")
    sandboxes = LocalSandboxes()
    yield await sandboxes.start(tmp_path / "tree")
    await sandboxes.close()


@pytest.fixture
async def copy(sandbox: Sandbox) -> Copy:
    return await begin(sandbox, "task")


async def test_a_command_that_was_ended_raises_a_sandbox_error(sandbox: Sandbox) -> None:
    for limits, command in ((Limits(seconds=0.2), "sleep 60"), (Limits(), "kill -9 $$")):
        done = await sandbox.exec(["bash", "-c", command], limits=limits)
        with pytest.raises(SandboxError, match=r"it (did not end within|was killed)"):
            check_ended(done, "it")
    check_ended(ExecResult(exit_code=1, stdout="", stderr="", seconds=1.0), "it")


async def test_a_killed_preparation_is_not_the_tasks_fault(sandbox: Sandbox) -> None:
    instance = Instance(id="one", problem="p", image="i")
    with pytest.raises(SandboxError, match=r"a command \(its bug does not apply\) was killed"):
        await run(instance, sandbox, "kill -9 $$", "its bug does not apply")
    with pytest.raises(TaskError, match=r"its bug does not apply: no"):
        await run(instance, sandbox, "echo no >&2; exit 1", "its bug does not apply")


@pytest.mark.parametrize(("script", "error"), [("os.kill(os.getpid(), 9)", SandboxError), ("exit(3)", ChangeError)])
async def test_a_listing_that_was_killed_or_failed_gives_no_change(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, script: str, error: type[Exception]
) -> None:
    monkeypatch.setattr("turnstile.swe.problems.copy._SCRIPT", f"import os; {script}")
    with pytest.raises(error):
        await copy.change()


async def test_files_that_are_too_large_are_refused_before_they_are_read(copy: Copy) -> None:
    done = await copy.sandbox.exec(["truncate", "-s", str(MOST_BYTES + 1), "large"], limits=Limits(file_mb=128))
    assert done.exit_code == 0
    assert (await copy.manifest())["large"].startswith(f"f{MOST_BYTES + 1} at ")
    assert await copy.size("large") == MOST_BYTES + 1
    assert (await copy.size("a.py"), await copy.size("none"), await copy.size("../large")) == (6, None, None)
    with pytest.raises(ChangeError, match="larger than 64 MiB together"):
        await copy.change()
