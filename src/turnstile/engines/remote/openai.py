"""Sampling from a server: vLLM, SGLang, `turnstile serve`, or anything else that speaks OpenAI's protocol.

With `mode = "tokens"` prompts are ids and what comes back are ids with their log-probabilities; a server that cannot
return these is refused. With `mode = "text"` prompts are messages and what comes back is text (see
`engines.text_codec`): for evaluation and for judges.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from turnstile.engines.remote.dialects.base import CERTAIN, Answer, Dialect, rules
from turnstile.engines.remote.dialects.completions import Completions
from turnstile.engines.remote.dialects.messages import Messages
from turnstile.engines.remote.dialects.sglang import SGLang
from turnstile.engines.remote.dialects.vllm import VLLM
from turnstile.engines.remote.downtime import losing
from turnstile.engines.remote.endpoint import Endpoint
from turnstile.engines.remote.weights import Weights, versions_of
from turnstile.errors import ConfigError, EngineError, WeightsLostError
from turnstile.lookup import nearest
from turnstile.types import I32, Completion, Finish, Sampling

HEALTHY = 5.0  # seconds for a server to say that it is there
COLD = 0.01  # a temperature at which hardly anything but the likeliest token is drawn


class OpenAIEngine:
    """Obeys `engines.base.Engine`: the model of that name at `url` (default: the only one it serves).

    `key` names the environment variable with the server's key. At most `concurrent` requests are under way; each try
    may take `timeout` seconds, and what the server could not answer is asked again up to `retries` times. With
    `training` it samples with the weights that `load` gave it, and a server is refused that does not say of which a
    token is, or whose log-probabilities are not of the distribution sampled from.

    Raises ConfigError, at the first request, for a server that does not know the model or cannot do what the mode
    needs; EngineGoneError while it cannot be reached, RequestFailedError for what it cannot answer, WeightsLostError
    where it was started again and lost the weights that it was given, and EngineError for an answer that cannot be
    used.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        mode: Literal["tokens", "text"] = "tokens",
        key: str = "OPENAI_API_KEY",
        concurrent: int = 64,
        timeout: float = 600.0,
        retries: int = 4,
        training: bool = False,
    ) -> None:
        if mode not in ("tokens", "text"):
            raise ConfigError(f"engine.mode = {mode!r} is not known; {nearest(str(mode), ('tokens', 'text'))}")
        if training and mode == "text":
            raise ConfigError("engine.mode = 'text' is for evaluation and judges; training needs ids: use 'tokens'")
        self.endpoint = Endpoint(url, key=key, concurrent=concurrent, timeout=timeout, retries=retries)
        self.model = model
        self.context = 0  # tokens that the model can hold, where the server says it
        self.stats = {"requests": 0.0, "tokens_asked": 0.0, "tokens_sampled": 0.0, "seconds": 0.0}
        self._mode = mode
        self._training = training
        self.loaded: Weights | None = None  # those that it samples with, where `load` gave it some
        self._dialect: Dialect = Messages() if mode == "text" else Completions()
        self._exact = {"temperature": True, "truncation": True}  # whether log-probabilities heed it
        self._sessions: dict[str, str] = {}  # name -> what its requests have in common with others
        self._own = secrets.token_hex(4)  # others may be clients of the server too
        self._numbers = itertools.count()
        self._meeting: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return self.endpoint.url

    def open(self, share: str) -> str:
        session = f"{share}#{next(self._numbers)}"
        self._sessions[session] = f"{self._own}/{share}"
        return session

    def close(self, session: str) -> None:
        del self._sessions[session]

    async def disconnect(self) -> None:
        """Closes the connections to the server."""
        await self.endpoint.close()

    async def healthy(self) -> bool:
        """Whether the server answers just now."""
        try:
            await self.endpoint.get("/models", seconds=HEALTHY, retries=0)
        except EngineError:
            return False
        return True

    async def answers(self, session: str) -> bool:
        """As `healthy`; all sessions have the one server."""
        return await self.healthy()

    async def load(self, weights: Weights) -> None:
        """Has the server sample with these weights from the next token on. Raises ConfigError for one that is not
        started so that it can, EngineGoneError and EngineError where it does not."""
        self.loaded = None
        await self._dialect.load(self.endpoint, weights)
        self.loaded = weights

    def renew(self) -> None:
        """The server was gone, and may be another one now."""
        self._meeting = self.loaded = None

    async def generate(self, prompt_ids: I32, sampling: Sampling, session: str) -> Completion:
        if session not in self._sessions:
            raise EngineError(f"session {session!r} is not open")
        if len(prompt_ids) == 0:
            raise EngineError("the prompt is empty")
        await self.meet(prompt_ids)
        if self._training:
            self._check(sampling)
        started, loaded = time.monotonic(), self.loaded
        share = self._sessions[session]
        found = await self._dialect.ask(self.endpoint, self.model, prompt_ids, sampling, share)
        completion = self._completion(found, sampling, time.monotonic() - started, loaded)
        self._count(len(prompt_ids), completion)
        return completion

    def _check(self, sampling: Sampling) -> None:
        """Raises ConfigError for sampling of which the server's log-probabilities are no use to a trainer."""
        where = f"the server at {self.endpoint.url}"
        drawn = sampling.temperature > 0  # else every token is certain
        cut = drawn and (sampling.top_p < 1 or sampling.top_k or sampling.min_p)
        for name, asked in (("temperature", drawn and sampling.temperature != 1), ("truncation", cut)):
            if asked and not self._exact[name]:
                raise ConfigError(
                    f"{where} gives log-probabilities from before {name}, which training cannot use; start vLLM with "
                    "--logprobs-mode processed_logprobs, or sample with temperature 1 and no truncation"
                )
        if rules(sampling) and self._dialect.masked:
            raise ConfigError(
                f"{where} gives log-probabilities of what a regex or a grammar left, which training cannot use; "
                "sample without, or from turnstile serve"
            )

    async def meet(self, prompt_ids: I32) -> None:
        """Finds out, once, what the server is and can do; `prompt_ids` is any prompt. Who comes meanwhile waits for the
        same answer. Raises as `generate`."""
        if self._meeting is None:
            self._meeting = asyncio.ensure_future(self._meet(prompt_ids))
        meeting = self._meeting
        if meeting.done() and not meeting.cancelled() and meeting.exception() is None:
            return
        try:
            with losing(f"the server at {self.url} had not said yet what it can do"):
                await asyncio.shield(meeting)
        finally:
            if meeting.done() and (meeting.cancelled() or meeting.exception()) and self._meeting is meeting:
                self._meeting = None  # the next one tries again

    async def _meet(self, prompt_ids: I32) -> None:
        listed = await self.endpoint.get("/models")
        models = {str(item.get("id")): item for item in _items(listed.get("data"))}
        if not self.model and len(models) == 1:
            self.model = next(iter(models))
        if self.model not in models:
            wanted = f"engine.model = {self.model!r} is none of" if self.model else "engine.model must name one of"
            raise ConfigError(
                f"{wanted} the {len(models)} models at {self.endpoint.url}; {nearest(self.model, models)}"
            )
        self.context = int(models[self.model].get("max_model_len") or 0)
        if self._mode == "tokens":
            self._dialect = _dialect_of(str(models[self.model].get("owned_by")), training=self._training)
            await self._dialect.prepare(self.endpoint)
            await self._probe(prompt_ids)

    async def _probe(self, prompt_ids: I32) -> None:
        """A token that is certain, for what the server returns of it. Truncation comes after temperature: where the
        first is heeded both are."""
        sure = Sampling(max_tokens=1, top_k=1)
        found = await self._dialect.ask(self.endpoint, self.model, prompt_ids, sure)
        where = f"the server at {self.endpoint.url}"
        if found is None:
            raise ConfigError(
                f"{where} does not return the ids of sampled tokens with their log-probabilities, which training "
                "needs (vLLM 0.10.2 and `turnstile serve` do); for evaluation set engine.mode = 'text'"
            )
        if self._training and found.labels is None:
            raise ConfigError(
                f"{where} does not say of which weights a token is, which training needs (vLLM 0.32, SGLang and "
                "`turnstile serve` do); it is good for turnstile eval"
            )
        heeded = _is_certain(found)
        self._exact = {"temperature": heeded, "truncation": heeded}
        if self._training and not heeded:
            cold = await self._dialect.ask(
                self.endpoint, self.model, prompt_ids, replace(sure, top_k=0, temperature=COLD)
            )
            self._exact["temperature"] = cold is not None and _is_certain(cold)

    def _completion(
        self, found: Answer | None, sampling: Sampling, seconds: float, loaded: Weights | None
    ) -> Completion:
        """The answer as a turn's, of a request that was made when the server had the weights `loaded`."""
        where = f"the server at {self.endpoint.url}"
        if found is None or not found.ids or (self._mode == "tokens" and len(found.ids) > sampling.max_tokens):
            raise EngineError(
                f"{where} did not return 1 to {sampling.max_tokens} token ids with a log-probability of at most 0 each"
            )
        finish, n = _finish(found.finish, where), len(found.ids)
        logprobs = found.logprobs if sampling.temperature else [0.0] * n  # certain, whatever the logits are
        try:
            known = self._training or loaded is not None
            versions = versions_of(found.labels, n, loaded, where) if known else [0] * n
        except WeightsLostError:
            self.loaded = None if self.loaded is loaded else self.loaded
            raise
        return Completion(
            token_ids=np.array(found.ids, np.int32),
            logprobs=np.minimum(np.array(logprobs, np.float32), 0),
            entropies=None if found.entropies is None else np.array(found.entropies, np.float32),
            forced=None if found.forced is None else np.array(found.forced, np.bool_),
            versions=np.array(versions, np.int32),
            sampling=sampling,
            finish=finish,
            seconds=seconds,
        )

    def _count(self, asked: int, found: Completion) -> None:
        """A request is counted when it was answered, however often it was sent."""
        self.stats["requests"] += 1
        self.stats["tokens_asked"] += asked
        self.stats["tokens_sampled"] += len(found.token_ids)
        self.stats["seconds"] += found.seconds


def _dialect_of(owner: str, *, training: bool) -> Dialect:
    """How a server is spoken to, by who it says it is. Older servers of vLLM do well for an evaluation."""
    if owner == "sglang":
        return SGLang()
    return VLLM() if owner == "vllm" and training else Completions()


def _is_certain(found: Answer) -> bool:
    return all(abs(value) <= CERTAIN for value in found.logprobs)


def _items(found: object) -> list[Mapping[str, Any]]:
    return [item for item in found if isinstance(item, Mapping)] if isinstance(found, list) else []


def _finish(reason: object, where: str) -> Finish:
    match reason:
        case "length":
            return "length"
        case "stop" | "tool_calls" | "eos":
            return "stop"
        case other:
            raise EngineError(f"{where} broke off ({other!r} is no end of a turn)")
