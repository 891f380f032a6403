"""Sandboxes of a container engine over HTTP, when many are used and when either end breaks."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dockerd import IMAGE, ULIMITS, Dockerd
from plays import player, says
from served import Served, served
from turnstile.envs.base import Start
from turnstile.errors import ConfigError, ContainerDiedError, DaemonError, OutOfMemoryError, SandboxError
from turnstile.sandboxes.base import Image, Limits
from turnstile.sandboxes.check import processes_with
from turnstile.swe.envs.shell import ShellEnv
from turnstile.swe.formats.instance import Instance, as_task
from turnstile.swe.grading.grader import CodeGrader
from turnstile.swe.problems.problems import Problems
from turnstile.types import Stop, Task

LONG = Limits(seconds=300, cpu_seconds=300)
CROWD = 32


@pytest.fixture
def template(tmp_path: Path) -> Path:
    folder = tmp_path / "template"
    folder.mkdir()
    (folder / "name").write_text("template\n")
    return folder


@pytest.fixture
def server(request: pytest.FixtureRequest, engine: Dockerd, tmp_path: Path) -> Iterator[Served]:
    ulimits = ", ".join(f"{name} = {most}" for name, most in ULIMITS.items())
    knobs = [
        f"image={IMAGE}",
        f"daemon={engine.address}",
        f"resources={{ ulimits = {{ {ulimits} }}, memory_mb = 256 }}",
    ]
    knobs += getattr(request, "param", [])
    with served(tmp_path / "served", "container", *knobs, "--lease", "10") as running:
        yield running
    assert (engine.containers(), engine.volumes()) == ([], [])


async def test_thirty_two_at_once(engine: Dockerd, server: Served, template: Path) -> None:
    provider = server.client()

    async def episode(number: int) -> str:
        sandbox = await provider.start(template)
        for turn in range(5):
            await sandbox.write(f"turn-{turn}", f"{number}".encode())
            result = await sandbox.exec(["cat", "name", f"turn-{turn}"], limits=LONG)
            assert result.stdout == f"template\n{number}"
        await sandbox.close()
        return result.stdout

    found = await asyncio.gather(*(episode(number) for number in range(2 * CROWD)))
    assert len(set(found)) == 2 * CROWD
    await provider.close()
    assert engine.containers() == []


async def test_two_hundred_megabytes_of_output(server: Served, template: Path) -> None:
    provider = server.client()
    sandbox = await provider.start(template)
    command = "echo begin; yes 0123456 | head -c 200000000; echo end; yes 7654321 | head -c 200000000 >&2"
    result = await sandbox.exec(["sh", "-c", command], limits=LONG)
    assert result.stdout.startswith("begin\n0123456\n")
    assert f"[... {200_000_000 + 10 - LONG.output_chars} characters left out ...]" in result.stdout
    assert f"[... {200_000_000 - LONG.output_chars} characters left out ...]" in result.stderr
    await provider.close()


async def test_memory_that_runs_out_keeps_its_name(server: Served, template: Path) -> None:
    provider = server.client()
    sandbox = await provider.start(template)
    hog = ["python", "-c", "x = [bytearray(1024) for _ in range(10**6)]"]
    with pytest.raises(OutOfMemoryError, match=r"raise sandbox\.resources\.memory_mb"):
        await sandbox.exec(hog, limits=LONG)
    assert (await sandbox.exec(["cat", "name"])).stdout == "template\n"
    await provider.close()


async def test_a_killed_server_takes_its_containers_along(engine: Dockerd, server: Served, template: Path) -> None:
    provider = server.client()
    sandboxes = [await provider.start(template) for _ in range(3)]
    commands = [
        asyncio.ensure_future(sandbox.exec(["sh", "-c", "setsid sleep 7654501 & sleep 7654501"], limits=LONG))
        for sandbox in sandboxes
    ]
    await until(lambda: len(processes_with("7654501")) == 6)
    server.end(signal.SIGKILL)
    for command in commands:
        with pytest.raises(SandboxError, match="does not answer"):
            await command
    await until(lambda: processes_with("7654501") == [])
    server.start()
    again = await provider.start(template)
    assert (await again.exec(["cat", "name"])).stdout == "template\n"
    await provider.close()


async def test_a_container_that_is_gone_keeps_its_error(engine: Dockerd, server: Served, template: Path) -> None:
    provider = server.client()
    sandbox = await provider.start(template)
    running = asyncio.ensure_future(sandbox.exec(["sleep", "7654502"], limits=LONG))
    await until(lambda: bool(processes_with("7654502")))
    with engine.client() as client:
        for identity in engine.containers():
            client.remove_container(identity, force=True)
    with pytest.raises(ContainerDiedError):
        await running
    await asyncio.to_thread(engine.kill)
    try:
        with pytest.raises(DaemonError, match="does not answer"):
            await provider.start(template)
    finally:
        await asyncio.to_thread(engine.start)
    await provider.close()


async def test_clients_have_no_image_pulled(server: Served) -> None:
    provider = server.client()
    with pytest.raises(ConfigError, match=r"start turnstile sandbox serve with --image localhost:1/other, or --pull"):
        await provider.start(Image(name="localhost:1/other", root="/"))
    await provider.close()


@pytest.mark.parametrize("server", [["isolation.user='0:0'"]], indirect=True)
async def test_an_episode_gets_over_a_server_that_took_its_image_along(server: Served, instance: Instance) -> None:
    """The images that an instance was prepared as are the server's, and go with it."""
    provider = server.client()
    problems = Problems(CodeGrader(provider))
    task = as_task(instance)
    problem = await problems.of(task)
    await (await problem.open()).close()
    opened = 0

    class Breaking(ShellEnv):
        async def reset(self, task: Task) -> Start:
            nonlocal opened
            opened += 1
            start = await super().reset(task)
            if opened == 1:  # the first attempt is under way
                server.end(signal.SIGKILL)
                server.start()
            return replace(start, tools=[tool for tool in start.tools if tool.name == "submit"])  # what a line can say

    playing = player(lambda: Breaking(problems=problems), says("submit"), retries=2)
    (group,) = await playing.groups([task], 1, label="lost", seed=0)
    (trajectory,) = group.trajectories
    assert (opened, trajectory.stop) == (3, Stop.SUBMITTED)  # in use, then started from what is gone, then made again
    assert trajectory.signals["resolved"] is False
    await problems.close()
    await provider.close()


async def until(holds: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        await asyncio.sleep(0.1)
