"""The client of the fork server `turnstile.sandboxes.forker`, a preloaded Python process that forks commands.

`python -m MODULE ...` costs a fork instead of an interpreter start and its imports. Any other command is executed by
the same kind of warden process, under the same limits.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import turnstile
from turnstile.errors import SandboxError
from turnstile.sandboxes.base import ExecResult, Limits

GRACE = 15.0  # seconds past a command's own limit after which a silent server is given up
SERVER = Path(__file__).with_name("forker.py")
SOURCE = Path(turnstile.__file__).parent.parent
QUIET = {
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "TERM": "dumb",
    "NO_COLOR": "1",
    "DEBIAN_FRONTEND": "noninteractive",
    "OMP_NUM_THREADS": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # plugins installed beside Turnstile are not part of a task
}
"""The environment of every command, before its folder's HOME and TMPDIR and what the caller adds."""


def base_environment(scratch: Path | str) -> dict[str, str]:
    """Return a command's environment, which inherits only PATH from this process, with this Python's folder first."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    return {**QUIET, "PATH": path, "HOME": str(scratch), "TMPDIR": str(scratch)}


def is_forkable(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    """Return whether the fork server can run a command by forking, without starting an interpreter.

    It can if the command is `python -m MODULE ...` and `env` has no PYTHON* variable that a running Python cannot
    adopt.
    """
    settings = {name for name in env if name.startswith("PYTHON")} - {"PYTHONPATH"}
    usual = all(env[name] == QUIET.get(name) for name in settings)
    return usual and len(argv) > 2 and argv[0] in ("python", sys.executable) and argv[1] == "-m"


class ForkServer:
    """A fork server, started when first needed, that runs at most `workers` commands at once in one event loop.

    `preload` names modules that the server imports before it serves; `package.*` is every module of a package. If the
    server dies, the requests in flight raise SandboxError, and the next request starts a new server. The server and
    everything it runs end with `close`, with this object and with this process, however it ends. `wrapper` is put
    before the server's command line (bubblewrap); `scratch` is a folder for the server's temporary files, which must
    exist where the server runs.

    Cancelling `run` ends its command. Code that kills its own warden (its parent process) causes SandboxError.
    """

    def __init__(
        self,
        *,
        scratch: Path | str,
        preload: Sequence[str] = (),
        workers: int = 2,
        wrapper: Sequence[str] = (),
    ) -> None:
        if workers < 1:
            raise ValueError(f"a fork server needs at least one worker, not {workers}")
        self._command = [*wrapper, sys.executable, "-B", "-P", "-s", str(SERVER), str(SOURCE), *preload]
        self._environment = base_environment(scratch)
        self._workers = workers
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._log: IO[bytes] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process id of the server, or of its wrapper; None while none is running."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    async def run(self, argv: Sequence[str], *, cwd: Path | str, env: Mapping[str, str], limits: Limits) -> ExecResult:
        """Run one command in `cwd` with exactly the environment `env`.

        Raises SandboxError if the server fails or `cwd` is gone, and ValueError for an empty command.
        """
        if not argv:
            raise ValueError("an empty command")
        request = {
            "argv": list(argv),
            "cwd": str(cwd),
            "env": dict(env),
            "limits": asdict(limits),
            "fork": is_forkable(argv, env),
        }
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._workers))
        async with slots:
            try:
                async with asyncio.timeout(limits.seconds + GRACE):
                    answer = await self._ask(request)
            except TimeoutError:
                raise SandboxError(
                    f"the fork server did not answer {GRACE:.0f} s after the command's own limit of {limits.seconds} s"
                ) from None
        if "error" in answer:
            raise SandboxError(f"the sandbox cannot run {argv[0]!r}: {answer['error']}")
        return ExecResult(**answer)

    async def close(self) -> None:
        """End the server and all running commands."""
        self._closed = True
        process, self._process = self._process, None
        if self._control is not None:
            self._control.close()
            self._control = None
        if process is not None:
            try:
                await asyncio.to_thread(process.wait, 5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)
        if self._log is not None:
            self._log.close()
            self._log = None

    def start(self) -> None:
        """Start the server if none is running, without waiting for its imports.

        Raises SandboxError if it was closed or the machine cannot start a process.
        """
        if self._closed:
            raise SandboxError("the fork server was closed")
        if self._process is not None and self._process.poll() is None:
            return
        for old in (self._control, self._log):
            if old is not None:
                old.close()
        ours, theirs = socket.socketpair()
        self._log = log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the server runs
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=log.fileno(),
                env=self._environment,
                cwd="/",
                start_new_session=True,  # so that only the trainer gets an interrupt from the terminal
            )
        except OSError as error:
            ours.close()
            log.close()
            raise SandboxError(f"the fork server cannot be started: {error}") from None
        finally:
            theirs.close()
        self._control = ours

    async def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.start()
        assert self._control is not None
        ours, theirs = socket.socketpair()
        try:
            socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        except OSError:
            ours.close()
            raise SandboxError(self._failure_reason()) from None
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            body = json.dumps(request).encode()
            writer.write(struct.pack(">I", len(body)) + body)
            size = struct.unpack(">I", await reader.readexactly(4))[0]
            answer: dict[str, Any] = json.loads(await reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise SandboxError(self._failure_reason()) from None
        finally:
            writer.close()
        return answer

    def _failure_reason(self) -> str:
        """Return why a request got no answer, as far as is known."""
        if self._log is None:
            return "the fork server was closed while a command ran"
        size = os.fstat(self._log.fileno()).st_size  # pread, since the server shares the file's offset
        text = os.pread(self._log.fileno(), 4096, max(0, size - 4096)).decode(errors="replace")
        last = text.strip().splitlines()[-1:]
        code = self._process.poll() if self._process is not None else None
        what = "the process that ran the command died" if code is None else f"the fork server ended with code {code}"
        return f"{what}{': ' + last[0] if last else ''}"
