"""Sample from a server: vLLM, SGLang, `turnstile serve`, or any other that speaks OpenAI's protocol.

With `mode = "tokens"`, prompts are ids and completions are ids with log-probabilities; a server that cannot return
these is refused. With `mode = "text"`, which is for evaluation and judges, prompts are messages and completions are
texts (see `engines.text_codec`).
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

from turnstile.engines.remote.dialects.base import CERTAINTY_TOLERANCE, Dialect, RawCompletion, constraints_of
from turnstile.engines.remote.dialects.completions import CompletionsDialect
from turnstile.engines.remote.dialects.messages import MessagesDialect
from turnstile.engines.remote.dialects.sglang import SGLangDialect
from turnstile.engines.remote.dialects.vllm import VLLMDialect
from turnstile.engines.remote.downtime import track_downtime
from turnstile.engines.remote.endpoint import Endpoint
from turnstile.engines.remote.weights import PublishedWeights, versions_of
from turnstile.errors import ConfigError, EngineError, WeightsLostError
from turnstile.lookup import nearest
from turnstile.types import I32, Completion, Finish, Sampling

HEALTH_TIMEOUT = 5.0  # seconds for a health check
COLD_TEMPERATURE = 0.01  # a temperature at which practically only the likeliest token is drawn


class OpenAIEngine:
    """Samples from `model` (default: the only one) of the server at `url`; implements `engines.base.Engine`.

    `key` names the environment variable with the server's key. At most `concurrent` requests run at once; each attempt
    may take `timeout` seconds, and requests that the server could not answer are retried up to `retries` times. With
    `training`, the engine samples with the weights that `load` gave the server. It then refuses servers that do not
    report the weights of each token, or whose log-probabilities are not those of the distribution sampled from.

    Requests raise ConfigError for a server that does not know the model or cannot do what the mode needs;
    EngineGoneError while it is unreachable; RequestFailedError if it cannot answer them; WeightsLostError if it was
    restarted and lost its weights; and EngineError for an unusable response.
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
        self.context = 0  # tokens that the model can hold; 0 if the server does not report it
        self.stats = {"requests": 0.0, "tokens_asked": 0.0, "tokens_sampled": 0.0, "seconds": 0.0}
        self._mode = mode
        self._training = training
        self.loaded: PublishedWeights | None = None  # the weights that it samples with; None for the initial ones
        self._dialect: Dialect = MessagesDialect() if mode == "text" else CompletionsDialect()
        # Whether the server's log-probabilities include each.
        self._logprobs_include = {"temperature": True, "truncation": True}
        self._sessions: dict[str, str] = {}  # session -> the share that the server sees
        self._client_id = secrets.token_hex(4)  # the server may have other clients
        self._numbers = itertools.count()
        self._connecting: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """The server's address."""
        return self.endpoint.url

    def open(self, share: str) -> str:
        """Open a session and return its id."""
        session = f"{share}#{next(self._numbers)}"
        self._sessions[session] = f"{self._client_id}/{share}"
        return session

    def close(self, session: str) -> None:
        """Close a session."""
        del self._sessions[session]

    async def disconnect(self) -> None:
        """Close the connections to the server."""
        await self.endpoint.close()

    async def healthy(self) -> bool:
        """Return whether the server answers a health check now."""
        try:
            await self.endpoint.get("/models", seconds=HEALTH_TIMEOUT, retries=0)
        except EngineError:
            return False
        return True

    async def is_reachable(self, session: str) -> bool:
        """Return whether the server, which all sessions share, answers a health check now."""
        return await self.healthy()

    async def load(self, weights: PublishedWeights) -> None:
        """Make the server sample with `weights` from the next token on.

        Raises ConfigError for a server whose start options do not allow it, EngineGoneError or EngineError if the load
        fails.
        """
        self.loaded = None
        await self._dialect.load(self.endpoint, weights)
        self.loaded = weights

    def reset(self) -> None:
        """Forget what is known about the server, since another one may have taken its place while it was gone."""
        self._connecting = self.loaded = None

    async def generate(self, prompt_ids: I32, sampling: Sampling, session: str) -> Completion:
        """Sample a completion. Raises the errors listed for the class."""
        if session not in self._sessions:
            raise EngineError(f"session {session!r} is not open")
        if len(prompt_ids) == 0:
            raise EngineError("the prompt is empty")
        await self.connect(prompt_ids)
        if self._training:
            self._check_sampling(sampling)
        started, loaded = time.monotonic(), self.loaded
        share = self._sessions[session]
        answer = await self._dialect.complete(self.endpoint, self.model, prompt_ids, sampling, share)
        completion = self._completion(answer, sampling, time.monotonic() - started, loaded)
        self._count(len(prompt_ids), completion)
        return completion

    def _check_sampling(self, sampling: Sampling) -> None:
        """Raise ConfigError if training cannot use this server's log-probabilities for `sampling`."""
        where = f"the server at {self.endpoint.url}"
        random = sampling.temperature > 0  # otherwise every token is certain
        truncated = random and (sampling.top_p < 1 or sampling.top_k or sampling.min_p)
        for name, used in (("temperature", random and sampling.temperature != 1), ("truncation", truncated)):
            if used and not self._logprobs_include[name]:
                raise ConfigError(
                    f"{where} returns log-probabilities from before {name}, which training cannot use; start vLLM with "
                    "--logprobs-mode processed_logprobs, or sample with temperature 1 and no truncation"
                )
        if constraints_of(sampling) and self._dialect.logprobs_are_masked:
            raise ConfigError(
                f"{where} returns log-probabilities masked by a regex or a grammar, which training cannot use; "
                "sample without them, or from turnstile serve"
            )

    async def connect(self, prompt_ids: I32) -> None:
        """Find out, once, what kind of server it is and what it can do; `prompt_ids` is any prompt.

        Concurrent calls wait for the same result. Raises the errors of `generate`.
        """
        if self._connecting is None:
            self._connecting = asyncio.ensure_future(self._connect(prompt_ids))
        connecting = self._connecting
        if connecting.done() and not connecting.cancelled() and connecting.exception() is None:
            return
        try:
            with track_downtime(f"the server at {self.url} had not reported its abilities yet"):
                await asyncio.shield(connecting)
        finally:
            if (
                connecting.done()
                and (connecting.cancelled() or connecting.exception())
                and self._connecting is connecting
            ):
                self._connecting = None  # the next call tries again

    async def _connect(self, prompt_ids: I32) -> None:
        listed = await self.endpoint.get("/models")
        models = {str(item.get("id")): item for item in _mappings(listed.get("data"))}
        if not self.model and len(models) == 1:
            self.model = next(iter(models))
        if self.model not in models:
            problem = f"engine.model = {self.model!r} is none of" if self.model else "engine.model must name one of"
            raise ConfigError(
                f"{problem} the {len(models)} models at {self.endpoint.url}; {nearest(self.model, models)}"
            )
        self.context = int(models[self.model].get("max_model_len") or 0)
        if self._mode == "tokens":
            self._dialect = _dialect_of(str(models[self.model].get("owned_by")), training=self._training)
            await self._dialect.prepare(self.endpoint)
            await self._probe(prompt_ids)

    async def _probe(self, prompt_ids: I32) -> None:
        """Sample a token that is certain, and check what the server reports about it.

        Truncation is applied after temperature, so log-probabilities that include truncation include both. Raises
        ConfigError if the server does not report what the mode needs.
        """
        certain = Sampling(max_tokens=1, top_k=1)
        answer = await self._dialect.complete(self.endpoint, self.model, prompt_ids, certain)
        where = f"the server at {self.endpoint.url}"
        if answer is None:
            raise ConfigError(
                f"{where} does not return the ids of sampled tokens with their log-probabilities, which training "
                "needs (vLLM 0.10.2 and `turnstile serve` do); for evaluation set engine.mode = 'text'"
            )
        if self._training and answer.labels is None:
            raise ConfigError(
                f"{where} does not report the weights of each token, which training needs (vLLM 0.32, SGLang and "
                "`turnstile serve` do); it can be used for turnstile eval"
            )
        is_certain = _is_certain(answer)
        self._logprobs_include = {"temperature": is_certain, "truncation": is_certain}
        if self._training and not is_certain:
            cold_answer = await self._dialect.complete(
                self.endpoint, self.model, prompt_ids, replace(certain, top_k=0, temperature=COLD_TEMPERATURE)
            )
            self._logprobs_include["temperature"] = cold_answer is not None and _is_certain(cold_answer)

    def _completion(
        self, answer: RawCompletion | None, sampling: Sampling, seconds: float, loaded: PublishedWeights | None
    ) -> Completion:
        """Return the response as a turn's completion; `loaded` are the weights that the server had when it was asked.

        Raises EngineError if the response is unusable, WeightsLostError if the server has lost its weights.
        """
        where = f"the server at {self.endpoint.url}"
        if answer is None or not answer.ids or (self._mode == "tokens" and len(answer.ids) > sampling.max_tokens):
            raise EngineError(
                f"{where} did not return 1 to {sampling.max_tokens} token ids with a log-probability of at most 0 each"
            )
        finish, n = _finish_reason(answer.finish, where), len(answer.ids)
        logprobs = answer.logprobs if sampling.temperature else [0.0] * n  # at temperature 0 every token is certain
        try:
            has_versions = self._training or loaded is not None
            versions = versions_of(answer.labels, n, loaded, where) if has_versions else [0] * n
        except WeightsLostError:
            self.loaded = None if self.loaded is loaded else self.loaded
            raise
        return Completion(
            token_ids=np.array(answer.ids, np.int32),
            logprobs=np.minimum(np.array(logprobs, np.float32), 0),
            entropies=None if answer.entropies is None else np.array(answer.entropies, np.float32),
            forced=None if answer.forced is None else np.array(answer.forced, np.bool_),
            versions=np.array(versions, np.int32),
            sampling=sampling,
            finish=finish,
            seconds=seconds,
        )

    def _count(self, prompt_tokens: int, answer: Completion) -> None:
        """Count an answered request once, however often it was sent."""
        self.stats["requests"] += 1
        self.stats["tokens_asked"] += prompt_tokens
        self.stats["tokens_sampled"] += len(answer.token_ids)
        self.stats["seconds"] += answer.seconds


def _dialect_of(owner: str, *, training: bool) -> Dialect:
    """Return the dialect of a server by the owner of its model.

    For evaluation, older versions of vLLM suffice, which only have completions.
    """
    if owner == "sglang":
        return SGLangDialect()
    return VLLMDialect() if owner == "vllm" and training else CompletionsDialect()


def _is_certain(answer: RawCompletion) -> bool:
    return all(abs(value) <= CERTAINTY_TOLERANCE for value in answer.logprobs)


def _mappings(answer: object) -> list[Mapping[str, Any]]:
    return [item for item in answer if isinstance(item, Mapping)] if isinstance(answer, list) else []


def _finish_reason(reason: object, where: str) -> Finish:
    match reason:
        case "length":
            return "length"
        case "stop" | "tool_calls" | "eos":
            return "stop"
        case other:
            raise EngineError(f"{where} stopped a turn early (finish reason {other!r})")
