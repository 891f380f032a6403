"""A server of OpenAI's and Anthropic's protocols in front of any engine, run by `turnstile serve`.

Paths: /v1/models; /v1/chat/completions; /v1/completions (a text or token ids); Anthropic's /v1/messages and
/v1/messages/count_tokens; /v1/weights; /health. With `return_token_ids`, answers in OpenAI's protocol hold the ids of
the sampled tokens and the weights that sampled them; with `logprobs`, their log-probabilities. With `stream` a
completion is sampled whole and then sent as events; until then the stream is kept alive. Settings that a request omits
are off, as in `types.Sampling`, except that a missing seed is drawn. If a client disconnects, its request is cancelled.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from turnstile.agents.base import Scaffold
from turnstile.engines.base import Engine
from turnstile.engines.remote.endpoint import SESSION_HEADER
from turnstile.errors import MissingExtraError
from turnstile.gateway import anthropic, http, openai
from turnstile.gateway.reload import WeightReloader
from turnstile.gateway.requests import (
    ContextLengthError,
    NotServedError,
    RefusedError,
    SamplingBody,
    parse_body,
    parse_json_object,
)
from turnstile.gateway.shares import SessionShares
from turnstile.types import I32, Completion, Message, Sampling, ToolSpec

try:
    from sse_starlette import EventSourceResponse
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp
except ModuleNotFoundError as error:
    raise MissingExtraError("a model server", "remote") from error

DEFAULT_TOKENS = 256
"""`max_tokens` of a text completion that does not set it. A chat completion may fill the context."""
KEEP_ALIVE_SECONDS = 15.0  # seconds between two pings in a stream while its completion is being sampled


class TextCodec(Protocol):
    """The methods of a tokenizer that a server uses."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Return the token ids of a text."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str | list[str]:
        """Return the text of token ids."""
        ...


class EngineServer:
    """A server that offers `engine` under the name `model`.

    `scaffold` lays out conversations and reads tool calls, and `tokenizer` encodes texts. `context` limits the tokens
    of a prompt and its completion together. With a `token`, requests must carry it as their key; without one, requests
    from web pages are refused. With `reload`, clients may load other weights, as training does.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        model: str,
        scaffold: Scaffold,
        tokenizer: TextCodec,
        context: int,
        token: str = "",
        reload: WeightReloader | None = None,
    ) -> None:
        self._engine = engine
        self._model = model
        self._scaffold = scaffold
        self._tokenizer = tokenizer
        self._context = context
        self._reload = reload
        self._numbers = itertools.count()
        self._shares = SessionShares(engine)
        self._host_names = {"localhost", socket.gethostname().lower()}  # host names that requests may use
        routes = [
            Route("/health", http.answering(self._health)),
            Route("/v1/models", http.answering(self._models)),
            Route("/v1/chat/completions", http.answering(self._chat), methods=["POST"]),
            Route("/v1/completions", http.answering(self._completions), methods=["POST"]),
            Route("/v1/messages", http.answering(self._messages), methods=["POST"]),
            Route("/v1/messages/count_tokens", http.answering(self._count), methods=["POST"]),
            Route("/v1/weights", http.answering(self._weights), methods=["POST"]),
        ]
        handlers = {HTTPException: http.not_found, ClientDisconnect: http.disconnected}
        app = Starlette(routes=routes, exception_handlers=handlers)
        self.app: ASGIApp = http.Guard(app, token, self._host_names)

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[str]:
        """Serve at an address and yield its URL. Port 0 stands for any free port.

        Raises ConfigError if it cannot listen there.
        """
        self._host_names.add(host.lower())
        try:
            async with http.listening(self.app, host, port) as url:
                yield url
        finally:
            self._shares.close()

    async def _health(self, request: Request, data: bytes) -> Response:
        return Response()

    async def _models(self, request: Request, data: bytes) -> Response:
        about = {"id": self._model, "object": "model", "created": 0, "owned_by": "turnstile"}
        return JSONResponse({"object": "list", "data": [{**about, "max_model_len": self._context}]})

    async def _completions(self, request: Request, data: bytes) -> Response:
        body = self._for_this_model(parse_body(openai.CompletionBody, data))
        text = body.prompt
        ids = self._tokenizer.encode(text, add_special_tokens=False) if isinstance(text, str) else text
        prompt = np.array(ids, np.int32)
        sampling = body.sampling(self._limit(body, len(prompt), DEFAULT_TOKENS))
        head = openai.Head.of("cmpl", self._model)

        async def choices() -> tuple[list[dict[str, Any]], dict[str, int]]:
            found = await self._sample(request, prompt, sampling)
            return [
                {
                    "index": number,
                    "text": self._decode(one.token_ids.tolist()),
                    **self._details(one, body, openai.text_logprobs),
                    "finish_reason": one.finish,
                }
                for number, one in enumerate(found)
            ], openai.usage(len(prompt), found)

        if not body.stream:
            found, usage = await choices()
            return JSONResponse(head.body("text_completion", found, usage=usage))

        async def stream() -> AsyncIterator[dict[str, Any]]:
            found, usage = await choices()
            for choice in found:
                yield head.body("text_completion", [choice])
            if body.stream_options.include_usage:
                yield head.body("text_completion", [], usage=usage)

        return self._stream(request, stream(), done="[DONE]")

    async def _chat(self, request: Request, data: bytes) -> Response:
        body = self._for_this_model(parse_body(openai.ChatBody, data))
        messages, tools = body.conversation()
        prompt, sampling = self._prompt_and_sampling(body, messages, tools, body.response_format.grammar())
        offered = tools if body.tool_choice == "auto" else ()
        head = openai.Head.of("chatcmpl", self._model)

        async def choices() -> tuple[list[dict[str, Any]], dict[str, int]]:
            found = await self._sample(request, prompt, sampling)
            result = []
            for number, one in enumerate(found):
                message = self._read(one, offered, several=body.parallel_tool_calls)
                result.append(
                    {
                        "index": number,
                        "message": openai.message_fields(message),
                        **self._details(one, body, openai.chat_logprobs),
                        "finish_reason": "tool_calls" if message.tool_calls else one.finish,
                    }
                )
            return result, openai.usage(len(prompt), found)

        if not body.stream:
            found, usage = await choices()
            more = {"prompt_token_ids": prompt.tolist()} if body.return_token_ids else {}
            return JSONResponse(head.body("chat.completion", found, usage=usage, **more))

        async def stream() -> AsyncIterator[dict[str, Any]]:
            found, usage = await choices()
            for chunk in openai.chat_chunks(head, found):
                yield chunk
            if body.stream_options.include_usage:
                yield head.body("chat.completion.chunk", [], usage=usage)

        return self._stream(request, stream(), done="[DONE]")

    async def _messages(self, request: Request, data: bytes) -> Response:
        body = self._for_this_model(parse_body(anthropic.MessagesBody, data))
        messages, tools = body.conversation()
        prompt, sampling = self._prompt_and_sampling(body, messages, tools)
        offered = tools if body.tool_choice.type == "auto" else ()

        async def answer() -> dict[str, Any]:
            (one,) = await self._sample(request, prompt, sampling)
            message = self._read(one, offered, several=not body.tool_choice.disable_parallel_tool_use)
            return anthropic.answer(self._model, message, one, len(prompt))

        if not body.stream:
            return JSONResponse(await answer())

        async def stream() -> AsyncIterator[dict[str, Any]]:
            for event in anthropic.events(await answer()):
                yield event

        return self._stream(request, stream())

    async def _count(self, request: Request, data: bytes) -> Response:
        body = self._for_this_model(parse_body(anthropic.CountBody, data))
        return JSONResponse({"input_tokens": len(self._scaffold.renderer.prompt(*body.conversation()))})

    async def _weights(self, request: Request, data: bytes) -> Response:
        if self._reload is None:
            raise NotServedError("this server does not load weights; start it with --weights-from to allow that")
        kind = request.headers.get("content-type", "").partition(";")[0]
        if kind != "application/json":
            raise RefusedError(f"the content type must be application/json, got {kind or 'none'}")
        body = parse_json_object(data)
        label, folder = body.get("version"), body.get("folder")
        if not isinstance(label, str) or not label or not isinstance(folder, str):
            raise RefusedError("weights need a folder and a version, both strings")
        await self._reload.load_folder(folder, label)
        return JSONResponse({"version": label})

    def _stream(self, request: Request, events: AsyncIterator[dict[str, Any]], *, done: str = "") -> Response:
        """Return a response that streams `events` and then `done`. An event that has a type is sent under that name.

        The head of the response is sent before anything is sampled, so an error is sent as an event, which ends the
        stream.
        """
        path = request.url.path

        async def stream() -> AsyncIterator[dict[str, str]]:
            try:
                async for event in events:
                    name = {"event": event["type"]} if "type" in event else {}
                    yield {**name, "data": json.dumps(event)}
            except Exception as error:
                yield {"event": "error", "data": json.dumps(http.error_fields(path, *http.explain(error, path)))}
                return
            if done:
                yield {"data": done}

        return EventSourceResponse(stream(), ping=KEEP_ALIVE_SECONDS)

    def _prompt_and_sampling(
        self, body: SamplingBody, messages: Sequence[Message], tools: Sequence[ToolSpec], grammar: str = ""
    ) -> tuple[I32, list[Sampling]]:
        """Return the prompt of a conversation, and the settings with which each next message is sampled."""
        renderer = self._scaffold.renderer
        prompt = renderer.prompt(messages, tools)
        limit = self._limit(body, len(prompt), self._context)
        return prompt, body.sampling(limit, stop=renderer.stop, grammar=grammar)

    def _for_this_model(self, body: Any) -> Any:
        """Return `body` if it asks for this server's model. Raises NotServedError if it asks for another."""
        if body.model != self._model:
            raise NotServedError(f"model {body.model!r} is not served here; use {self._model!r}")
        return body

    def _limit(self, body: SamplingBody, prompt: int, default: int) -> int:
        """Return how many tokens may be sampled after a prompt of `prompt` tokens.

        Raises ContextLengthError if the context has no room for them.
        """
        room, wanted = self._context - prompt, body.limit()
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens, more than the model's context of {self._context}"
            )
        if wanted is not None and wanted > room:
            raise ContextLengthError(f"max_tokens = {wanted} exceeds the context, which has room for {room}")
        return min(default, room) if wanted is None else wanted

    async def _sample(self, request: Request, prompt: I32, samplings: Sequence[Sampling]) -> list[Completion]:
        """Return a completion for each of `samplings`. If one fails, the others are cancelled."""
        group = request.headers.get(SESSION_HEADER, "")
        share = self._shares.keep(group) if group else f"serve/{next(self._numbers)}"
        try:
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(self._sample_one(prompt, sampling, share)) for sampling in samplings]
        except* Exception as failed:
            raise failed.exceptions[0] from None
        return [one.result() for one in asked]

    async def _sample_one(self, prompt: I32, sampling: Sampling, share: str) -> Completion:
        session = self._engine.open(share)
        try:
            return await self._engine.generate(prompt, sampling, session)
        finally:
            self._engine.close(session)

    def _read(self, completion: Completion, tools: Sequence[ToolSpec], *, several: bool) -> Message:
        """Return the sampled message, with only its first tool call unless `several` are allowed.

        A text without reasoning or calls is left as it is.
        """
        text = self._scaffold.renderer.text(completion.token_ids)
        message = self._scaffold.parser.parse(text, tools)
        if not several:
            message = replace(message, tool_calls=message.tool_calls[:1])
        return message if message.tool_calls or message.reasoning is not None else replace(message, content=text)

    def _details(self, completion: Completion, body: Any, logprobs: Callable[..., Any]) -> dict[str, Any]:
        """Return what a request wants to know about the sampled tokens."""
        found: dict[str, Any] = {"logprobs": None}
        if body.wants_logprobs:
            found["logprobs"] = logprobs(completion, lambda token: self._decode([token]))
        if body.return_token_ids:
            found |= openai.token_fields(completion, self._reload.labels if self._reload else {})
        return found

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))
