"""Sandboxes over a real socket, most of them of a server in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dockerd import IMAGE, ULIMITS, Dockerd
from served import TOKEN, Served, proxy, served
from turnstile.errors import ConfigError, SandboxError
from turnstile.sandboxes.base import Image, Limits, Sandbox, Sandboxes
from turnstile.sandboxes.check import check_sandboxes, processes_with
from turnstile.sandboxes.http import connection
from turnstile.sandboxes.http.remote import RemoteSandboxes

LONG = Limits(seconds=300)
NAME = "caf\udce9"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One that stays as it is."""
    with served(tmp_path_factory.mktemp("served"), "local", "workers=4") as running:
        yield running


@pytest.fixture
async def remote(server: Served) -> AsyncIterator[RemoteSandboxes]:
    provider = server.client()
    yield provider
    await provider.close()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Served]:
    """One to be broken, which soon misses a client."""
    with served(tmp_path / "own", "local", f"root={tmp_path / 'home'}", "--lease", "2") as running:
        yield running


async def running(sandbox: Sandbox, mark: str) -> asyncio.Task[object]:
    """A command that goes on for long, once its process is there."""
    task = asyncio.ensure_future(sandbox.exec(["sleep", mark], limits=LONG))
    await until(lambda: bool(processes_with(mark)))
    return task


async def until(holds: object, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not come about"
        await asyncio.sleep(0.05)


async def test_remote_local_sandboxes_conform(remote: RemoteSandboxes) -> None:
    assert isinstance(remote, Sandboxes)
    assert await check_sandboxes(remote) == []


async def test_remote_containers_conform_and_leave_nothing(engine: Dockerd, tmp_path: Path) -> None:
    before = engine.containers(), engine.images()
    ulimits = ", ".join(f"{name} = {most}" for name, most in ULIMITS.items())
    knobs = (f"image={IMAGE}", f"daemon={engine.address}", f"ulimits={{ {ulimits} }}", "warm=0", "read_only=false")
    with served(tmp_path / "served", "container", *knobs) as server:
        provider = server.client()
        sandbox = await provider.start(Image(name=IMAGE, root="/usr"))
        assert (await sandbox.exec(["ls", "-d", "bin"])).stdout == "bin\n"
        assert await check_sandboxes(provider) == []
        await server.client().close()
    assert (engine.containers(), engine.images()) == before


async def test_a_template_is_sent_once_and_again_when_it_has_changed(server: Served, template: Path) -> None:
    (template / "large").write_bytes(os.urandom(1 << 18))
    async with proxy(server.port) as between:
        provider = RemoteSandboxes(url=between.url, token=TOKEN)
        first = await provider.start(template)
        assert between.sent > 1 << 18
        between.sent = 0
        again = await provider.start(template)
        assert 0 < between.sent < 1 << 14
        (template / "large").write_bytes(os.urandom(1 << 18))
        changed = await provider.start(template)
        assert await first.read("large") == await again.read("large") != await changed.read("large")
        assert (await again.exec(["./run.sh"])).stdout == "ran\n"
        await provider.close()


async def test_names_and_contents_that_are_no_text(remote: RemoteSandboxes, template: Path) -> None:
    data = bytes(range(256)) * 1000
    (template / NAME).mkdir()
    (template / NAME / NAME).write_bytes(data)
    (template / "link").symlink_to(f"{NAME}/{NAME}")
    sandbox = await remote.start(template)
    assert await sandbox.read(f"{NAME}/{NAME}") == await sandbox.read("link") == data
    await sandbox.write(f"new/{NAME}", data)
    assert (await sandbox.exec(["sh", "-c", 'wc -c < "$1"', "sh", f"new/{NAME}"])).stdout.strip() == str(len(data))
    copy = await remote.start(await sandbox.snapshot())
    assert await copy.read(f"new/{NAME}") == data
    with pytest.raises(FileNotFoundError) as told:
        await sandbox.read(f"none/{NAME}")
    assert told.value.filename.endswith(f"none/{NAME}")
    with pytest.raises(IsADirectoryError):
        await sandbox.read(NAME)


async def test_large_files_and_what_is_too_large(tmp_path: Path, template: Path) -> None:
    with served(tmp_path / "served", "local", "--most-mb", "24") as server:
        provider = server.client()
        sandbox = await provider.start(template)
        data = os.urandom(1 << 20) * 20
        await sandbox.write("large", data)
        assert await sandbox.read("large") == data
        with pytest.raises(OSError, match="most-mb"):
            await sandbox.write("larger", data * 2)
        await sandbox.exec(["sh", "-c", "cat large large > larger"])
        with pytest.raises(OSError, match="24 MiB"):
            await sandbox.read("larger")
        loud = await sandbox.exec(["sh", "-c", "head -c 30000000 /dev/zero | tr '\\0' x"], limits=LONG)
        assert f"[... {30_000_000 - LONG.output_chars} characters left out ...]" in loud.stdout
        await provider.close()


async def test_many_at_once(remote: RemoteSandboxes, template: Path) -> None:
    async def episode(number: int) -> str:
        sandbox = await remote.start(template)
        await sandbox.write("number", str(number).encode())
        result = await sandbox.exec(["cat", "number"], limits=LONG)
        await sandbox.close()
        return result.stdout

    assert await asyncio.gather(*map(episode, range(32))) == [str(number) for number in range(32)]


async def test_a_cancelled_command_ends_there(remote: RemoteSandboxes, template: Path) -> None:
    sandbox = await remote.start(template)
    task = await running(sandbox, "7654401")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: processes_with("7654401") == [])
    assert (await sandbox.exec(["./run.sh"])).stdout == "ran\n"


async def test_a_command_is_run_once_though_the_way_breaks(server: Served, template: Path) -> None:
    async with proxy(server.port) as between:
        provider = RemoteSandboxes(url=between.url, token=TOKEN)
        sandbox = await provider.start(template)
        between.cut = 2
        result = await sandbox.exec(["sh", "-c", "echo once >> log; sleep 0.3; cat log"])
        assert (result.stdout, between.cut) == ("once\n", 0)
        assert await sandbox.read("log") == b"once\n"
        await provider.close()


async def test_a_wrong_token_gets_nothing(server: Served, template: Path) -> None:
    provider = RemoteSandboxes(url=server.url, token="another")
    with pytest.raises(ConfigError, match="token"):
        await provider.start(template)
    await provider.close()
    for path in ("", "open", "do", "templates/x", "nowhere"):
        for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": f"Bearer {TOKEN}x"}):
            request = urllib.request.Request(f"{server.url}/{path}", data=b"", headers=headers)
            with pytest.raises(urllib.error.HTTPError) as told:
                await asyncio.to_thread(urllib.request.urlopen, request)
            with told.value as refused:
                assert (refused.code, refused.read()) == (401, b"")


async def test_a_server_that_dies_is_told_as_such(own: Served, template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PAUSES", (0.05, 0.05, 0.05))
    provider = own.client()
    sandbox = await provider.start(template)
    task = await running(sandbox, "7654402")
    own.end(signal.SIGKILL)
    for attempt in (task, sandbox.exec(["true"]), sandbox.read("run.sh"), provider.start(template)):
        with pytest.raises(SandboxError, match="does not answer"):
            await attempt
    await sandbox.close()
    await provider.close()
    await until(lambda: processes_with("7654402") == [])


async def test_a_server_that_was_started_again_is_worked_with(own: Served, template: Path) -> None:
    provider = own.client()
    sandbox = await provider.start(template)
    snapshot = await sandbox.snapshot()
    own.end(signal.SIGKILL)
    own.start()
    with pytest.raises(SandboxError, match="does not know this client any more"):
        await sandbox.exec(["true"])
    with pytest.raises(SandboxError, match="does not know this client any more"):
        await sandbox.read("run.sh")
    again = await provider.start(template)
    assert (await again.exec(["./run.sh"])).stdout == "ran\n"
    with pytest.raises(SandboxError, match="the snapshot ended with"):
        await provider.start(snapshot)
    await provider.close()


async def test_a_server_that_hangs_is_given_up(own: Served, template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "POLL", 0.5)
    monkeypatch.setattr(connection, "PAUSES", (0.1,))
    provider = own.client(patience=2.0)
    sandbox = await provider.start(template)
    assert own.process is not None
    own.process.send_signal(signal.SIGSTOP)
    with pytest.raises(SandboxError, match="in time"):
        await sandbox.read("run.sh")
    own.process.send_signal(signal.SIGCONT)
    await provider.close()


async def test_a_server_that_stops_closes_everything(own: Served, tmp_path: Path, template: Path) -> None:
    provider = own.client()
    task = await running(await provider.start(template), "7654403")
    assert own.end() == 0
    assert processes_with("7654403") == []
    assert list((tmp_path / "home").iterdir()) == []
    with pytest.raises(SandboxError):
        await task
    await provider.close()


CLIENT = """
import asyncio, sys
from pathlib import Path
from turnstile.sandboxes.base import Limits
from turnstile.sandboxes.http.remote import RemoteSandboxes

async def main():
    provider = RemoteSandboxes(url=sys.argv[1], token=sys.argv[2], run="killed")
    sandboxes = [await provider.start(Path(sys.argv[3])) for _ in range(2)]
    await sandboxes[0].snapshot()
    await asyncio.gather(*(sandbox.exec(["sleep", sys.argv[4]], limits=Limits(seconds=600)) for sandbox in sandboxes))

asyncio.run(main())
"""


async def test_what_a_killed_client_left_is_closed(own: Served, tmp_path: Path, template: Path) -> None:
    mark = "7654404"
    client = subprocess.Popen(  # noqa: ASYNC220 - over at once
        [sys.executable, "-c", CLIENT, own.url, TOKEN, str(template), mark]
    )
    try:
        await until(lambda: len(processes_with(mark)) == 3)  # the commands, and the client itself
    finally:
        client.kill()
        client.wait()
    (home,) = (tmp_path / "home").iterdir()
    assert len(list(home.glob("s*-*"))) == 3
    await until(lambda: "client killed: closed, as it was not heard of for 2 s" in own.log)  # said once all is gone
    assert processes_with(mark) == []
    assert not home.exists()


@pytest.mark.slow
async def test_a_client_that_is_busy_stays(own: Served, template: Path) -> None:
    provider = own.client()
    sandbox = await provider.start(template)
    time.sleep(5)  # noqa: ASYNC251 - what a step of training does to the loop
    assert (await sandbox.exec(["./run.sh"])).stdout == "ran\n"
    await provider.close()


def test_event_loops_may_come_and_go(server: Served, template: Path) -> None:
    provider = server.client()
    sandbox = asyncio.run(provider.start(template))
    assert asyncio.run(sandbox.exec(["./run.sh"])).stdout == "ran\n"
    asyncio.run(provider.close())
    asyncio.run(sandbox.close())


def test_a_provider_that_is_forgotten_says_farewell(server: Served, template: Path) -> None:
    provider = server.client(run="forgotten")
    asyncio.run(provider.start(template))
    del provider
    deadline = time.monotonic() + 60
    while "client forgotten: closed, as it said so" not in server.log:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>",
        b"HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n\0\0\0\2\0\0\0\0\0\0\0\0[]",
        b"HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n\0\0\0\2\0\0\0\0\0\0\0\0{}",
        b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\nno",
        b"HTTP/1.1 307 There\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\nand no more",
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"",
    ],
)
async def test_what_is_no_sandbox_server_is_told_as_such(
    said: bytes, template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        writer.close()

    monkeypatch.setattr(connection, "PAUSES", (0.01, 0.01, 0.01))
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        provider = RemoteSandboxes(url=f"http://127.0.0.1:{port}", token=TOKEN)
        with pytest.raises(SandboxError, match="sandbox server"):
            await provider.start(template)
        await provider.close()


async def test_another_version_is_refused(server: Served, template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnstile.sandboxes.http.lease.__version__", "0.0.1")
    provider = server.client()
    with pytest.raises(ConfigError, match=r"this client 0\.0\.1 .* install the same version"):
        await provider.start(template)
    await provider.close()


async def test_as_many_clients_as_there_are_places(tmp_path: Path, template: Path) -> None:
    with served(tmp_path / "served", "local", "--clients", "1") as server:
        first, second = server.client(), server.client()
        await first.start(template)
        with pytest.raises(SandboxError, match="--clients"):
            await second.start(template)
        await first.close()
        await second.start(template)
        await second.close()


def test_what_a_client_must_be_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TURNSTILE_SANDBOX_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="URL of a server"):
        RemoteSandboxes(url="somewhere:8850")
    with pytest.raises(ConfigError, match="TURNSTILE_SANDBOX_TOKEN"):
        RemoteSandboxes(url="http://somewhere:8850")
    with pytest.raises(ConfigError, match="cannot be read"):
        RemoteSandboxes(url="http://somewhere:8850", token_file=str(tmp_path / "none"))
