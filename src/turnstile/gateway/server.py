"""Server of a part of OpenAI's protocol in front of any engine: `turnstile serve`.

Paths: /v1/models; /v1/completions (a text or token ids; with `return_token_ids` the ids of the sampled tokens and the
weights that sampled them, with `logprobs` their log-probabilities and entropies); /v1/chat/completions; /v1/weights;
/health. Settings that a request omits are off, as in `types.Sampling`, except the seed, which is drawn. If a client
disconnects, its request is cancelled. Not supported: `tools`, `stream`, `n` above 1, and messages of the role `tool`.
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
from turnstile.engines.remote.endpoint import SESSION_HEADER
from turnstile.errors import ConfigError, EngineError, MissingExtraError
from turnstile.gateway.reload import WeightReloader, version_spans
from turnstile.gateway.requests import NotServedError, RefusedError, parse_json_object, parse_message, parse_sampling
from turnstile.types import I32, Completion, Message, ToolSpec

try:
    from aiohttp import web
except ModuleNotFoundError as error:
    raise MissingExtraError("a model server", "remote") from error

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
TOKEN_VARIABLE = "TURNSTILE_SERVE_TOKEN"
"""Environment variable with the key that clients must send."""
SHARE_SECONDS = 60.0  # seconds that the shared prefixes of a session are kept after its last request
MAX_SHARES = 256  # sessions whose shared prefixes are kept; the least recently used are dropped
MAX_BODY_BYTES = 64 << 20  # largest request


class ConversationEncoder(Protocol):
    """The part of a renderer that a server uses."""

    stop: tuple[str, ...]

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> I32:
        """Return the ids i32[n] of a conversation, up to where the assistant continues."""
        ...

    def text(self, token_ids: I32) -> str:
        """Return the text of sampled tokens."""
        ...


class TextCodec(Protocol):
    """The part of a tokenizer that a server uses."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Return the ids of a text."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str | list[str]:
        """Return the text of ids."""
        ...


class EngineServer:
    """Serves `engine` under the name `model`.

    `renderer` lays out conversations, `tokenizer` encodes texts; `context` limits the tokens of a prompt and its
    completion. With a `token`, requests must carry it as their bearer token; without one, requests from web pages are
    refused. With `reload`, clients may load other weights, as training does.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        model: str,
        renderer: ConversationEncoder,
        tokenizer: TextCodec,
        context: int,
        token: str = "",
        reload: WeightReloader | None = None,
    ) -> None:
        self._engine = engine
        self._model = model
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._context = context
        self._token = f"Bearer {token}".encode() if token else b""
        self._numbers = itertools.count()
        self._reload = reload
        # name -> (session that keeps the prefixes, time of last use)
        self._groups: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._expiry: asyncio.TimerHandle | None = None
        self._host_names = {"localhost", socket.gethostname().lower()}  # host names that requests may use
        self.app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
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
        """Serve at an address (port 0: any free port) and yield its URL. Raises ConfigError if it cannot."""
        self._host_names.add(host.lower())
        runner = web.AppRunner(self.app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
        try:
            await runner.setup()
            try:
                await web.TCPSite(runner, host, port).start()
            except OSError as error:
                raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror or error}") from None
            address = runner.addresses[0]
            name = f"[{address[0]}]" if ":" in address[0] else address[0]
            yield f"http://{name}:{address[1]}/v1"
        finally:
            await runner.cleanup()
            self._expire_shares(everything=True)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        authorization = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if self._token and request.path != "/health" and not hmac.compare_digest(authorization, self._token):
            return _error_response(401, "the key is missing or wrong")
        if not self._token and (why := self._web_page_reason(request)):
            return _error_response(403, why)
        try:
            return await handler(request)
        except RefusedError as error:
            return _error_response(error.status, str(error))
        except ConfigError as error:
            return _error_response(400, str(error))
        except EngineError as error:
            return _error_response(503, str(error))

    def _web_page_reason(self, request: web.Request) -> str:
        """Return why a request may come from a web page in a browser on this machine, or an empty string.

        Signs are headers that browsers add, and a host name that a page's own server could have pointed to this machine
        (DNS rebinding).
        """
        if "Origin" in request.headers or request.headers.get("Sec-Fetch-Site", "none") != "none":
            return f"web pages need a key; start the server with one in {TOKEN_VARIABLE}"
        name = (urlsplit(f"//{request.host}").hostname or "").lower()
        if name in self._host_names or _is_address(name):
            return ""
        return f"host name {name!r} needs a key; use an IP address, or start the server with a key in {TOKEN_VARIABLE}"

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.Response()

    async def _models(self, request: web.Request) -> web.StreamResponse:
        one = {"id": self._model, "object": "model", "owned_by": "turnstile", "max_model_len": self._context}
        return web.json_response({"object": "list", "data": [one]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._read_body(request)
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            ids = self._tokenizer.encode(prompt, add_special_tokens=False)
        elif isinstance(prompt, list) and all(type(x) is int and 0 <= x < 2**31 for x in prompt):
            ids = prompt
        else:
            raise RefusedError("prompt must be one text, or a list of token ids")
        completion = await self._sample(np.array(ids, np.int32), body, (), request.headers.get(SESSION_HEADER, ""))
        text = self._decode(completion.token_ids)
        choice: dict[str, Any] = {"index": 0, "finish_reason": completion.finish, "text": text}
        if body.get("logprobs") is not None:
            choice["logprobs"] = {
                "tokens": [self._decode(completion.token_ids[i : i + 1]) for i in range(len(completion.token_ids))],
                "token_logprobs": completion.logprobs.astype(float).tolist(),
            }
            if completion.entropies is not None:
                choice["entropies"] = completion.entropies.astype(float).tolist()
            if completion.forced is not None:
                choice["forced"] = completion.forced.tolist()
        if body.get("return_token_ids"):
            choice["token_ids"] = completion.token_ids.tolist()
            choice["weight_versions"] = version_spans(completion.versions, self._reload.labels if self._reload else {})
        return self._answer("text_completion", choice, len(ids), completion)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._read_body(request)
        if body.get("tools"):
            raise RefusedError("tools are not supported; describe them in a message")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise RefusedError("messages must be a list of at least one message")
        prompt = self._renderer.prompt([parse_message(item) for item in messages], ())
        completion = await self._sample(prompt, body, self._renderer.stop)
        message = {"role": "assistant", "content": self._renderer.text(completion.token_ids)}
        choice = {"index": 0, "finish_reason": completion.finish, "message": message}
        return self._answer("chat.completion", choice, len(prompt), completion)

    async def _weights(self, request: web.Request) -> web.StreamResponse:
        if self._reload is None:
            raise NotServedError("this server does not load weights; start it with --weights-from to allow that")
        if request.content_type != "application/json":
            raise RefusedError(f"the content type must be application/json, got {request.content_type}")
        body = parse_json_object(await request.read())
        label, folder = body.get("version"), body.get("folder")
        if not isinstance(label, str) or not label or not isinstance(folder, str):
            raise RefusedError("weights need a folder and a version, both strings")
        await self._reload.load_folder(folder, label)
        return web.json_response({"version": label})

    async def _read_body(self, request: web.Request) -> dict[str, Any]:
        body = parse_json_object(await request.read())
        if body.get("model") != self._model:
            raise RefusedError(f"model {body.get('model')!r} is not served here; use {self._model!r}")
        for name in ("stream", "echo"):
            if body.get(name):
                raise RefusedError(f"{name} is not supported")
        for name in ("n", "best_of"):
            if body.get(name) not in (None, 1):
                raise RefusedError(f"{name} = {body[name]} is not supported; send one request for each completion")
        return body

    async def _sample(self, prompt: I32, body: Mapping[str, Any], stop: tuple[str, ...], group: str = "") -> Completion:
        sampling = parse_sampling(body, stop)
        room = self._context - len(prompt)
        if room < 1:
            raise RefusedError(f"the prompt has {len(prompt)} tokens, more than the model's context of {self._context}")
        share = self._keep_share(group) if group else f"serve/{next(self._numbers)}"
        session = self._engine.open(share)
        try:
            if sampling.max_tokens > room:
                raise RefusedError(f"max_tokens = {sampling.max_tokens} exceeds the context, which has room for {room}")
            return await self._engine.generate(prompt, sampling, session)
        finally:
            self._engine.close(session)

    def _keep_share(self, group: str) -> str:
        """Return the share of a session, and keep its prefixes until it has been unused for a while."""
        share = f"group/{group}"
        guard_session = self._groups.pop(group)[0] if group in self._groups else self._engine.open(share)
        self._groups[group] = guard_session, time.monotonic()
        self._expire_shares()
        return share

    def _expire_shares(self, *, everything: bool = False) -> None:
        """Close shares that are expired or too many; runs again while some are left."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        old = time.monotonic() - SHARE_SECONDS
        while self._groups and (
            everything or len(self._groups) > MAX_SHARES or next(iter(self._groups.values()))[1] < old
        ):
            self._engine.close(self._groups.popitem(last=False)[1][0])
        if self._groups:
            self._expiry = asyncio.get_running_loop().call_later(SHARE_SECONDS, self._expire_shares)

    def _decode(self, ids: I32) -> str:
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    def _answer(
        self, kind: str, choice: dict[str, Any], prompt_tokens: int, completion: Completion
    ) -> web.StreamResponse:
        used = {"prompt_tokens": prompt_tokens, "completion_tokens": len(completion.token_ids)}
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


def _error_response(status: int, why: str) -> web.StreamResponse:
    return web.json_response({"error": {"message": why, "type": "invalid_request_error"}}, status=status)
