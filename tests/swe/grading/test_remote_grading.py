"""Repository tasks graded on another machine: a real server in a process of its own."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from served import Served, served
from turnstile.config import make_recipe
from turnstile.errors import SandboxError
from turnstile.swe.bug import Bug, package_of
from turnstile.swe.grading.grader import CodeGrader
from turnstile.swe.grading.judge import fault
from turnstile.wiring.world import World, make_world


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "served", "local") as running:
        yield running


@pytest.fixture
def world(server: Served) -> World:
    knobs = {"kind": "remote", "url": server.url, "token_file": str(server.token_file)}
    return make_world(make_recipe({"name": "graded", "env": {"kind": "swe"}, "sandbox": knobs}))


async def test_a_made_task_is_graded_over_http(
    server: Served, world: World, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNSTILE_CACHE", str(reference.cache))
    bug = Bug.of(next(task for task in reference.made.tasks if task.id.endswith("l9-minmax-0")))
    grader = next(part for part in world.shared if isinstance(part, CodeGrader))
    try:
        assert await fault(grader, bug, package_of(bug)) is None  # solved by the repair, and by nothing else not
        assert grader.runs >= 2
    finally:
        await world.close()
    assert "client graded: closed, as it said so" in server.log


async def test_a_grader_recovers_from_a_restart_of_the_server(server: Served, world: World, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "ten.py").write_text("TEN = 11\n")
    (package / "test_ten.py").write_text("from ten import TEN\n\n\ndef test_ten():\n    assert TEN == 10\n")
    grader = next(part for part in world.shared if isinstance(part, CodeGrader))
    test = "test_ten.py::test_ten"
    try:
        assert not (await grader.grade(package, {}, fail_to_pass=[test])).resolved
        server.end(signal.SIGKILL)
        server.start()
        with pytest.raises(SandboxError, match=r"snapshot ended with|does not know us"):
            await grader.grade(package, {"ten.py": b"TEN = 10\n"}, fail_to_pass=[test])
        assert (await grader.grade(package, {"ten.py": b"TEN = 10\n"}, fail_to_pass=[test])).resolved
    finally:
        await world.close()
