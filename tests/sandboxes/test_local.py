from __future__ import annotations

import asyncio
import gc
import os
import shutil
import threading
from pathlib import Path

import pytest

from turnstile.errors import SandboxError
from turnstile.sandboxes import folder
from turnstile.sandboxes.base import Limits, Sandbox, Sandboxes
from turnstile.sandboxes.check import check_sandboxes
from turnstile.sandboxes.local import LocalSandboxes


async def test_local_sandboxes_conform(tmp_path: Path) -> None:
    provider = LocalSandboxes(root=tmp_path / "home")
    assert isinstance(provider, Sandboxes)
    assert await check_sandboxes(provider) == []
    assert list((tmp_path / "home").iterdir()) == []


async def test_the_template_stays_as_it_was(local: LocalSandboxes, template: Path) -> None:
    sandbox = await local.start(template)
    assert isinstance(sandbox, Sandbox)
    await sandbox.exec(["sh", "-c", "echo broken > pkg/__init__.py; rm run.sh; echo new > new"])
    await sandbox.write("pkg/__init__.py", b"")
    assert (template / "pkg" / "__init__.py").read_text() == "answer = 42\n"
    assert sorted(os.listdir(template)) == ["pkg", "run.sh"]
    await sandbox.close()


async def test_programs_of_the_tree_and_modules_run(local: LocalSandboxes, template: Path) -> None:
    sandbox = await local.start(template)
    assert (await sandbox.exec(["./run.sh"])).stdout == "ran\n"
    (sandbox.root / "main.py").write_text("import pkg\nprint(pkg.answer)\n")
    assert (await sandbox.exec(["python", "-m", "main"])).stdout == "42\n"
    assert (await sandbox.exec(["python", "main.py"])).stdout == "42\n"
    await sandbox.close()


async def test_home_and_temporary_files_are_the_sandboxs_own(local: LocalSandboxes, template: Path) -> None:
    sandbox = await local.start(template)
    code = "import tempfile, pathlib; print(tempfile.gettempdir(), pathlib.Path.home())"
    scratch = str(sandbox.folder / "scratch")
    assert (await sandbox.exec(["python", "-c", code])).stdout.split() == [scratch, scratch]
    await sandbox.close()
    assert not sandbox.folder.exists()


def sandboxes(home: Path) -> list[Path]:
    return list(home.glob("*/sandbox-*"))


async def test_a_failed_start_leaves_nothing(tmp_path: Path) -> None:
    provider = LocalSandboxes(root=tmp_path / "home")
    with pytest.raises(SandboxError, match="no template folder"):
        await provider.start(tmp_path / "none")
    assert sandboxes(tmp_path / "home") == []
    await provider.close()


async def test_a_cancelled_start_leaves_nothing(
    tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is removed is removed when the thread that copies has ended, or it would make some of it again."""
    copied: list[str] = []
    begun, go_on, copy = threading.Event(), threading.Event(), folder.copy_file

    def slow(source: str, target: str) -> None:
        begun.set()
        go_on.wait(30)
        copy(source, target)
        copied.append(os.path.basename(target))

    monkeypatch.setattr(folder, "copy_file", slow)
    provider = LocalSandboxes(root=tmp_path / "home")
    starting = asyncio.create_task(provider.start(template))
    await asyncio.to_thread(begun.wait, 30)
    starting.cancel()
    await asyncio.sleep(0.1)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert sorted(copied) == ["__init__.py", "run.sh"]
    assert sandboxes(tmp_path / "home") == []
    await provider.close()


async def test_a_sandbox_whose_folder_is_gone_is_broken(local: LocalSandboxes, template: Path) -> None:
    sandbox = await local.start(template)
    shutil.rmtree(sandbox.root)
    for attempt in (sandbox.exec(["true"]), sandbox.read("run.sh"), sandbox.write("x", b""), sandbox.snapshot()):
        with pytest.raises(SandboxError, match="gone"):
            await attempt
    await sandbox.close()


async def test_a_commands_own_limits_win(template: Path, tmp_path: Path) -> None:
    provider = LocalSandboxes(root=tmp_path / "home", preload=(), limits=Limits(seconds=0.3))
    sandbox = await provider.start(template)
    assert (await sandbox.exec(["sleep", "0.6"])).timed_out
    assert not (await sandbox.exec(["sleep", "0.6"], limits=Limits(seconds=20))).timed_out
    await provider.close()
    await provider.close()


def test_files_go_with_the_provider(tmp_path: Path) -> None:
    provider = LocalSandboxes(root=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    del provider
    gc.collect()
    assert list(tmp_path.iterdir()) == []


class Leaky(LocalSandboxes):
    """Hands out the template itself instead of a copy."""

    async def start(self, template: Path, *, deps: Path | None = None):  # type: ignore[no-untyped-def]
        sandbox = await super().start(template)
        sandbox.root = template
        return sandbox


async def test_the_checker_finds_shared_files(tmp_path: Path) -> None:
    found = await check_sandboxes(Leaky(root=tmp_path))
    assert "files: two sandboxes share files" in found
    assert "files: a write reached the template" in found
    assert "snapshot: a copy's write reached the snapshot" in found
