"""A sandbox server of the tests' own: the real command in a process, and a proxy that breaks connections."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from turnstile.sandboxes.http.remote import RemoteSandboxes

TOKEN = "a token of the tests"
STARTING = 120.0  # seconds


class Served:
    """`turnstile sandbox serve` with arguments; its files lie in `folder`."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.token_file = folder / "token"
        self.token_file.write_text(TOKEN)
        self.port = 0
        self._arguments = arguments
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def start(self) -> None:
        """Start it, at the port that it had if it had one, and wait until it serves."""
        command = [sys.executable, "-u", "-m", "turnstile", "sandbox", "serve", *self._arguments]
        command += ["--token-file", str(self.token_file), "--port", str(self.port)]
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        deadline = time.monotonic() + STARTING
        while "served at " not in self.log:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline
            time.sleep(0.02)
        self.port = int(self.log.partition("served at ")[2].split()[0].rpartition(":")[2])

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send it a signal and wait for its end: its exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)

    def client(self, **knobs: object) -> RemoteSandboxes:
        return RemoteSandboxes(url=self.url, token=TOKEN, **knobs)  # type: ignore[arg-type]


@contextmanager
def served(folder: Path, *arguments: str) -> Iterator[Served]:
    folder.mkdir(parents=True, exist_ok=True)
    server = Served(folder, *arguments)
    try:
        server.start()
        yield server
    finally:
        if server.process is not None and server.process.poll() is None:
            server.process.send_signal(signal.SIGCONT)
            server.end()


class Proxy:
    """Passes bytes on to a port and back. `cut` connections are closed before the answer to their first request."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.url = ""
        self.sent = 0  # bytes that clients have sent
        self.cut = 0
        self.tasks: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.add(asyncio.ensure_future(self._pass_on(reader, writer)))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, away = await asyncio.open_connection("127.0.0.1", self._port)
        back = asyncio.ensure_future(self._back(there, writer))
        try:
            while data := await reader.read(1 << 16):
                self.sent += len(data)
                away.write(data)
                await away.drain()
        except ConnectionError:
            pass
        finally:
            away.close()
            await back
            writer.close()
            await asyncio.gather(away.wait_closed(), writer.wait_closed(), return_exceptions=True)

    async def _back(self, there: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await there.read(1 << 16):
                if self.cut:
                    self.cut -= 1
                    writer.close()
                    return
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass


@asynccontextmanager
async def proxy(port: int) -> AsyncIterator[Proxy]:
    between = Proxy(port)
    server = await asyncio.start_server(between.accept, "127.0.0.1", 0)
    between.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield between
    await asyncio.gather(*between.tasks)
