"""A conformance check for sandbox providers."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from turnstile.errors import SandboxError
from turnstile.sandboxes.base import Limits, Sandbox, Sandboxes

STARTED = 30.0  # seconds to wait until a command's process appears in /proc, if there is one
ENDED = 30.0  # seconds within which an ended command's processes must be gone


class _Check:
    """A provider under test. `found` collects the violations."""

    def __init__(self, provider: Sandboxes, template: Path) -> None:
        self.provider = provider
        self.template = template
        self.found: list[str] = []

    def expect(self, holds: bool, violation: str) -> None:
        if not holds:
            self.found.append(violation)

    async def commands(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec(["sh", "-c", "echo out; echo err >&2; exit 3"])
        self.expect(result.exit_code == 3, f"exec: exit code 3 came back as {result.exit_code}")
        self.expect(result.stdout == "out\n", f"exec: stdout is {result.stdout!r} instead of 'out\\n'")
        self.expect(result.stderr == "err\n", f"exec: stderr is {result.stderr!r} instead of 'err\\n'")
        result = await sandbox.exec(["python", "-m", "json.tool", "--help"])
        self.expect(result.exit_code == 0 and "json.tool" in result.stdout, "exec: python -m json.tool does not run")
        result = await sandbox.exec(["there-is-no-such-program"])
        self.expect(result.exit_code == 127, f"exec: a missing program gives {result.exit_code} instead of 127")
        result = await sandbox.exec(["sh", "-c", "kill -9 $$"])
        self.expect(result.exit_code == 137, f"exec: a command killed by signal 9 gives {result.exit_code}, not 137")
        result = await sandbox.exec(["sh", "-c", "cat; echo $MARK $PAGER"], env={"MARK": "given"})
        self.expect(result.stdout == "given cat\n", f"exec: stdin or environment is wrong: {result.stdout!r}")

    async def limits(self, sandbox: Sandbox) -> None:
        beat = "while :; do echo x >> beat; sleep 0.05; done"
        await sandbox.write("beat", b"")
        command = f"({beat}) & setsid sh -c '{beat}' & sleep 60"
        result = await sandbox.exec(["sh", "-c", command], limits=Limits(seconds=0.5))
        self.expect(result.timed_out, "limits: a command past its time does not say timed_out")
        self.expect(result.exit_code == 124, f"limits: a command past its time gives {result.exit_code}, not 124")
        before = await sandbox.read("beat")
        await asyncio.sleep(0.3)
        self.expect(await sandbox.read("beat") == before, "limits: children of a command past its time live on")
        await sandbox.exec(["sh", "-c", f"({beat}) & exit 0"])
        before = await sandbox.read("beat")
        await asyncio.sleep(0.3)
        self.expect(await sandbox.read("beat") == before, "limits: children of a finished command live on")
        text = "a" * 500 + "b" * 1000 + "c" * 500
        result = await sandbox.exec(["printf", "%s", text], limits=Limits(output_chars=1000))
        cut = result.stdout
        whole = cut.startswith("a" * 500) and cut.endswith("c" * 500) and "b" not in cut and "1000" in cut
        self.expect(whole, f"limits: long output is not cut to head, number left out and tail: {cut[480:560]!r}")
        greedy = "import sys; bytearray(1 << 30); print('got it')"
        result = await sandbox.exec(["python", "-c", greedy], limits=Limits(memory_mb=512))
        self.expect("got it" not in result.stdout, "limits: a command got 1 GiB with a limit of 512 MiB")
        result = await sandbox.exec(["python", "-c", "while True: pass"], limits=Limits(cpu_seconds=1, seconds=300))
        self.expect(result.timed_out and result.seconds < 300, "limits: cpu_seconds does not stop a busy command")

    async def files(self, sandbox: Sandbox, other: Sandbox) -> None:
        data = bytes(range(256))
        await sandbox.write("deep/er/file.bin", data)
        self.expect(await sandbox.read("deep/er/file.bin") == data, "files: what was written is not what is read")
        result = await sandbox.exec(["sh", "-c", "wc -c < deep/er/file.bin"])
        self.expect(result.stdout.strip() == "256", "files: a command does not see what was written")
        await self.check_refused(
            lambda: other.read("deep/er/file.bin"), FileNotFoundError, "files: two sandboxes share files"
        )
        self.expect(not (self.template / "deep").exists(), "files: a write reached the template")
        await sandbox.exec(["ln", "-s", "/", "way-out"])
        for path in ("../escape", "/etc/passwd", "deep/../../escape", "way-out/etc/passwd"):
            message = f"files: the path {path!r} is not refused with ValueError"
            await self.check_refused(lambda path=path: sandbox.read(path), ValueError, message + " in read")  # type: ignore[misc]
            await self.check_refused(lambda path=path: sandbox.write(path, b""), ValueError, message + " in write")  # type: ignore[misc]

    async def snapshots(self, sandbox: Sandbox) -> None:
        await sandbox.write("state", b"one")
        snapshot = await sandbox.snapshot()
        await sandbox.write("state", b"two")
        copy = await self.provider.start(snapshot)
        self.expect(await copy.read("state") == b"one", "snapshot: a start from one does not have its files")
        await copy.write("state", b"three")
        self.expect(await sandbox.read("state") == b"two", "snapshot: a copy's write reached the original")
        await copy.close()
        again = await self.provider.start(snapshot)
        self.expect(await again.read("state") == b"one", "snapshot: a copy's write reached the snapshot")
        await again.close()

    async def end(self, sandbox: Sandbox, other: Sandbox) -> None:
        mark = f"{secrets.randbelow(10**6) + 10**6}"
        running = asyncio.ensure_future(sandbox.exec(["sleep", mark], limits=Limits(seconds=60)))
        await self.wait_until_seen(mark)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await self.expect_gone(mark, "close: the process of a cancelled exec lives on")
        await sandbox.close()
        await self.check_refused(
            lambda: sandbox.exec(["true"]), SandboxError, "close: a closed sandbox still runs commands"
        )
        running = asyncio.ensure_future(other.exec(["sleep", mark], limits=Limits(seconds=60)))
        await self.wait_until_seen(mark)
        await self.provider.close()
        await asyncio.gather(running, return_exceptions=True)
        await self.expect_gone(mark, "close: a process outlives its provider")
        await self.check_refused(
            lambda: self.provider.start(self.template), SandboxError, "close: a closed provider still starts sandboxes"
        )

    async def wait_until_seen(self, mark: str) -> None:
        for _ in range(int(STARTED / 0.05)):
            if processes_with(mark):
                return
            await asyncio.sleep(0.05)

    async def expect_gone(self, mark: str, violation: str) -> None:
        for _ in range(int(ENDED / 0.05)):
            if not processes_with(mark):
                return
            await asyncio.sleep(0.05)
        self.found.append(violation)

    async def check_refused(
        self, attempt: Callable[[], Awaitable[object]], error: type[Exception], violation: str
    ) -> None:
        try:
            await attempt()
        except error:
            return
        except Exception as other:
            violation += f" (it raised {type(other).__name__}: {other})"
        self.found.append(violation)


def processes_with(argument: str) -> list[int]:
    """Return the ids of this machine's processes with `argument` on their command line.

    Without /proc the list is empty.
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if argument.encode() in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
    return found


async def check_sandboxes(provider: Sandboxes, template: Path | None = None) -> list[str]:
    """Test what the protocols of `sandboxes.base` promise, and return the violations, one line each.

    `template` is any folder and is only read (default: a small temporary one). The provider is closed at the end. The
    check takes about five seconds. Unexpected exceptions propagate.
    """
    with tempfile.TemporaryDirectory() as folder:
        if template is None:
            template = Path(folder) / "template"
            await asyncio.to_thread(template.mkdir)
        check = _Check(provider, template)
        try:
            await check.check_refused(
                lambda: provider.start(Path(folder) / "none"), SandboxError, "start: a missing template is not refused"
            )
            sandbox = await provider.start(template)
            try:
                other = await provider.start(template, deps=template)
            except TypeError as error:
                check.expect(False, f"start: it takes no folder of dependencies ({error})")
                other = await provider.start(template)
            await check.commands(sandbox)
            await check.limits(sandbox)
            await check.files(sandbox, other)
            await check.snapshots(sandbox)
            await check.end(sandbox, other)
        finally:
            await provider.close()
    return check.found
