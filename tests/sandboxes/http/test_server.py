"""What a sandbox server makes of what goes wrong in the tier that it serves, over a real socket."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from served import TOKEN
from turnstile.errors import (
    ConfigError,
    ContainerDiedError,
    DaemonError,
    DiskFullError,
    OutOfMemoryError,
    SandboxError,
)
from turnstile.sandboxes.base import ExecResult, Image, Limits, Template
from turnstile.sandboxes.http import server
from turnstile.sandboxes.http.remote import RemoteSandboxes
from turnstile.sandboxes.http.server import SandboxServer, is_loopback

DONE = ExecResult(exit_code=0, stdout="", stderr="", seconds=0.0)


class Odd:
    """A tier whose commands do what their words say, and which knows what became of it."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.seen: list[object] = []
        self.open = 0

    async def start(self, template: Template, *, deps: Path | None = None) -> OddSandbox:
        self.seen.append(template if isinstance(template, Image) else sorted(path.name for path in template.iterdir()))
        if self.failure is not None:
            self.begun.set()
            await self.go_on.wait()
            raise self.failure
        self.open += 1
        return OddSandbox(self)

    async def close(self) -> None:
        self.seen.append("closed")


class OddSandbox:
    def __init__(self, tier: Odd) -> None:
        self.tier = tier

    async def exec(
        self, argv: Sequence[str], *, limits: Limits | None = None, env: Mapping[str, str] | None = None
    ) -> ExecResult:
        self.tier.seen.append((list(argv), limits, env))
        if self.tier.failure is not None:
            raise self.tier.failure
        if argv == ["wait"]:
            self.tier.begun.set()
            await self.tier.go_on.wait()
        return DONE

    async def read(self, path: str) -> bytes:
        return b""

    async def write(self, path: str, data: bytes) -> None:
        self.tier.seen.append((path, data))

    async def snapshot(self) -> Template:
        return Image(name="a snapshot", root="/")

    async def close(self) -> None:
        self.tier.open -= 1


@pytest.fixture
async def tier() -> Odd:
    return Odd()


@pytest.fixture
async def remote(tier: Odd) -> AsyncIterator[RemoteSandboxes]:
    serving = SandboxServer(lambda run: tier, token=TOKEN, templates_mb=1)
    async with serving.listening("127.0.0.1", 0) as url:
        provider = RemoteSandboxes(url=url, token=TOKEN)
        yield provider
        await provider.close()
    assert tier.seen[-1] == "closed"


@pytest.mark.parametrize(
    "failure",
    [
        SandboxError("it is broken"),
        ContainerDiedError("it ended"),
        DaemonError("no answer"),
        DiskFullError("full"),
        OutOfMemoryError("no memory; raise sandbox.resources.memory_mb"),
        ConfigError("no such image"),
        ValueError("it leaves the sandbox"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "there/caf\udce9"),
        IsADirectoryError(errno.EISDIR, "Is a directory", "x"),
        NotADirectoryError(errno.ENOTDIR, "Not a directory", "x"),
        PermissionError(errno.EACCES, "Permission denied", "x"),
        OSError("some other"),
    ],
)
async def test_errors_keep_their_types(tier: Odd, remote: RemoteSandboxes, template: Path, failure: Exception) -> None:
    sandbox = await remote.start(template)
    tier.failure = failure
    with pytest.raises(type(failure)) as told:
        await sandbox.exec(["true"])
    assert type(told.value) is type(failure)
    assert str(told.value) == str(failure)


async def test_a_request_is_known_for_as_long_as_it_takes(
    tier: Odd, remote: RemoteSandboxes, template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And some time longer; the client asks for it again and again meanwhile."""
    for module in ("tenant", "server"):
        monkeypatch.setattr(f"turnstile.sandboxes.http.{module}.POLL", 0.05)
    monkeypatch.setattr("turnstile.sandboxes.http.tenant.KEPT", 0.2)
    sandbox = await remote.start(template)
    command = asyncio.create_task(sandbox.exec(["wait"]))
    await tier.begun.wait()
    await asyncio.sleep(0.6)
    tier.go_on.set()
    assert await command == DONE


async def test_what_a_cancelled_caller_does_not_get_is_undone(remote: RemoteSandboxes, template: Path) -> None:
    """The answer may have come while the caller's loop was busy: the sandbox is there, and has no owner."""
    await remote.start(template)  # so that the connection is open
    ended, undone = threading.Event(), []

    async def job() -> str:
        asyncio.get_running_loop().call_later(0.05, ended.set)
        return "a sandbox"

    async def undo(result: str) -> None:
        undone.append(result)

    running = asyncio.create_task(remote._connection.run(job(), undo))
    await asyncio.sleep(0)
    assert ended.wait(60)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert undone == ["a sandbox"]


async def test_a_sandbox_can_be_left(tier: Odd, remote: RemoteSandboxes, template: Path) -> None:
    sandbox = await remote.start(template)
    await remote._connection.run(sandbox.leave())
    assert tier.open == 0


async def test_a_snapshot_starts_where_the_client_says(tier: Odd, remote: RemoteSandboxes, template: Path) -> None:
    snapshot = await (await remote.start(template)).snapshot()
    await remote.start(snapshot)
    await remote.start(replace(snapshot, root="/testbed"))
    assert tier.seen[-2:] == [Image(name="a snapshot", root="/"), Image(name="a snapshot", root="/testbed")]


async def test_templates_that_come_together_make_room_once(remote: RemoteSandboxes, tmp_path: Path) -> None:
    folders = []
    for number in range(8):
        folder = tmp_path / f"template-{number}"
        folder.mkdir()
        (folder / "data").write_bytes(bytes([number]) * 400_000)
        folders.append(folder)
    assert len(await asyncio.gather(*map(remote.start, folders))) == 8


async def test_a_fault_of_the_tier_is_no_verdict(tier: Odd, remote: RemoteSandboxes, template: Path) -> None:
    sandbox = await remote.start(template)
    tier.failure = KeyError("oh")
    with pytest.raises(SandboxError, match="the sandbox server failed: KeyError: 'oh'"):
        await sandbox.exec(["true"])


async def test_what_is_asked_for_arrives_as_it_was_said(tier: Odd, remote: RemoteSandboxes) -> None:
    sandbox = await remote.start(Image(name="an image", root="/somewhere"))
    limits = Limits(seconds=1.5, output_chars=7)
    assert await sandbox.exec(["a", "b\udce9\0"], limits=limits, env={"X": "\udce9"}) == DONE
    await sandbox.exec(["c"])
    await sandbox.write("caf\udce9", b"\0\xff")
    snapshot = await sandbox.snapshot()
    await remote.start(snapshot)
    assert tier.seen[1:] == [
        Image(name="an image", root="/somewhere"),
        (["a", "b\udce9\0"], limits, {"X": "\udce9"}),
        (["c"], None, {}),
        ("caf\udce9", b"\0\xff"),
        Image(name="a snapshot", root="/"),
    ]


async def test_what_takes_longer_than_an_answer_may_is_waited_for(
    tier: Odd, remote: RemoteSandboxes, template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "POLL", 0.01)
    sandbox = await remote.start(template)
    task = asyncio.ensure_future(sandbox.exec(["wait"]))
    await tier.begun.wait()
    await asyncio.sleep(0.1)
    assert not task.done()
    tier.go_on.set()
    assert await task == DONE


async def test_a_cancelled_start_leaves_no_sandbox(tier: Odd, remote: RemoteSandboxes, template: Path) -> None:
    await remote.start(template)
    tier.failure = SandboxError("not reached")
    starting = asyncio.ensure_future(remote.start(template))
    await tier.begun.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert tier.open == 1


async def test_templates_make_room_for_others(tier: Odd, remote: RemoteSandboxes, tmp_path: Path) -> None:
    for name in ("one", "two", "three", "one"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / name).write_bytes(name.encode() * 200_000)
        await remote.start(tmp_path / name)
    assert tier.seen[1:] == [["one"], ["two"], ["three"], ["one"]]
    (tmp_path / "one" / "more").write_bytes(bytes(1 << 20))
    with pytest.raises(ConfigError, match="--templates-mb"):
        await remote.start(tmp_path / "one")


async def test_what_lies_unpacked_counts(tier: Odd, remote: RemoteSandboxes, tmp_path: Path) -> None:
    """Small files take far less in an archive than on a disk."""
    for folder, count in (("few", 100), ("many", 300)):
        (tmp_path / folder).mkdir()
        for number in range(count):
            (tmp_path / folder / f"{number}").write_bytes(b"")
    await remote.start(tmp_path / "few")
    with pytest.raises(ConfigError, match=r"a template of more than 1 MiB; .*--templates-mb"):
        await remote.start(tmp_path / "many")
    assert len(tier.seen) == 2


async def test_many_starts_of_one_template(tier: Odd, remote: RemoteSandboxes, template: Path) -> None:
    await asyncio.gather(*(remote.start(template) for _ in range(8)))
    assert tier.seen[1:] == [["pkg", "run.sh"]] * 8


async def test_what_does_not_know_its_manners(tier: Odd, remote: RemoteSandboxes, template: Path) -> None:
    sandbox = await remote.start(template)
    with pytest.raises(SandboxError, match="status 400"):
        await sandbox._ask("fly", {})
    for verb, told in {
        "exec": {"argv": [1], "env": {}},
        "write": {"path": 3},
        "start": {"template": {"tree": "../../etc"}},
    }.items():
        if verb == "start":
            answer, _ = await sandbox._ask(verb, told)
            assert answer == {"unknown": True}
        else:
            with pytest.raises(ValueError):
                await sandbox._ask(verb, told)
    with pytest.raises(ValueError, match="output_chars"):
        await sandbox.exec(["x"], limits=Limits(output_chars=1 << 40))


async def test_no_token_no_service() -> None:
    with pytest.raises(ConfigError, match="needs a token"):
        SandboxServer(lambda run: Odd(), token="")


def test_where_only_this_machine_can_reach() -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    with pytest.raises(ConfigError, match="not known"):
        is_loopback("there.is.no.such.host.invalid")
