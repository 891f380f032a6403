from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dockerd import BARE, IMAGE, ULIMITS, Dockerd
from turnstile.config import make_recipe
from turnstile.errors import ConfigError, ContainerDiedError, DaemonError, DiskFullError, OutOfMemoryError, SandboxError
from turnstile.sandboxes.base import Image, Limits, Sandbox, Sandboxes
from turnstile.sandboxes.check import check_sandboxes
from turnstile.sandboxes.containers.provider import ContainerSandboxes
from turnstile.sandboxes.owner import PID, STARTED, start_time
from turnstile.swe.grading.grader import CodeGrader
from turnstile.swe.packages.source import deps_home
from turnstile.wiring.world import make_world

Make = Callable[..., ContainerSandboxes]


@pytest.mark.parametrize("read_only", [True, False])
async def test_containers_conform_and_leave_nothing(engine: Dockerd, containers: Make, read_only: bool) -> None:
    before = engine.containers(), engine.images()
    provider = containers(read_only=read_only, warm=1)
    assert isinstance(provider, Sandboxes)
    assert await check_sandboxes(provider) == []
    assert (engine.containers(), engine.images()) == before


async def test_a_container_is_shut_in(containers: Make, template: Path) -> None:
    sandbox = await containers().start(template)
    assert isinstance(sandbox, Sandbox)
    status = (await sandbox.exec(["cat", "/proc/self/status"])).stdout
    assert "CapEff:\t0000000000000000\n" in status
    assert "NoNewPrivs:\t1\n" in status
    assert "Uid:\t1000\t1000\t1000\t1000\n" in status
    assert (await sandbox.exec(["touch", "/usr/bin/mine"])).exit_code != 0
    assert (await sandbox.exec(["touch", "mine", "/tmp/mine"])).exit_code == 0
    assert (await sandbox.exec(["cat", "/proc/net/route"])).stdout.count("\n") <= 1  # the heading
    for way in ("/proc/1/fd", "/proc/1/mem", "/proc/1/environ"):
        assert (await sandbox.exec(["ls", way] if way.endswith("fd") else ["cat", way])).exit_code != 0
    # The runner outlives all that a command does to it.
    await sandbox.exec(["sh", "-c", "kill -9 1; kill -STOP 1; kill -TERM 1; kill -INT 1; kill -9 -1"])
    assert (await sandbox.exec(["./run.sh"])).stdout == "ran\n"


async def test_what_commands_do_to_be_awkward(containers: Make, template: Path) -> None:
    sandbox = await containers().start(template)
    deaf = "trap '' TERM INT HUP; while :; do sleep 0.1; done"
    result = await sandbox.exec(["sh", "-c", deaf], limits=Limits(seconds=0.5))
    assert (result.exit_code, result.timed_out) == (124, True)
    result = await sandbox.exec(["sh", "-c", "setsid sleep 600 & echo done"], limits=Limits(seconds=300))
    assert (result.stdout, result.timed_out) == ("done\n", False)
    result = await sandbox.exec(["sh", "-c", "exec >&- 2>&-; sleep 0.2; exit 5"])
    assert (result.exit_code, result.stdout) == (5, "")
    result = await sandbox.exec(["printf", r"\377\376\000x"])
    assert result.stdout == "\ufffd\ufffd\0x"
    result = await sandbox.exec(["sh", "-c", "yes | head -n 2"])
    assert (result.stdout, result.stderr) == ("y\ny\n", "")
    for argv in (["\ud800"], ["a\0b"]):
        assert (await sandbox.exec(argv)).exit_code == 127
    with pytest.raises(ValueError, match="empty"):
        await sandbox.exec([])


async def test_names_that_are_no_text(containers: Make, template: Path) -> None:
    provider = containers()
    sandbox = await provider.start(template)
    name = "caf\udce9"
    await sandbox.write(f"{name}/{name}", b"seen")
    assert (await sandbox.exec(["cat", f"{name}/{name}"])).stdout == "seen"
    copy = await provider.start(await sandbox.snapshot())
    assert await copy.read(f"{name}/{name}") == b"seen"


async def test_memory_that_runs_out_is_no_verdict(containers: Make, template: Path) -> None:
    provider = containers(memory_mb=96)
    sandbox = await provider.start(template)
    hog = ["python", "-c", "x = [bytearray(1024) for _ in range(10**6)]"]
    with pytest.raises(OutOfMemoryError, match=r"raise sandbox\.resources\.memory_mb"):
        await sandbox.exec(hog, limits=Limits(seconds=60))
    assert (await sandbox.exec(["./run.sh"])).stdout == "ran\n"
    result = await sandbox.exec(hog, limits=Limits(memory_mb=48, seconds=60))
    assert "MemoryError" in result.stderr


async def test_a_full_disk_is_no_verdict(containers: Make, template: Path) -> None:
    provider = containers(disk_mb=8)
    sandbox = await provider.start(template)
    with pytest.raises(DiskFullError, match=r"raise sandbox\.resources\.disk_mb"):
        await sandbox.write("large", bytes(9 << 20))
    assert (await sandbox.exec(["./run.sh"])).stdout == "ran\n"
    with pytest.raises(DiskFullError, match=r"raise sandbox\.resources\.disk_mb"):
        await sandbox.exec(["dd", "if=/dev/zero", "of=fill", "bs=1M"])
    (template / "large").write_bytes(bytes(9 << 20))
    with pytest.raises(DiskFullError):
        await provider.start(template)


async def test_processes_are_limited(containers: Make, template: Path) -> None:
    sandbox = await containers().start(template)
    many = "for i in 1 2 3 4 5 6 7 8 9 10; do sleep 30 & done; sleep 30"
    result = await sandbox.exec(["sh", "-c", many], limits=Limits(processes=5, seconds=25))
    assert result.exit_code == 143
    assert "too many processes" in result.stderr


async def test_a_container_that_is_gone_is_told_as_such(engine: Dockerd, containers: Make, template: Path) -> None:
    sandbox = await containers().start(template)
    running = asyncio.ensure_future(sandbox.exec(["sleep", "60"], limits=Limits(seconds=60)))
    await asyncio.sleep(0.1)
    with engine.client() as client:
        client.remove_container(sandbox.container.identity, force=True)
    for attempt in (running, sandbox.exec(["true"]), sandbox.read("run.sh"), sandbox.snapshot()):
        with pytest.raises(ContainerDiedError, match=sandbox.container.identity[:12]):
            await attempt
    await sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        await sandbox.exec(["true"])


async def test_a_spare_that_died_is_not_handed_out(engine: Dockerd, containers: Make, template: Path) -> None:
    provider = containers(warm=1)
    first = await provider.start(template)
    async with asyncio.timeout(60):
        while not provider.spares:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    with engine.client() as client:
        for identity in set(engine.containers()) - {first.container.identity}:
            client.remove_container(identity, force=True)
    assert (await (await provider.start(template)).exec(["./run.sh"])).stdout == "ran\n"


async def test_a_root_that_is_gone_breaks_the_sandbox(containers: Make, template: Path) -> None:
    sandbox = await containers().start(template)
    await sandbox.exec(["sh", "-c", "cd /; rm -r /sandbox/work; ln -s /etc /sandbox/work"])
    for attempt in (sandbox.exec(["true"]), sandbox.read("passwd"), sandbox.write("x", b""), sandbox.snapshot()):
        with pytest.raises(SandboxError, match="gone"):
            await attempt


async def test_an_image_is_worked_in_as_it_is(engine: Dockerd, containers: Make) -> None:
    provider = containers(user="0:0")
    with pytest.raises(DaemonError, match="docker pull"):
        await provider.start(Image(name="localhost:1/there-is-none", root="/"))
    sandbox = await provider.start(Image(name=IMAGE, root="/etc"))
    await sandbox.write("motto", b"one")
    snapshot = await sandbox.snapshot()
    assert isinstance(snapshot, Image)
    await sandbox.write("motto", b"two")
    copy = await provider.start(snapshot)
    assert (await copy.exec(["cat", "motto"])).stdout == "one"
    with pytest.raises(ConfigError, match="root folder"):
        await provider.start(Image(name=IMAGE, root="/nowhere"))
    await provider.close()
    assert snapshot.name not in engine.images()


async def test_what_is_carried_is_put_into_a_copy_of_a_snapshot_anew(containers: Make, template: Path) -> None:
    provider = containers(read_only=False, carry=["json"])
    sandbox = await provider.start(template)
    await sandbox.exec(["sh", "-c", "echo stale > /sandbox/carried/json/__init__.py; mkdir /sandbox/carried/more"])
    copy = await provider.start(await sandbox.snapshot())
    assert (await copy.exec(["python3", "-m", "json.tool", "--help"])).exit_code == 0
    assert (await copy.exec(["ls", "/sandbox/carried"])).stdout == "json\n"


async def test_a_snapshot_starts_whatever_was_left_among_what_is_carried(containers: Make, template: Path) -> None:
    provider = containers(read_only=False, carry=["json"])
    sandbox = await provider.start(template)
    script = "cd /sandbox/carried; mkdir -p x/y z; touch x/y/file; ln -s /tmp z/link; chmod 0 x/y x z json ."
    assert (await sandbox.exec(["sh", "-c", script])).exit_code == 0
    copy = await provider.start(await sandbox.snapshot())
    assert (await copy.exec(["python3", "-m", "json.tool", "--help"])).exit_code == 0
    assert (await copy.exec(["ls", "/sandbox/carried"])).stdout == "json\n"


async def test_a_snapshot_that_cannot_start_is_no_fault_of_the_recipe(containers: Make, template: Path) -> None:
    provider = containers(read_only=False, carry=["json"])
    sandbox = await provider.start(template)
    script = "chmod 700 /sandbox; mv /sandbox/carried /tmp/gone; echo no folder > /sandbox/carried"
    done = await sandbox.exec(["sh", "-c", script])
    assert done.exit_code == 0, done.stderr
    provider._pool._tries = 1
    with pytest.raises(SandboxError, match=r"the snapshot .* cannot be started: .*exists"):
        await provider.start(await sandbox.snapshot())


async def test_volumes_go_with_their_container(engine: Dockerd, containers: Make, template: Path) -> None:
    with engine.client() as client:
        made = client.create_container(image=IMAGE, command=["true"])["Id"]
        client.commit(made, repository="turnstile-test-volume", changes="VOLUME /data")
        client.remove_container(made)
        await (await containers(image="turnstile-test-volume").start(template)).close()
        provider = containers(image="turnstile-test-volume")
        await provider.start(template)
        assert client.volumes()["Volumes"]
        await provider.close()
        assert not client.volumes()["Volumes"]


async def test_what_can_never_start_says_why(engine: Dockerd, containers: Make, template: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such Python.*sandbox\.python"):
        await containers(image=BARE).start(template)
    with pytest.raises(DaemonError, match="docker pull"):
        containers(image="localhost:1/there-is-none")
    with pytest.raises(ConfigError, match=r"sandbox\.resources\.ulimits = "):
        await containers(ulimits={"nofile": 1 << 30}).start(template)
    with pytest.raises(ConfigError, match=r"sandbox\.isolation\.user"):
        await containers(user="nobody-there").start(template)
    with pytest.raises(ConfigError, match="there_is_no_such_module"):
        containers(carry=["there_is_no_such_module"])
    with pytest.raises(ConfigError, match="DOCKER_HOST"):
        containers(daemon=f"unix://{engine.folder}/none.sock")
    assert engine.containers() == []


async def test_a_sweep_removes_what_nobody_owns(engine: Dockerd, containers: Make, template: Path) -> None:
    provider = containers()
    mine = await provider.start(template)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)  # noqa: ASYNC220
    labels = {**provider.spec.labels, PID: str(child.pid), STARTED: start_time(child.pid) or ""}
    identity, attached = provider.daemon.launch(replace(provider.spec, labels=labels))
    image = provider.daemon.commit(identity)
    assert len(provider.daemon.sweep()) == 0
    child.communicate()
    found = provider.daemon.sweep()
    assert (found.containers, found.images) == ((identity,), (image,))
    assert engine.containers() == [mine.container.identity]
    attached.close()


async def test_a_start_that_is_cancelled_leaves_nothing(engine: Dockerd, containers: Make, template: Path) -> None:
    provider = containers()
    starting = asyncio.ensure_future(provider.start(template))
    await asyncio.sleep(0.1)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    assert engine.containers() == []


async def test_closing_ends_the_starts_that_are_under_way(engine: Dockerd, containers: Make, template: Path) -> None:
    provider = containers()
    starting = asyncio.ensure_future(provider.start(template))
    await asyncio.sleep(0.1)
    await provider.close()
    with pytest.raises(SandboxError, match="closed"):
        await starting
    assert engine.containers() == []


async def test_only_images_that_are_named_are_pulled(containers: Make) -> None:
    provider = containers(pull=["localhost:1/named"])
    assert (await (await provider.start(Image(name=IMAGE, root="/"))).exec(["true"])).exit_code == 0  # it is there
    with pytest.raises(ConfigError, match=r"may not pull it \(sandbox\.pull\); .* --image localhost:1/other, or"):
        await provider.start(Image(name="localhost:1/other", root="/"))
    with pytest.raises(DaemonError, match="its registry cannot be reached"):
        await provider.start(Image(name="localhost:1/named", root="/"))


async def test_tests_are_run_in_containers_where_a_recipe_says_so(
    engine: Dockerd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNSTILE_CACHE", str(tmp_path / "cache"))
    answer = tmp_path / "cache" / "swe" / "ten-1.0" / "tree" / "ten.py"
    answer.parent.mkdir(parents=True)
    answer.write_text("TEN = 10\n")
    carry = ["turnstile", "pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments"]
    knobs = {"image": IMAGE, "daemon": engine.address, "carry": carry, "pool": {"warm": 0}}
    knobs["resources"] = {"ulimits": ULIMITS}
    world = make_world(make_recipe({"env": {"kind": "swe"}, "sandbox": {"kind": "container", **knobs}}))
    package = tmp_path / "package"
    package.mkdir()
    (package / "ten.py").write_text("TEN = 11\n")
    (package / "test_ten.py").write_text("from ten import TEN\n\n\ndef test_ten():\n    assert TEN == 10\n")
    test = "test_ten.py::test_ten"
    try:
        grader = next(part for part in world.shared if isinstance(part, CodeGrader))
        assert not (await grader.grade(package, {}, fail_to_pass=[test])).resolved
        assert (await grader.grade(package, {"ten.py": b"TEN = 10\n"}, fail_to_pass=[test])).resolved
        mine, others = deps_home() / "ten-1.0", deps_home() / "user-of-ten-1.0"
        for folder, file in ((mine, "helper.py"), (others, "ten.py")):
            folder.mkdir()
            (folder / file).write_text("TEN = 10\n")
        sandbox = await grader.bench.sandboxes.start(package, deps=mine)
        assert (await sandbox.exec(["ls", str(deps_home()), str(mine)])).stdout.split()[1::2] == [
            "ten-1.0",
            "helper.py",
        ]
        assert (await sandbox.exec(["touch", str(mine / "mine")])).exit_code != 0
        plain = await grader.bench.sandboxes.start(package)
        assert (await plain.exec(["ls", str(deps_home())])).exit_code != 0
        for unseen in (deps_home() / ".." / "swe", tmp_path, deps_home()):  # no folder beside the one that is offered
            refused = await grader.bench.sandboxes.start(package, deps=unseen)
            assert (await refused.exec(["ls", str(unseen)])).exit_code != 0
        assert (await sandbox.exec(["cat", str(answer)])).exit_code != 0
        assert (await sandbox.exec(["ls", str(tmp_path / "cache")])).stdout == "swe-deps\n"
    finally:
        await world.close()
    assert engine.containers() == []
