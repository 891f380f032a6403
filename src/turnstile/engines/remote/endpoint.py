"""Requests to an OpenAI-compatible server: JSON over HTTP, with retries, limits, and errors that say what to do."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from turnstile.engines.remote.downtime import losing, lost
from turnstile.errors import ConfigError, EngineError, EngineGoneError, MissingExtraError, RequestFailedError

try:
    import aiohttp
except ModuleNotFoundError as error:
    raise MissingExtraError("engine kind 'openai'", "remote") from error

AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)
"""What a server answers that may be asked again."""
SESSION = "X-Session-ID"
"""The header that names requests which have much in common, as vLLM and `turnstile serve` know it."""
CONNECT = 10.0  # seconds
IDLE = 4.0  # seconds that a connection is kept: vLLM closes one after five, which a request would find out
LONGEST = 30.0  # seconds between two tries
_TOLD = 300  # characters of a server's own words that are passed on


class Endpoint:
    """The server at `url`, which ends in /v1 as a rule.

    The key is what stands in the environment variable `key`; servers without one ignore it. At most `concurrent`
    requests are under way at once, each try for at most `timeout` seconds. One that did not reach a server, or that the
    server says it cannot answer now, is sent again up to `retries` times, each time after twice the pause; a server
    that names a pause is given it. One that took too long would again, and is not. What is asked for may be done twice
    without harm, and only the answer that came counts, so nothing is counted twice.
    """

    def __init__(
        self, url: str, *, key: str, concurrent: int, timeout: float, retries: int, pause: float = 0.5
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise ConfigError(f"engine.url = {url!r} is no address; write it like http://127.0.0.1:8000/v1")
        if concurrent < 1 or timeout <= 0 or retries < 0:
            raise ConfigError(
                f"a server wants concurrent >= 1, timeout > 0 and retries >= 0, got {concurrent}, {timeout}, {retries}"
            )
        self.url = url.rstrip("/")
        self._root = self.url.removesuffix("/v1")
        self._key = key
        self._places = asyncio.Semaphore(concurrent)
        self._timeout = timeout
        self._retries = retries
        self._pause = pause
        self._http: aiohttp.ClientSession | None = None

    async def get(
        self, path: str, *, root: bool = False, seconds: float | None = None, retries: int | None = None
    ) -> dict[str, Any]:
        """The JSON object at a path; the rest as of `post`."""
        address = f"{self._root if root else self.url}{path}"
        return await self._ask("GET", address, None, seconds or self._timeout, retries)

    async def post(
        self, path: str, body: Mapping[str, Any], *, root: bool = False, session: str = ""
    ) -> dict[str, Any]:
        """The JSON object that answers a request. A path at the `root` does not begin with the address's /v1; requests
        of one `session` have much in common.

        Raises EngineGoneError where the server cannot be reached; RequestFailedError where it takes too long, or says
        that it cannot answer now; ConfigError where it does not take the key or has no such path; EngineError where it
        refuses this request, and for an answer that is no JSON object.
        """
        async with self._places:
            address = f"{self._root if root else self.url}{path}"
            return await self._ask("POST", address, body, self._timeout, None, session)

    async def control(self, path: str, body: Mapping[str, Any], *, root: bool = False) -> dict[str, Any]:
        """As `post`, of what steers the server and does not wait for requests that are under way."""
        return await self._ask("POST", f"{self._root if root else self.url}{path}", body, self._timeout, None)

    async def close(self) -> None:
        """Closes the connections."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()
            await asyncio.sleep(0)  # connections are gone when the loop has turned once more

    async def _ask(
        self,
        method: str,
        address: str,
        body: Mapping[str, Any] | None,
        seconds: float,
        retries: int | None,
        session: str = "",
    ) -> dict[str, Any]:
        left, pause = self._retries if retries is None else retries, self._pause
        while True:
            began = time.monotonic()
            try:
                return await self._once(method, address, body, seconds, session)
            except (EngineGoneError, RequestFailedError) as error:
                named = error.pause if isinstance(error, RequestFailedError) else None
                if not left or (isinstance(error, RequestFailedError) and not error.again):
                    raise
                wait = pause * random.uniform(0.75, 1.25) if named is None else named
                why = str(error)
            lost(why, began)
            with losing(why):
                await asyncio.sleep(min(wait, LONGEST))
            left, pause = left - 1, pause * 2

    async def _once(
        self, method: str, address: str, body: Mapping[str, Any] | None, seconds: float, session: str
    ) -> dict[str, Any]:
        limits = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT)
        headers = {SESSION: session} if session else None
        try:
            async with self._session().request(
                method, address, json=body, headers=headers, timeout=limits, allow_redirects=False
            ) as answer:
                data, status, named = await answer.read(), answer.status, answer.headers.get("Retry-After", "")
        except TimeoutError as error:
            if isinstance(error, aiohttp.ConnectionTimeoutError):
                raise EngineGoneError(f"the server at {self.url} takes no connection within {CONNECT:g} s") from None
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
        except (aiohttp.ClientError, OSError) as error:  # it was reached: whether it is still there, its health says
            raise RequestFailedError(
                f"the server at {self.url} broke off its answer ({error or type(error).__name__})", again=True
            ) from None
        return self._read(urlsplit(address).path, status, data, named)

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            key = os.environ.get(self._key, "") if self._key else ""
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE), headers=headers
            )
        return self._http

    def _read(self, path: str, status: int, data: bytes, named: str) -> dict[str, Any]:
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = None
        if status == 200 and isinstance(found, dict):
            return found
        said = _said(found, data)
        where = f"the server at {self.url}"
        if status in AGAIN:
            pause = float(named) if named.isdecimal() else None
            raise RequestFailedError(f"{where} cannot answer now ({status}: {said})", again=True, pause=pause)
        if status in (401, 403):
            variable = f"what is in {self._key}" if self._key else "a request without a key"
            if status == 403:
                raise ConfigError(f"{where} does not allow {variable} to use {path} ({said})")
            raise ConfigError(f"{where} does not take {variable} ({status}: {said}); name the variable in engine.key")
        if status == 404:
            hint = "" if path.startswith("/v1/") else "; the address ends in /v1 as a rule"
            raise ConfigError(f"{where} has no {path} or no such model ({said}){hint}")
        if status == 200:
            raise EngineError(f"{where} does not answer as an OpenAI-compatible server does: {said!r}")
        raise EngineError(f"{where} refuses a request ({status}: {said})")


def _said(found: object, data: bytes) -> str:
    """A server's own words on an error, in one line."""
    told = found.get("error", found.get("message", found.get("detail"))) if isinstance(found, dict) else None
    if isinstance(told, dict):
        told = told.get("message")
    text = told if isinstance(told, str) else data.decode(errors="replace")
    line = " ".join(text.split())
    return line if len(line) <= _TOLD else f"{line[:_TOLD]}..."
