"""Model servers on loopback: this project's own over a tiny network, and bare ones that do as a test says."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from helpers import byte_tokenizer, tiny_llama
from turnstile.agents.base import Scaffold
from turnstile.agents.parsing.hermes import HermesParser
from turnstile.agents.renderer import ChatRenderer
from turnstile.engines.local.transformers import TransformersEngine
from turnstile.engines.remote.weights import PublishedWeights
from turnstile.engines.scripted import ScriptedEngine
from turnstile.gateway.reload import WeightReloader
from turnstile.gateway.server import EngineServer
from turnstile.trainer.checkpoint import load_weights
from turnstile.types import I32, Message, ToolCall

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def tiny_network(words: PreTrainedTokenizerBase, *, seed: int = 0) -> LlamaForCausalLM:
    """A random network whose tokens before matter, the same every time."""
    model = tiny_llama(len(words), context=4096, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    return model


def tiny_engine(
    words: PreTrainedTokenizerBase, *, deterministic: bool = True, model: PreTrainedModel | None = None
) -> TransformersEngine:
    """An engine of that network, or of `model`."""
    model = model or tiny_network(words)
    ends = [words.convert_tokens_to_ids("<|im_end|>")]
    return TransformersEngine(model, words, deterministic=deterministic, max_batch=4, pack_weights=False, stop_ids=ends)


class Script:
    """An engine that says one thing after the other, whoever asks, and keeps the prompts."""

    def __init__(self, *texts: str) -> None:
        self.prompts: list[I32] = []
        left = list(texts)

        def say(session: str, turn: int, prompt: I32) -> str:
            self.prompts.append(prompt)
            return left.pop(0)

        self.renderer = ChatRenderer(byte_tokenizer())
        self.engine = ScriptedEngine(self.renderer, say)


TWO_CALLS = Message(
    role="assistant",
    content="Let me see.",
    reasoning="Two sums.",
    tool_calls=(
        ToolCall(id="call00000", name="add", arguments={"a": 2, "b": 3}),
        ToolCall(id="call00001", name="add", arguments={"a": 4, "b": 5}),
    ),
)
"""A turn of two tool calls, and their results, as our own loop has them."""
RESULTS = (
    Message(role="tool", content="5", tool_call_id="call00000"),
    Message(role="tool", content="9", tool_call_id="call00001"),
)


def tiny_server(
    engine: Any = None, *, token: str = "", name: str = "tiny", reload: WeightReloader | None = None
) -> EngineServer:
    words = byte_tokenizer()
    return EngineServer(
        engine or tiny_engine(words),
        model=name,
        scaffold=Scaffold(ChatRenderer(words), HermesParser()),
        tokenizer=words,
        context=4096,
        token=token,
        reload=reload,
    )


def changing_server(below: Path) -> EngineServer:
    """One that takes weights from folders below this one."""
    words = byte_tokenizer()
    model = tiny_network(words)
    engine = tiny_engine(words, model=model)
    return tiny_server(engine, reload=WeightReloader(engine, functools.partial(load_weights, model), below))


def given(below: Path, version: int, *, owner: str = "me") -> PublishedWeights:
    """Weights in a folder of their own: those of one version are the same."""
    folder = below / f"{version:06d}"
    if not folder.exists():
        tiny_network(byte_tokenizer(), seed=version).save_pretrained(folder)
    return PublishedWeights(version=version, folder=folder, owner=owner, serial=version)


@asynccontextmanager
async def bare_server(answers: dict[str, Answer]) -> AsyncIterator[str]:
    """A server of the paths in `answers`, at the address that this gives."""
    app = web.Application()
    for path, answer in answers.items():
        app.router.add_route("*", path, answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def always(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status, headers=headers)

    return answer


def in_turn(*answers: Answer) -> Answer:
    """Each answer once, the last for ever; `in_turn(...).asked` counts."""
    left = list(answers)

    async def answer(request: web.Request) -> web.StreamResponse:
        return await (left.pop(0) if len(left) > 1 else left[0])(request)

    return answer


MODELS = always({"data": [{"id": "m"}]})


@contextmanager
def in_thread(serving: Callable[[], AbstractAsyncContextManager[str]]) -> Iterator[str]:
    """A server in a thread and an event loop of its own, for what has a loop itself; gives its address."""
    loop, ready, url = asyncio.new_event_loop(), threading.Event(), ""
    over = asyncio.Event()

    async def live() -> None:
        nonlocal url
        try:
            async with serving() as url:
                ready.set()
                await over.wait()
        finally:
            ready.set()

    thread = threading.Thread(target=loop.run_until_complete, args=(live(),))
    thread.start()
    ready.wait()
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()
