"""A server that offers this machine's sandboxes over HTTP to provider `remote`, run by `turnstile sandbox serve`.

A client with the token may do anything with the provider's sandboxes, and nothing else on this machine. Each client has
its own provider, which is closed when the client asks for that, when the client has been silent for the time of a
lease, and when the server stops.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from turnstile import __version__
from turnstile.errors import ConfigError, MissingExtraError, SandboxError
from turnstile.sandboxes.base import Sandboxes
from turnstile.sandboxes.http.tenant import Tenant, name_of
from turnstile.sandboxes.http.uploads import Uploads
from turnstile.sandboxes.http.wire import POLL, TOKEN, WIRE, GarbageError, error_message, frame, part, unframe

try:
    from aiohttp import web
except ModuleNotFoundError as error:
    raise MissingExtraError("a sandbox server", "remote") from error

_log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SandboxServer:
    """A server of sandboxes for at most `clients` clients at once.

    `make` builds the provider of a client from the client's name. A client that is silent for `lease` seconds is
    dropped. A request or answer holds at most `most_mb` MiB, and `templates_mb` MiB of template folders are kept.
    Raises ConfigError if `token` is empty.
    """

    def __init__(
        self,
        make: Callable[[str], Sandboxes],
        *,
        token: str,
        lease: float = 60.0,
        clients: int = 16,
        most_mb: int = 512,
        templates_mb: int = 4096,
    ) -> None:
        if not token:
            raise ConfigError(f"a sandbox server needs a token; give it --token-file, or set {TOKEN}")
        self._make = make
        self._token = f"Bearer {token}".encode()
        self._lease = float(lease)
        self._clients = clients
        self._most = most_mb << 20
        self._uploads = Uploads(most_mb=templates_mb)
        self._tenants: dict[str, asyncio.Task[Tenant]] = {}
        self._heard: dict[str, float] = {}
        self._closing: dict[str, asyncio.Task[None]] = {}  # clients that are being closed
        self._reaper: asyncio.Task[None] | None = None
        self.app = web.Application(client_max_size=self._most, middlewares=[self._guard])
        self.app.add_routes(
            [
                web.post("/open", self._open),
                web.post("/beat", self._with_tenant(self._beat)),
                web.post("/do", self._with_tenant(self._do)),
                web.post("/wait", self._with_tenant(self._wait)),
                web.post("/cancel", self._with_tenant(self._cancel)),
                web.post("/close", self._close),
                web.post("/known", self._known),
                web.put("/templates/{digest}", self._template),
            ]
        )

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[str]:
        """Serve at an address, yield its URL, and close everything at the end of the block.

        Port 0 stands for a free port. Raises ConfigError if the server cannot listen there.
        """
        runner = web.AppRunner(self.app, access_log=None, shutdown_timeout=1.0)
        try:
            trial = await asyncio.to_thread(self._make, "trial")  # so that errors in its options appear at once
            await trial.close()
            await runner.setup()
            site = web.TCPSite(runner, host, port)
            try:
                await site.start()
            except OSError as error:
                raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror or error}") from None
            self._reaper = asyncio.ensure_future(self._reap())
            found = runner.addresses[0]
            name = f"[{found[0]}]" if ":" in found[0] else found[0]
            yield f"http://{name}:{found[1]}"
        finally:
            await self._stop()
            await runner.cleanup()
            await self._uploads.close()

    async def _stop(self) -> None:
        self._clients = 0  # accept no new clients
        if self._reaper is not None:
            self._reaper.cancel()
        for name in tuple(self._tenants):
            self._dismiss(name, "the server stops")
        await asyncio.gather(*self._closing.values())

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(self._lease / 10)
            now = asyncio.get_running_loop().time()
            for name in [name for name, heard in self._heard.items() if now - heard > self._lease]:
                self._dismiss(name, f"it was not heard of for {self._lease:g} s")

    def _dismiss(self, name: str, why: str) -> None:
        """Remove a client and start closing its provider."""
        self._heard.pop(name, None)
        task = self._closing[name] = asyncio.ensure_future(self._end(self._tenants.pop(name), why))
        task.add_done_callback(lambda _: self._closing.pop(name))

    async def _end(self, opening: asyncio.Task[Tenant], why: str) -> None:
        await asyncio.wait([opening])
        if not opening.cancelled() and opening.exception() is None:
            tenant = opening.result()
            await tenant.close()
            _log.info("client %s: closed, as %s", tenant.name, why)

    # Request handlers

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self._token):
            _log.warning("a request from %s without the right token was refused", request.remote)
            return web.Response(status=401)
        try:
            return await handler(request)
        except GarbageError as error:
            return web.Response(status=400, text=str(error))
        except (SandboxError, ConfigError, ValueError, OSError) as error:
            return bytes_response(frame(error_message(error)))

    async def _open(self, request: web.Request) -> web.StreamResponse:
        message, _ = unframe(await request.read())
        theirs = (message.get("wire"), message.get("turnstile"))
        if theirs != (WIRE, __version__):
            raise ConfigError(
                f"the sandbox server runs Turnstile {__version__} (protocol {WIRE}) and this client {theirs[1]} "
                f"(protocol {theirs[0]}); install the same version on both machines"
            )
        client = part(message, "client", str)
        if client not in self._tenants:
            if len(self._tenants) >= self._clients:
                raise SandboxError(f"the sandbox server serves {self._clients} clients already; give it more --clients")
            self._tenants[client] = asyncio.ensure_future(self._welcome(name_of(message)))
        self._hear(client)
        try:
            await asyncio.shield(self._tenants[client])
        except BaseException:
            self._tenants.pop(client, None)
            self._heard.pop(client, None)
            raise
        return bytes_response(frame({"lease": self._lease}))

    async def _welcome(self, name: str) -> Tenant:
        provider = await asyncio.to_thread(self._make, name)
        _log.info("client %s: opened", name)
        return Tenant(name, provider, self._uploads, most=self._most)

    async def _beat(self, tenant: Tenant, message: dict[str, Any], data: bytes) -> bytes:
        tenant.forget_received(message)
        return frame({})

    async def _do(self, tenant: Tenant, message: dict[str, Any], data: bytes) -> bytes:
        return await result(tenant.begin(message, data))

    async def _wait(self, tenant: Tenant, message: dict[str, Any], data: bytes) -> bytes:
        tenant.forget_received(message)
        return await result(tenant.job(part(message, "id", str)))

    async def _cancel(self, tenant: Tenant, message: dict[str, Any], data: bytes) -> bytes:
        ended = await tenant.cancel(part(message, "id", str))
        return frame({} if ended else {"wait": True})

    async def _close(self, request: web.Request) -> web.StreamResponse:
        message, _ = unframe(await request.read())
        client = part(message, "client", str)
        if client in self._tenants:
            self._dismiss(client, "it said so")
        if client in self._closing:  # also if it asks again
            await asyncio.wait([self._closing[client]])
        return bytes_response(frame({}))

    async def _known(self, request: web.Request) -> web.StreamResponse:
        message, _ = unframe(await request.read())
        return bytes_response(frame({"known": part(message, "digest", str) in self._uploads}))

    async def _template(self, request: web.Request) -> web.StreamResponse:
        await self._uploads.receive(request.match_info["digest"], request.content.iter_any())
        return bytes_response(frame({}))

    def _with_tenant(self, inner: Callable[[Tenant, dict[str, Any], bytes], Awaitable[bytes]]) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            message, data = unframe(await request.read())
            client = part(message, "client", str)
            if client not in self._tenants:
                return bytes_response(frame({"gone": self._lease}))
            self._hear(client)
            return bytes_response(await inner(await asyncio.shield(self._tenants[client]), message, data))

        return handler

    def _hear(self, client: str) -> None:
        self._heard[client] = asyncio.get_running_loop().time()


async def result(job: asyncio.Task[bytes]) -> bytes:
    """Return the answer to a request, or after `POLL` seconds a message that it is not finished."""
    await asyncio.wait([job], timeout=POLL)
    if not job.done():
        return frame({"wait": True})
    if job.cancelled():
        error = SandboxError("the sandbox was closed, or the request cancelled, while it was in use")
        return frame(error_message(error))
    return job.result()


def bytes_response(body: bytes) -> web.Response:
    """Return a response with `body` as its content."""
    return web.Response(body=body, content_type="application/octet-stream")


def is_loopback(host: str) -> bool:
    """Return whether a host can be reached from this machine only. Raises ConfigError for an unknown name."""
    try:
        found = socket.getaddrinfo(host, None)
    except OSError as error:
        raise ConfigError(f"the host {host!r} is not known here: {error.strerror or error}") from None
    return all(ipaddress.ip_address(str(address[4][0]).partition("%")[0]).is_loopback for address in found)
