"""Sandboxes on another machine, served over HTTP by `turnstile sandbox serve`."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from pydantic import PositiveFloat

from turnstile.errors import ConfigError, SandboxError
from turnstile.sandboxes.archive import pack_tree
from turnstile.sandboxes.base import ExecResult, Image, Limits, Template
from turnstile.sandboxes.folder import as_folder
from turnstile.sandboxes.http.connection import Answer, Connection
from turnstile.sandboxes.http.lease import Lease
from turnstile.sandboxes.http.wire import TOKEN, part

SENDINGS = 3  # times that a start sends its template, in case the server removes it to make room


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteSnapshot(Image):
    """A snapshot that a server keeps for one client. If `root` is empty, commands run in the same folder as before."""

    client: str


class RemoteSandbox:
    """A sandbox at a server, which behaves like one of the server's provider."""

    def __init__(self, connection: Connection, lease: Lease, identity: str) -> None:
        self._connection = connection
        self._lease = lease
        self._identity = identity
        self._closed = False

    async def exec(
        self, argv: Sequence[str], *, limits: Limits | None = None, env: Mapping[str, str] | None = None
    ) -> ExecResult:
        """Run a command at the server. Cancelling ends it there.

        The command runs only once, even if the request is sent again after a broken connection.
        """
        message = {"argv": list(argv), "env": dict(env or {}), "limits": None if limits is None else asdict(limits)}
        answer, _ = await self._ask("exec", message)
        try:
            return ExecResult(**part(answer, "result", dict))
        except (TypeError, ValueError) as error:
            raise SandboxError(f"what is at {self._connection.url} gives no result of a command: {error}") from None

    async def read(self, path: str) -> bytes:
        """Return a file's bytes.

        Raises FileNotFoundError, IsADirectoryError, ValueError if the path leaves the root or is not a plain file, and
        OSError if the file is larger than the server sends.
        """
        _, data = await self._ask("read", {"path": path})
        return data

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a file, and create its folders if needed. Raises ValueError if the path leaves the root."""
        await self._ask("write", {"path": path}, data)

    async def snapshot(self) -> RemoteSnapshot:
        """Return a snapshot of the files, kept at the server until the provider closes or the lease is lost."""
        identity = secrets.token_hex(8)
        await self._ask("snapshot", {}, identity=identity)
        return RemoteSnapshot(name=identity, root="", client=self._lease.client)

    async def close(self) -> None:
        """End the sandbox. If the server cannot be reached, it ends the sandbox when the lease expires."""
        if self._closed:
            return
        try:
            await self._ask("close", {})
        except (SandboxError, ConfigError):
            return
        finally:
            self._closed = True

    async def leave(self) -> None:
        """End a sandbox whose caller was cancelled. Runs in the connection's thread.

        If the server cannot be reached, it ends the sandbox when the lease expires.
        """
        with contextlib.suppress(SandboxError, ConfigError):
            await self._lease.ask("close", {"sandbox": self._identity})

    async def _ask(
        self, verb: str, message: dict[str, Any], data: bytes = b"", *, identity: str | None = None
    ) -> Answer:
        if self._closed:
            raise SandboxError("the sandbox was closed")
        message["sandbox"] = self._identity
        return await self._connection.run(self._lease.ask(verb, message, data, identity=identity))


class RemoteSandboxes:
    """A provider of sandboxes at the server at `url`, for clients with its token.

    The token is `token`, or the content of `token_file`, or else the environment variable TURNSTILE_SANDBOX_TOKEN. A
    token written into a recipe is also stored in the run folder. `run` is the name that the client gives the server. A
    request fails if the server is silent for `patience` seconds longer than an answer may take. A template folder is
    sent once, and after that identified by its content. The server decides what the sandboxes may do and use.
    """

    def __init__(
        self, *, url: str = "", token: str = "", token_file: str = "", run: str = "", patience: PositiveFloat = 15.0
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"sandbox kind 'remote' needs the URL of a server, not {url!r}: sandbox = "
                '{ kind = "remote", url = "http://127.0.0.1:8850" }; turnstile sandbox serve starts one'
            )
        self._connection = Connection(url, token or read_token(token_file), patience=patience)
        self._run = run
        self._lease: Lease | None = None
        self._opening = asyncio.Lock()
        self._sending = asyncio.Lock()
        self._finalizer = weakref.finalize(self, self._connection.close)

    async def start(self, template: Template, *, deps: Path | None = None) -> RemoteSandbox:
        """Start a sandbox with a copy of a folder, from an image of the server's provider, or from a snapshot.

        `deps` stands for the server's folder with that path, if it has one. Raises SandboxError if there is no such
        template or no sandbox is available, and ConfigError if none ever can be.
        """
        message: dict[str, Any] = {"deps": None if deps is None else str(deps)}
        if isinstance(template, RemoteSnapshot):
            message["template"] = {"snapshot": template.name, "root": template.root}
            return await self._connection.run(self._start(message, client=template.client), RemoteSandbox.leave)
        if isinstance(template, Image):
            message["template"] = {"image": template.name, "root": template.root}
            return await self._connection.run(self._start(message), RemoteSandbox.leave)
        archive, digest = await asyncio.to_thread(pack_template, template)
        with archive:
            message["template"] = {"tree": digest}
            return await self._connection.run(self._start(message, archive), RemoteSandbox.leave)

    async def close(self) -> None:
        """End all commands and remove all files of this client at the server."""
        await asyncio.to_thread(self._finalizer)

    async def _start(
        self, message: dict[str, Any], archive: IO[bytes] | None = None, *, client: str | None = None
    ) -> RemoteSandbox:
        for _ in range(SENDINGS + 1):
            lease = await self._open_lease()
            if client not in (None, lease.client):
                raise SandboxError(
                    f"the snapshot ended with an earlier lease at the sandbox server {self._connection.url}"
                )
            identity = secrets.token_hex(8)
            try:
                answer, _ = await lease.ask("start", message, identity=identity)
            except SandboxError as error:
                if error is not lease.lost:
                    raise
                continue  # nothing was started there, and a new lease may be granted
            if "unknown" not in answer:
                return RemoteSandbox(self._connection, lease, identity)
            if archive is not None:
                await self._send(message["template"]["tree"], archive)
        raise SandboxError(
            f"the sandbox server {self._connection.url} has no room for the template; raise --templates-mb"
        )

    async def _open_lease(self) -> Lease:
        async with self._opening:
            if self._lease is None or self._lease.lost is not None:
                lease = Lease(self._connection, self._run)
                await lease.open()
                self._connection.farewell = lease.close
                self._lease = lease
            return self._lease

    async def _send(self, digest: str, archive: IO[bytes]) -> None:
        async with self._sending:  # another start of the same template may have been quicker
            answer, _ = await self._connection.post("known", {"digest": digest})
            if not answer.get("known"):
                await self._connection.put(f"templates/{digest}", archive)


def pack_template(template: Template) -> tuple[IO[bytes], str]:
    """Return an archive of a folder, and the archive's digest. Raises SandboxError if there is no such folder."""
    archive = pack_tree(as_folder(template))
    found = hashlib.sha256()
    while data := archive.read(1 << 20):
        found.update(data)
    return archive, found.hexdigest()


def read_token(file: str) -> str:
    """Return the token from `file` or, if that is empty, from the environment. Raises ConfigError if there is none."""
    if file:
        try:
            token = Path(file).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the token file {file!r} cannot be read: {error}") from None
        if not token:
            raise ConfigError(f"the token file {file!r} is empty")
        return token
    token = os.environ.get(TOKEN, "")
    if not token:
        raise ConfigError(f"no token for the sandbox server; set {TOKEN}, or name a file with sandbox.token_file")
    return token
