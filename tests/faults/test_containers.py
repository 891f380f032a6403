"""What a real container engine does when it, a container or the run that uses it breaks."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dockerd import IMAGE, ULIMITS, Dockerd
from turnstile.errors import ContainerDiedError, DaemonError, DiskFullError, OutOfMemoryError, SandboxError
from turnstile.sandboxes.base import Limits
from turnstile.sandboxes.check import processes_with
from turnstile.sandboxes.containers.provider import ContainerSandboxes

Make = Callable[..., ContainerSandboxes]
LONG = Limits(seconds=300, cpu_seconds=300)
CROWD = 32


async def test_thirty_two_at_once(engine: Dockerd, containers: Make, template: Path) -> None:
    provider = containers(most=CROWD, warm=4, memory_mb=256)

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
    assert (engine.containers(), engine.volumes()) == ([], [])


RUN = """
import asyncio, json, sys
from pathlib import Path
from turnstile.sandboxes.base import Limits
from turnstile.sandboxes.containers.provider import ContainerSandboxes, Isolation, PoolSize, Resources

async def main():
    knobs = json.loads(sys.argv[1])
    resources = Resources(ulimits=knobs.pop("ulimits"))
    provider = ContainerSandboxes(**knobs, resources=resources)
    snapshots = ContainerSandboxes(
        **knobs, resources=resources, isolation=Isolation(read_only=False), pool=PoolSize(warm=0)
    )
    sandboxes = [await provider.start(Path(sys.argv[2])) for _ in range(3)]
    await (await snapshots.start(Path(sys.argv[2]))).snapshot()
    sleep = ["sh", "-c", f"setsid sleep {sys.argv[3]} & sleep {sys.argv[3]}"]
    await asyncio.gather(*(sandbox.exec(sleep, limits=Limits(seconds=600)) for sandbox in sandboxes))

asyncio.run(main())
"""


async def test_a_killed_run_leaves_nothing_after_the_next_ones_sweep(
    engine: Dockerd, containers: Make, template: Path
) -> None:
    mark = "7654329"
    before = engine.images()
    knobs = {"image": IMAGE, "daemon": engine.address, "ulimits": ULIMITS}
    run = subprocess.Popen(  # noqa: ASYNC220 - over at once
        [sys.executable, "-c", RUN, json.dumps(knobs), str(template), mark]
    )
    try:
        await until(lambda: len(processes_with(mark)) >= 7)  # three pairs and the run itself
        assert len(engine.containers()) >= 4
    finally:
        run.kill()
        run.wait()
    await until(lambda: processes_with(mark) == [])  # before any sweep: the stream to their runner ended
    provider = containers()
    await provider.start(template)
    await provider.close()
    assert (engine.containers(), engine.volumes(), engine.images()) == ([], [], before)


async def test_a_restarted_daemon_is_got_over(engine: Dockerd, containers: Make, template: Path) -> None:
    provider = containers(warm=2)
    sandbox = await provider.start(template)
    await until(lambda: provider.spares == 2)
    running = asyncio.ensure_future(sandbox.exec(["sleep", "300"], limits=LONG))
    await asyncio.sleep(0.2)
    await asyncio.to_thread(engine.kill)
    with pytest.raises((DaemonError, ContainerDiedError)):
        await running
    with pytest.raises(SandboxError):
        await sandbox.exec(["true"])
    starting = asyncio.ensure_future(provider.start(template))  # while there is no daemon
    await asyncio.sleep(0.5)
    await asyncio.to_thread(engine.start)
    try:
        again = await starting
    except DaemonError:  # it took long to come back, and an episode is played again then
        again = await provider.start(template)
    assert (await again.exec(["cat", "name"], limits=LONG)).stdout == "template\n"


async def test_a_dead_daemon_is_told_as_such(engine: Dockerd, containers: Make, template: Path) -> None:
    provider = containers()
    await asyncio.to_thread(engine.kill)
    try:
        with pytest.raises(DaemonError, match="does not answer"):
            await provider.start(template)
    finally:
        await asyncio.to_thread(engine.start)


async def test_memory_eaten_by_many(containers: Make, template: Path) -> None:
    sandbox = await containers(memory_mb=128).start(template)
    eater = "import time; x = [bytearray(1024) for _ in range(60_000)]; time.sleep(60)"
    with pytest.raises(OutOfMemoryError):
        await sandbox.exec(["sh", "-c", f'for i in 1 2 3 4; do python -c "{eater}" & done; wait'], limits=LONG)
    assert (await sandbox.exec(["cat", "name"])).stdout == "template\n"


@pytest.mark.parametrize("bomb", ["b() { b | b & }; b; sleep 60", "while :; do setsid sh -c 'sleep 9' & done"])
async def test_a_fork_bomb(containers: Make, template: Path, bomb: str) -> None:
    sandbox = await containers(processes=200).start(template)
    result = await sandbox.exec(["sh", "-c", bomb], limits=Limits(seconds=20, processes=150))
    assert result.exit_code != 0
    seen = await sandbox.exec(["sh", "-c", "echo /proc/[0-9]*"])
    assert len(seen.stdout.split()) == 2  # the runner and this shell
    assert (await sandbox.exec(["cat", "name"])).stdout == "template\n"


async def test_a_disk_filler(engine: Dockerd, containers: Make, template: Path) -> None:
    provider = containers(disk_mb=64)
    sandbox = await provider.start(template)
    with pytest.raises(DiskFullError):
        await sandbox.exec(["sh", "-c", "i=0; while head -c 1000000 /dev/zero > f$i; do i=$((i+1)); done"], limits=LONG)
    with pytest.raises(DiskFullError):
        await sandbox.write("more", bytes(1 << 20))
    other = await provider.start(template)
    assert (await other.exec(["cat", "name"])).stdout == "template\n"


async def test_two_hundred_megabytes_of_output(containers: Make, template: Path) -> None:
    sandbox = await containers(memory_mb=256).start(template)
    command = "echo begin; yes 0123456 | head -c 200000000; echo end; yes 7654321 | head -c 200000000 >&2"
    result = await sandbox.exec(["sh", "-c", command], limits=LONG)
    assert result.exit_code == 0
    assert result.stdout.startswith("begin\n0123456\n")
    assert result.stdout.endswith("0123456\nend\n")
    assert f"[... {200_000_000 + 10 - LONG.output_chars} characters left out ...]" in result.stdout
    assert f"[... {200_000_000 - LONG.output_chars} characters left out ...]" in result.stderr
    result = await sandbox.exec(["sh", "-c", "head -c 50000000 /dev/urandom"], limits=LONG)
    assert "characters left out" in result.stdout


async def test_files_of_many_megabytes(containers: Make, template: Path) -> None:
    (template / "large").write_bytes(bytes(range(256)) * (1 << 18))
    provider = containers(disk_mb=256, memory_mb=1024)
    sandbox = await provider.start(template)
    assert await sandbox.read("large") == (template / "large").read_bytes()
    copy = await provider.start(await sandbox.snapshot())
    assert await copy.read("large") == (template / "large").read_bytes()


async def until(holds: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        await asyncio.sleep(0.1)
