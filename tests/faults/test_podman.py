"""The same promises on Podman's Docker-compatible service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from dockerd import IMAGE, make_containers
from podman import Podman, podman, why_no_podman
from turnstile.errors import ContainerDiedError, DiskFullError, OutOfMemoryError
from turnstile.sandboxes.base import Image, Limits
from turnstile.sandboxes.check import check_sandboxes
from turnstile.sandboxes.containers.daemon import Daemon
from turnstile.sandboxes.containers.images import Images
from turnstile.sandboxes.containers.provider import ContainerSandboxes

Make = Callable[..., ContainerSandboxes]
PATIENT = Limits(seconds=120.0, cpu_seconds=60.0)


@pytest.fixture(scope="module")
def service() -> Iterator[Podman]:
    reason = why_no_podman()
    if reason is not None:
        pytest.skip(reason)
    with podman() as running:
        yield running


@pytest.fixture
async def containers(service: Podman) -> AsyncIterator[Make]:
    made = []

    def make(**knobs: object) -> ContainerSandboxes:
        made.append(make_containers(service.address, **{"limits": PATIENT, **knobs}))
        return made[-1]

    yield make
    for provider in made:
        await provider.close()
    assert service.containers() == []


@pytest.mark.parametrize("read_only", [True, False])
async def test_containers_conform_and_leave_nothing(service: Podman, containers: Make, read_only: bool) -> None:
    before = service.images()
    assert await check_sandboxes(containers(read_only=read_only, warm=1)) == []
    assert (service.containers(), service.images(), service.volumes()) == ([], before, [])


async def test_many_at_once(service: Podman, containers: Make, template: Path) -> None:
    provider = containers(most=8, warm=2, memory_mb=256)

    async def episode(number: int) -> str:
        sandbox = await provider.start(template)
        await sandbox.write("number", f"{number}".encode())
        result = await sandbox.exec(["cat", "number"])
        await sandbox.close()
        return result.stdout

    assert len(set(await asyncio.gather(*(episode(number) for number in range(16))))) == 16


async def test_what_runs_out_has_its_own_error(containers: Make, template: Path) -> None:
    sandbox = await containers(memory_mb=96, disk_mb=8).start(template)
    with pytest.raises(OutOfMemoryError):
        await sandbox.exec(["python", "-c", "x = [bytearray(1024) for _ in range(10**6)]"])
    with pytest.raises(DiskFullError):
        await sandbox.exec(["dd", "if=/dev/zero", "of=fill", "bs=1M"])


async def test_a_container_that_is_gone_is_told_as_such(service: Podman, containers: Make, template: Path) -> None:
    sandbox = await containers().start(template)
    running = asyncio.ensure_future(sandbox.exec(["sleep", "60"]))
    await asyncio.sleep(0.5)
    with service.client() as client:
        client.remove_container(sandbox.container.identity, force=True)
    with pytest.raises(ContainerDiedError):
        await running


async def test_a_repository_is_put_into_an_image(
    service: Podman, containers: Make, template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNSTILE_CACHE", str(tmp_path))
    provider = containers()
    image = await asyncio.to_thread(provider.images.with_repository, IMAGE, template, deps=template)
    sandbox = await provider.start(image)
    assert (await sandbox.exec(["sh", "-c", "touch new && ls -a"])).stdout.split() == [".", "..", ".git", "name", "new"]
    snapshot = await sandbox.snapshot()
    assert isinstance(snapshot, Image)
    await provider.close()
    daemon = Daemon(service.address)
    images = Images(daemon)
    assert [each.name for each in images.kept()] == [image.name]
    assert images.remove(images.kept()) == []
    daemon.close()
