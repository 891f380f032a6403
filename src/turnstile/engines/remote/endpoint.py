"""Requests to an OpenAI-compatible server: JSON over HTTP, with retries, limits and errors that name the remedy."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from turnstile.engines.remote.downtime import record_downtime, track_downtime
from turnstile.errors import ConfigError, EngineError, EngineGoneError, MissingExtraError, RequestFailedError

try:
    import aiohttp
except ModuleNotFoundError as error:
    raise MissingExtraError("engine kind 'openai'", "remote") from error

RETRY_STATUSES = (408, 409, 425, 429, 500, 502, 503, 504)
"""HTTP statuses after which a request is retried."""
SESSION_HEADER = "X-Session-ID"
"""Header by which vLLM and `turnstile serve` recognise requests with shared prefixes."""
CONNECT_TIMEOUT = 10.0  # seconds
IDLE_SECONDS = 4.0  # vLLM closes idle connections after five seconds, which would break a request
MAX_PAUSE = 30.0  # seconds between two attempts
_MAX_ERROR_CHARS = 300  # characters of a server's own message that are passed on


class Endpoint:
    """The server at `url`, which usually ends in /v1.

    The environment variable `key` holds the API key; servers without a key ignore it. At most `concurrent` requests run
    at once, and each attempt takes at most `timeout` seconds. A request that did not reach the server, or that the
    server cannot answer now, is sent again up to `retries` times, after pauses that double each time unless the server
    names one; no pause exceeds `MAX_PAUSE`. A request that timed out is not sent again, since it would time out again.
    Requests may be processed twice without harm, because only the response that arrived counts.
    """

    def __init__(
        self, url: str, *, key: str, concurrent: int, timeout: float, retries: int, pause: float = 0.5
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise ConfigError(f"engine.url = {url!r} is not a URL; write it like http://127.0.0.1:8000/v1")
        if concurrent < 1 or timeout <= 0 or retries < 0:
            raise ConfigError(
                f"a server needs concurrent >= 1, timeout > 0 and retries >= 0, got {concurrent}, {timeout}, {retries}"
            )
        self.url = url.rstrip("/")
        self._root = self.url.removesuffix("/v1")
        self._key = key
        self._slots = asyncio.Semaphore(concurrent)
        self._timeout = timeout
        self._retries = retries
        self._pause = pause
        self._http: aiohttp.ClientSession | None = None

    async def get(
        self, path: str, *, root: bool = False, seconds: float | None = None, retries: int | None = None
    ) -> dict[str, Any]:
        """GET a path and return its JSON object.

        Unlike a `post`, it does not count towards `concurrent`; `seconds` and `retries` override the defaults. Raises
        the errors of `post`.
        """
        address = f"{self._root if root else self.url}{path}"
        return await self._request("GET", address, None, seconds or self._timeout, retries)

    async def post(
        self, path: str, body: Mapping[str, Any], *, root: bool = False, session: str = ""
    ) -> dict[str, Any]:
        """Send a request and return the JSON object of its response.

        With `root`, the path is not under the address's /v1. Requests of one `session` share prefixes. Raises
        EngineGoneError if the server cannot be reached; RequestFailedError if it takes too long, breaks off or cannot
        answer now; ConfigError if it rejects the key or has no such path or model; EngineError if it refuses the
        request or does not return a JSON object.
        """
        async with self._slots:
            address = f"{self._root if root else self.url}{path}"
            return await self._request("POST", address, body, self._timeout, None, session)

    async def control(self, path: str, body: Mapping[str, Any], *, root: bool = False) -> dict[str, Any]:
        """Send a request that controls the server, as `post` does, but without waiting for a free slot."""
        return await self._request("POST", f"{self._root if root else self.url}{path}", body, self._timeout, None)

    async def close(self) -> None:
        """Close the connections."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()
            await asyncio.sleep(0)  # connections close in the next iteration of the event loop

    async def _request(
        self,
        method: str,
        address: str,
        body: Mapping[str, Any] | None,
        seconds: float,
        retries: int | None,
        session: str = "",
    ) -> dict[str, Any]:
        retries_left, pause = self._retries if retries is None else retries, self._pause
        while True:
            started = time.monotonic()
            try:
                return await self._request_once(method, address, body, seconds, session)
            except (EngineGoneError, RequestFailedError) as error:
                named_pause = error.pause if isinstance(error, RequestFailedError) else None
                if not retries_left or (isinstance(error, RequestFailedError) and not error.again):
                    raise
                wait = pause * random.uniform(0.75, 1.25) if named_pause is None else named_pause
                why = str(error)
            record_downtime(why, started)
            with track_downtime(why):
                await asyncio.sleep(min(wait, MAX_PAUSE))
            retries_left, pause = retries_left - 1, pause * 2

    async def _request_once(
        self, method: str, address: str, body: Mapping[str, Any] | None, seconds: float, session: str
    ) -> dict[str, Any]:
        limits = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_TIMEOUT)
        headers = {SESSION_HEADER: session} if session else None
        try:
            async with self._session().request(
                method, address, json=body, headers=headers, timeout=limits, allow_redirects=False
            ) as response:
                data, status = await response.read(), response.status
                named_pause = response.headers.get("Retry-After", "")
        except TimeoutError as error:
            if isinstance(error, aiohttp.ConnectionTimeoutError):
                raise EngineGoneError(
                    f"the server at {self.url} takes no connection within {CONNECT_TIMEOUT:g} s"
                ) from None
            raise RequestFailedError(
                f"the server at {self.url} did not answer a request within {seconds:g} s; give it more with "
                "engine.timeout, or ask for less at once with engine.concurrent, or for shorter turns with "
                "sampling.max_tokens",
                again=False,
            ) from None
        except aiohttp.ClientConnectorError as error:
            raise EngineGoneError(
                f"the server at {self.url} does not answer ({error or type(error).__name__}); is it running, and the "
                "way to it open?"
            ) from None
        except (aiohttp.ClientError, OSError) as error:  # it was reached; a health check tells whether it still runs
            raise RequestFailedError(
                f"the server at {self.url} broke off its answer ({error or type(error).__name__})", again=True
            ) from None
        return self._parse_response(urlsplit(address).path, status, data, named_pause)

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            key = os.environ.get(self._key, "") if self._key else ""
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS), headers=headers
            )
        return self._http

    def _parse_response(self, path: str, status: int, data: bytes, named_pause: str) -> dict[str, Any]:
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            body = None
        if status == 200 and isinstance(body, dict):
            return body
        reason = _error_text(body, data)
        where = f"the server at {self.url}"
        if status in RETRY_STATUSES:
            pause = float(named_pause) if named_pause.isdecimal() else None
            raise RequestFailedError(f"{where} cannot answer now ({status}: {reason})", again=True, pause=pause)
        if status in (401, 403):
            variable = f"what is in {self._key}" if self._key else "a request without a key"
            if status == 403:
                raise ConfigError(f"{where} does not allow {variable} to use {path} ({reason})")
            raise ConfigError(f"{where} does not take {variable} ({status}: {reason}); name the variable in engine.key")
        if status == 404:
            hint = "" if path.startswith("/v1/") else "; the address ends in /v1 as a rule"
            raise ConfigError(f"{where} has no {path} or no such model ({reason}){hint}")
        if status == 200:
            raise EngineError(f"{where} does not answer as an OpenAI-compatible server does: {reason!r}")
        raise EngineError(f"{where} refuses a request ({status}: {reason})")


def _error_text(body: object, data: bytes) -> str:
    """Return the server's own error message on one line, cut off after `_MAX_ERROR_CHARS` characters."""
    detail = body.get("error", body.get("message", body.get("detail"))) if isinstance(body, dict) else None
    if isinstance(detail, dict):
        detail = detail.get("message")
    text = detail if isinstance(detail, str) else data.decode(errors="replace")
    line = " ".join(text.split())
    return line if len(line) <= _MAX_ERROR_CHARS else f"{line[:_MAX_ERROR_CHARS]}..."
