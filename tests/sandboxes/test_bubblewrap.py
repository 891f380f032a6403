from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from turnstile.config import make_recipe
from turnstile.errors import ConfigError, SandboxError
from turnstile.sandboxes.bubblewrap import BubblewrapSandboxes, Cell, unused_packages
from turnstile.sandboxes.check import check_sandboxes
from turnstile.swe.packages.source import deps_home
from turnstile.wiring.world import make_world

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


@needs_bubblewrap
async def test_of_the_package_cache_only_its_own_dependencies_can_be_read(
    tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("TURNSTILE_CACHE", str(cache))
    monkeypatch.setenv("ANSWER", "42")
    answer = cache / "swe" / "tiny-1.0" / "tree" / "tiny.py"
    answer.parent.mkdir(parents=True)
    answer.write_text("answer = 42\n")
    others = cache / "swe-deps" / "user-of-tiny-1.0" / "tiny.py"  # what another task's package depends on
    others.parent.mkdir(parents=True)
    others.write_text("answer = 42\n")
    world = make_world(make_recipe({"env": {"kind": "swe"}, "sandbox": {"kind": "bubblewrap", "spare": 0}}))
    try:
        (sandboxes,) = (part for part in world.shared if isinstance(part, BubblewrapSandboxes))
        helper = deps_home() / "tiny-1.0" / "helper.py"  # fetched after the provider was made
        helper.parent.mkdir()
        helper.write_text("help = 'given'\n")
        sandbox = await sandboxes.start(template, deps=helper.parent)
        imported = await sandbox.exec(["python", "-c", "import helper"], env={"PYTHONPATH": str(helper.parent)})
        assert imported.exit_code == 0, imported.stderr
        assert (await sandbox.exec(["cat", str(answer)])).exit_code != 0
        seen = await sandbox.exec(["sh", "-c", f"find {tmp_path} -name '*.py'; ls ~ /root /home /etc/shadow; env"])
        assert seen.stdout.split("\n")[0] == str(helper)
        assert "tree" not in seen.stdout
        assert "ANSWER" not in seen.stdout
    finally:
        await world.close()


@needs_bubblewrap
@pytest.mark.skipif(not any(map(os.listdir, unused_packages())), reason="no other packages than those in use")
async def test_what_a_virtual_environments_base_has_installed_is_not_shown(tmp_path: Path, template: Path) -> None:
    provider = BubblewrapSandboxes(root=tmp_path / "home", spare=0)
    sandbox = await provider.start(template)
    for folder in unused_packages():
        assert (await sandbox.exec(["ls", "-A", folder])).stdout == ""
        assert (await sandbox.exec(["touch", f"{folder}/mine"])).exit_code != 0
    done = await sandbox.exec(["python3", "-c", "import ensurepip, sqlite3, ssl, numpy, turnstile"])
    assert done.exit_code == 0, done.stderr
    await provider.close()


class Failing(BubblewrapSandboxes):
    """Its `at`-th cell cannot be made; those that were are in `made`."""

    def __init__(self, at: int, home: Path) -> None:
        super().__init__(root=home, spare=2)
        self.at = at
        self.made: list[Cell] = []

    def _start_cell(self, deps: Path | None) -> Cell:
        if len(self.made) + 1 == self.at:
            self._bwrap = "/there/is/no/bwrap"
        self.made.append(super()._start_cell(deps))
        return self.made[-1]


@needs_bubblewrap
@pytest.mark.parametrize("at", [2, 3])
async def test_a_spare_that_cannot_be_had_is_missed_by_nobody(
    at: int, tmp_path: Path, template: Path, caplog: pytest.LogCaptureFixture
) -> None:
    provider = Failing(at, tmp_path / "home")
    sandbox = await provider.start(template)
    assert "no spare sandbox could be started: the fork server cannot be started" in caplog.text
    assert (await sandbox.exec(["true"])).exit_code == 0
    left = sorted(path.name for path in provider._home.path.glob("sandbox-*"))
    assert left == [f"sandbox-{number}" for number in range(at - 1)]
    await provider.close()
    assert [server.pid for _, server in provider.made] == [None] * (at - 1)


@needs_bubblewrap
async def test_nothing_is_left_of_spares_that_made_room_for_one_that_failed(tmp_path: Path, template: Path) -> None:
    shelf = tmp_path / "shelf"
    (shelf / "other").mkdir(parents=True)
    provider = Failing(4, tmp_path / "home")
    provider._shelf = shelf
    await (await provider.start(template)).close()
    with pytest.raises(SandboxError, match="the fork server cannot be started"):
        await provider.start(template, deps=shelf / "other")
    await asyncio.gather(*provider._ending)
    assert [server.pid is None for _, server in provider.made] == [True, True, False]
    await provider.close()
    assert [server.pid for _, server in provider.made] == [None] * 3
    assert list((tmp_path / "home").iterdir()) == []


@needs_bubblewrap
async def test_another_packages_sandboxes_are_soon_ready_too(tmp_path: Path, template: Path) -> None:
    shelf = tmp_path / "shelf"
    for name in "ab":
        (shelf / name).mkdir(parents=True)
    provider = Failing(0, tmp_path / "home")
    provider._shelf = shelf
    for name in "abababab":
        await (await provider.start(template, deps=shelf / name)).close()
    await provider.close()
    assert len(provider.made) == 8 + 3  # two spares are left, and one made room


def test_missing_bubblewrap_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="apt-get install bubblewrap"):
        BubblewrapSandboxes()


@needs_bubblewrap
def test_what_is_to_be_read_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.readable names '.*none', which is not there"):
        BubblewrapSandboxes(root=tmp_path / "home", readable=[tmp_path / "none"])
