"""Any engine behind an address that speaks a part of OpenAI's protocol: `turnstile serve`.

/v1/models, /v1/completions (a text, or token ids; the ids of what was sampled with `return_token_ids` and by which
weights, their log-probabilities and entropies with `logprobs`), /v1/chat/completions, /v1/weights and /health. What a
request does not say is off, as in `types.Sampling`, but for the seed, which is drawn; one whose client goes away is
ended. Refused are `tools`, `stream`, `n` above 1 and messages of the role `tool`.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import itertools
import socket
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np

from turnstile.engines.base import Engine
from turnstile.engines.remote.endpoint import SESSION
from turnstile.errors import ConfigError, EngineError, MissingExtraError
from turnstile.gateway.reload import Reload, spans_of
from turnstile.gateway.requests import (
    NotServedError,
    RefusedError,
    as_object,
    read_message,
    read_sampling,
)
from turnstile.types import I32, Completion, Message, ToolSpec

try:
    from aiohttp import web
except ModuleNotFoundError as error:
    raise MissingExtraError("a model server", "remote") from error

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
TOKEN = "TURNSTILE_SERVE_TOKEN"
"""The environment variable that holds the key which clients must have."""
KEPT = 60.0  # seconds that what a session's requests have in common is kept after the last one
GROUPS = 256  # sessions of which it is kept; those asked for least recently go first
MOST = 64 << 20  # bytes of a request


class Words(Protocol):
    """What turns a conversation into a prompt and ids into an answer: a renderer."""

    stop: tuple[str, ...]

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> I32: ...

    def text(self, token_ids: I32) -> str: ...


class Letters(Protocol):
    """The part of a tokenizer that a server uses."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str | list[str]: ...


class EngineServer:
    """Serves `engine` under the name `model`. `words` lays out conversations, `tokenizer` reads texts; `context` is how
    many tokens a prompt and its answer may have. With a `token` requests must carry it as their bearer; without one
    those of web pages are refused. With `reload` clients may give it other weights, as training does."""

    def __init__(
        self,
        engine: Engine,
        *,
        model: str,
        words: Words,
        tokenizer: Letters,
        context: int,
        token: str = "",
        reload: Reload | None = None,
    ) -> None:
        self._engine = engine
        self._model = model
        self._words = words
        self._tokenizer = tokenizer
        self._context = context
        self._token = f"Bearer {token}".encode() if token else b""
        self._numbers = itertools.count()
        self._reload = reload
        self._groups: OrderedDict[str, tuple[str, float]] = OrderedDict()  # name -> what keeps it, and when last used
        self._forgetting: asyncio.TimerHandle | None = None
        self._names = {"localhost", socket.gethostname().lower()}  # that requests may be made to
        self.app = web.Application(client_max_size=MOST, middlewares=[self._guard])
        self.app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/weights", self._weights),
            ]
        )

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[str]:
        """Serve at an address, which this gives (port 0: a free one). Raises ConfigError where that cannot be had."""
        self._names.add(host.lower())
        runner = web.AppRunner(self.app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
        try:
            await runner.setup()
            try:
                await web.TCPSite(runner, host, port).start()
            except OSError as error:
                raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror or error}") from None
            found = runner.addresses[0]
            name = f"[{found[0]}]" if ":" in found[0] else found[0]
            yield f"http://{name}:{found[1]}/v1"
        finally:
            await runner.cleanup()
            self._forget(everything=True)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if self._token and request.path != "/health" and not hmac.compare_digest(given, self._token):
            return _refused(401, "the key is missing or wrong")
        if not self._token and (why := self._suspicious(request)):
            return _refused(403, why)
        try:
            return await handler(request)
        except RefusedError as error:
            return _refused(error.status, str(error))
        except ConfigError as error:
            return _refused(400, str(error))
        except EngineError as error:
            return _refused(503, str(error))

    def _suspicious(self, request: web.Request) -> str:
        """Why a request may come from a web page that somebody looks at on this machine, if it may: by what browsers
        add to it, or by a name that a page's own server could have given this machine's address."""
        if "Origin" in request.headers or request.headers.get("Sec-Fetch-Site", "none") != "none":
            return f"web pages are not served without a key; start the server with one in {TOKEN}"
        name = (urlsplit(f"//{request.host}").hostname or "").lower()
        if name in self._names or _is_address(name):
            return ""
        return f"without a key nothing is served by the name {name!r}; use an IP address, or a key in {TOKEN}"

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.Response()

    async def _models(self, request: web.Request) -> web.StreamResponse:
        one = {"id": self._model, "object": "model", "owned_by": "turnstile", "max_model_len": self._context}
        return web.json_response({"object": "list", "data": [one]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        asked = await self._asked(request)
        prompt = asked.get("prompt")
        if isinstance(prompt, str):
            ids = self._tokenizer.encode(prompt, add_special_tokens=False)
        elif isinstance(prompt, list) and all(type(x) is int and 0 <= x < 2**31 for x in prompt):
            ids = prompt
        else:
            raise RefusedError("prompt must be one text, or a list of token ids")
        found = await self._sample(np.array(ids, np.int32), asked, (), request.headers.get(SESSION, ""))
        choice: dict[str, Any] = {"index": 0, "finish_reason": found.finish, "text": self._decoded(found.token_ids)}
        if asked.get("logprobs") is not None:
            choice["logprobs"] = {
                "tokens": [self._decoded(found.token_ids[i : i + 1]) for i in range(len(found.token_ids))],
                "token_logprobs": found.logprobs.astype(float).tolist(),
            }
            if found.entropies is not None:
                choice["entropies"] = found.entropies.astype(float).tolist()
            if found.forced is not None:
                choice["forced"] = found.forced.tolist()
        if asked.get("return_token_ids"):
            choice["token_ids"] = found.token_ids.tolist()
            choice["weight_versions"] = spans_of(found.versions, self._reload.labels if self._reload else {})
        return self._answer("text_completion", choice, len(ids), found)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = await self._asked(request)
        if asked.get("tools"):
            raise RefusedError("tools are not served; say in a message how they are called")
        told = asked.get("messages")
        if not isinstance(told, list) or not told:
            raise RefusedError("messages must be a list of messages, one at least")
        prompt = self._words.prompt([read_message(item) for item in told], ())
        found = await self._sample(prompt, asked, self._words.stop)
        message = {"role": "assistant", "content": self._words.text(found.token_ids)}
        choice = {"index": 0, "finish_reason": found.finish, "message": message}
        return self._answer("chat.completion", choice, len(prompt), found)

    async def _weights(self, request: web.Request) -> web.StreamResponse:
        if self._reload is None:
            raise NotServedError(
                "this server keeps its weights; it takes others where it is started with --weights-from"
            )
        if request.content_type != "application/json":
            raise RefusedError(f"weights are named in application/json, and not in {request.content_type}")
        asked = as_object(await request.read())
        label, folder = asked.get("version"), asked.get("folder")
        if not isinstance(label, str) or not label or not isinstance(folder, str):
            raise RefusedError("weights are a folder, and a version that says which they are: both texts")
        await self._reload.take(folder, label)
        return web.json_response({"version": label})

    async def _asked(self, request: web.Request) -> dict[str, Any]:
        asked = as_object(await request.read())
        if asked.get("model") != self._model:
            raise RefusedError(f"the model {asked.get('model')!r} is not served here, {self._model!r} is")
        for name in ("stream", "echo"):
            if asked.get(name):
                raise RefusedError(f"{name} is not served")
        for name in ("n", "best_of"):
            if asked.get(name) not in (None, 1):
                raise RefusedError(f"{name} = {asked[name]} is not served; ask as often as you want answers")
        return asked

    async def _sample(
        self, prompt: I32, asked: Mapping[str, Any], stop: tuple[str, ...], group: str = ""
    ) -> Completion:
        sampling = read_sampling(asked, stop)
        room = self._context - len(prompt)
        if room < 1:
            raise RefusedError(f"the prompt has {len(prompt)} tokens, and the model's context is {self._context}")
        share = self._keep(group) if group else f"serve/{next(self._numbers)}"
        session = self._engine.open(share)
        try:
            if sampling.max_tokens > room:
                raise RefusedError(f"max_tokens = {sampling.max_tokens} leaves the context, which has room for {room}")
            return await self._engine.generate(prompt, sampling, session)
        finally:
            self._engine.close(session)

    def _keep(self, group: str) -> str:
        """Keeps what the requests of a group have in common until nobody has asked for a while."""
        share = f"group/{group}"
        held = self._groups.pop(group)[0] if group in self._groups else self._engine.open(share)
        self._groups[group] = held, time.monotonic()
        self._forget()
        return share

    def _forget(self, *, everything: bool = False) -> None:
        """Lets go of groups that nobody asked for in a while, and of those beyond the most; comes again while some are
        left."""
        if self._forgetting is not None:
            self._forgetting.cancel()
            self._forgetting = None
        old = time.monotonic() - KEPT
        while self._groups and (everything or len(self._groups) > GROUPS or next(iter(self._groups.values()))[1] < old):
            self._engine.close(self._groups.popitem(last=False)[1][0])
        if self._groups:
            self._forgetting = asyncio.get_running_loop().call_later(KEPT, self._forget)

    def _decoded(self, ids: I32) -> str:
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    def _answer(self, kind: str, choice: dict[str, Any], asked: int, found: Completion) -> web.StreamResponse:
        used = {"prompt_tokens": asked, "completion_tokens": len(found.token_ids)}
        body = {
            "id": f"turnstile-{next(self._numbers)}",
            "object": kind,
            "created": int(time.time()),
            "model": self._model,
            "choices": [choice],
            "usage": {**used, "total_tokens": sum(used.values())},
        }
        return web.json_response(body)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refused(status: int, why: str) -> web.StreamResponse:
    return web.json_response({"error": {"message": why, "type": "invalid_request_error"}}, status=status)
