"""The transport of a model server: access checks, a limit on request sizes, and an end to abandoned requests."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

from turnstile.errors import ConfigError, EngineError, MissingExtraError
from turnstile.gateway import anthropic, openai
from turnstile.gateway.requests import RefusedError, RequestTooLargeError

try:
    import uvicorn
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.types import ASGIApp, Receive, Scope, Send
except ModuleNotFoundError as error:
    raise MissingExtraError("a model server", "remote") from error

TOKEN_VARIABLE = "TURNSTILE_SERVE_TOKEN"
"""The environment variable that holds the key that clients must send."""
MAX_BODY_BYTES = 64 << 20  # of the largest request
CLIENT_GONE = 499  # nginx's status for a client that disconnected; no client reads it
STARTING = 0.001  # seconds between two checks whether the server has started

Handler = Callable[[Request, bytes], Coroutine[Any, Any, Response]]
"""A function that takes a request and its body, and returns the answer."""
T = TypeVar("T")
log = logging.getLogger(__name__)


class Guard:
    """A wrapper of an application that refuses requests without the key `token`, except those for /health.

    Without a token, it refuses requests that a web page may have sent. `names` are this machine's host names.
    """

    def __init__(self, app: ASGIApp, token: str, names: set[str]) -> None:
        self._app, self._names = app, names
        self._token = f"Bearer {token}".encode() if token else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer why it is refused."""
        if scope["type"] == "http" and (refusal := self._refusal(Request(scope))):
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, request: Request) -> Response | None:
        path = request.url.path
        if self._token and path != "/health" and not self._has_key(request.headers):
            return error_response(path, 401, "the key is missing or wrong", code="invalid_api_key")
        if not self._token and (why := self._web_page_reason(request.headers)):
            return error_response(path, 403, why)
        return None

    def _has_key(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request carries the key, as a bearer token or in Anthropic's header x-api-key."""
        given = (headers.get("authorization", ""), f"Bearer {headers.get('x-api-key', '')}")
        return any(hmac.compare_digest(one.encode("utf-8", "surrogateescape"), self._token) for one in given)

    def _web_page_reason(self, headers: Mapping[str, str]) -> str:
        """Return why a request may come from a web page in a browser on this machine, or "" if it cannot.

        The signs are headers that browsers add, and a host name that the page's own server could have pointed at this
        machine (DNS rebinding).
        """
        if "origin" in headers or headers.get("sec-fetch-site", "none") != "none":
            return f"web pages need a key; start the server with one in {TOKEN_VARIABLE}"
        name = (urlsplit(f"//{headers.get('host', '')}").hostname or "").lower()
        if name in self._names or _is_address(name):
            return ""
        return f"host name {name!r} needs a key; use an IP address, or start the server with a key in {TOKEN_VARIABLE}"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def answering(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that runs `handler`, answers its errors, and cancels it if the client disconnects."""

    async def answer(request: Request) -> Response:
        try:
            body = await _read(request)
            return await _while_connected(request, handler(request, body))
        except (HTTPException, ClientDisconnect):
            raise
        except Exception as error:
            return error_response(request.url.path, *explain(error, request.url.path))

    return answer


def explain(error: Exception, path: str) -> tuple[int, str, str | None]:
    """Return the status, message and code with which to answer an error. Log an unexpected one with its traceback."""
    if isinstance(error, RefusedError):
        return error.status, str(error), error.code
    if isinstance(error, ConfigError):
        return 400, str(error), None
    if isinstance(error, EngineError):
        return 503, str(error), None
    log.error("a request to %s failed", path, exc_info=error)
    return 500, "an error in the server; its log has the traceback", None


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, or cancel it and raise HTTPException if the client disconnects first.

    The request's body must have been read.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(CLIENT_GONE)
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read(request: Request) -> bytes:
    """Return a request's body. Raises RequestTooLargeError if it is larger than `MAX_BODY_BYTES`."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise RequestTooLargeError(f"the request is larger than {MAX_BODY_BYTES >> 20} MiB")
    return bytes(body)


def error_fields(path: str, status: int, why: str, code: str | None = None) -> dict[str, Any]:
    """Return an error in the format of the protocol that a path belongs to."""
    if path.startswith("/v1/messages"):
        return anthropic.error_fields(status, why)
    return openai.error_fields(why, code=code, kind="server_error" if status >= 500 else "invalid_request_error")


def error_response(path: str, status: int, why: str, code: str | None = None) -> JSONResponse:
    """Return a response that reports an error."""
    return JSONResponse(error_fields(path, status, why, code), status_code=status)


async def not_found(request: Request, error: Exception) -> Response:
    """Answer a request with a path or method that is not served."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    path = request.url.path
    return error_response(path, status, f"{request.method} {path} is not served here", "not_found")


async def disconnected(request: Request, error: Exception) -> Response:
    """Answer a client that disconnected while it was sending its request."""
    return Response(status_code=CLIENT_GONE)


class _Server(uvicorn.Server):
    """A server that leaves the handling of signals to the owner of the event loop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def listening(app: ASGIApp, host: str, port: int) -> AsyncIterator[str]:
    """Serve `app` at an address and yield its URL. Port 0 stands for any free port.

    Raises ConfigError if it cannot listen there.
    """
    # asyncio sets TCP_NODELAY only on a socket made with IPPROTO_TCP; without it, answers are delayed by 40 ms.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror or error}") from None
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="critical",  # handlers log their own errors
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)
    serving = asyncio.ensure_future(server.serve([listener]))
    try:
        while not server.started and not serving.done():  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(STARTING)
        address = listener.getsockname()
        name = f"[{address[0]}]" if ":" in address[0] else address[0]
        yield f"http://{name}:{address[1]}/v1"
    finally:
        server.should_exit = True
        await serving
        listener.close()
