from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from turnstile.errors import ConfigError
from turnstile.sandboxes.bubblewrap import BubblewrapSandboxes
from turnstile.sandboxes.check import check_sandboxes

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


@needs_bubblewrap
async def test_bubblewrap_sandboxes_conform(tmp_path: Path) -> None:
    assert await check_sandboxes(BubblewrapSandboxes(root=tmp_path / "home")) == []
    assert list((tmp_path / "home").iterdir()) == []


@needs_bubblewrap
async def test_only_its_own_folder_and_tmp_can_be_written(tmp_path: Path, template: Path) -> None:
    target = Path(__file__).with_name(f"written-{os.getpid()}")
    provider = BubblewrapSandboxes(root=tmp_path / "home", preload=(), spare=0)
    sandbox = await provider.start(template)
    assert (await sandbox.exec(["touch", "mine", "/tmp/mine"])).exit_code == 0
    refused = await sandbox.exec(["touch", str(target)])
    assert refused.exit_code != 0
    assert not target.exists()
    assert not os.path.exists("/tmp/mine")  # noqa: ASYNC240
    other = await provider.start(template)
    seen = await other.exec(["sh", "-c", f"ls /tmp/mine; ls {provider._home.path}"])
    assert seen.stdout.split() == [other.folder.name]
    await provider.close()


@needs_bubblewrap
async def test_there_is_no_network_and_nobody_else(tmp_path: Path, template: Path) -> None:
    provider = BubblewrapSandboxes(root=tmp_path / "home", preload=(), spare=0)
    sandbox = await provider.start(template)
    routes = await sandbox.exec(["cat", "/proc/net/route"])
    assert routes.stdout.count("\n") <= 1  # the heading
    processes = await sandbox.exec(["sh", "-c", "echo /proc/[0-9]*"])
    assert len(processes.stdout.split()) < 10
    assert (await sandbox.exec(["cat", f"/proc/{os.getpid()}/cmdline"])).exit_code != 0
    await provider.close()


@needs_bubblewrap
async def test_folders_below_tmp_can_be_made_readable(tmp_path: Path, template: Path) -> None:
    shown = tmp_path / "shown"
    shown.mkdir()
    (shown / "file").write_text("seen\n")
    provider = BubblewrapSandboxes(root=tmp_path / "home", preload=(), spare=0, readable=[shown])
    sandbox = await provider.start(template)
    assert (await sandbox.exec(["cat", str(shown / "file")])).stdout == "seen\n"
    assert (await sandbox.exec(["touch", str(shown / "file")])).exit_code != 0
    await provider.close()


def test_missing_bubblewrap_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="apt-get install bubblewrap"):
        BubblewrapSandboxes()
