"""Sampling from a server: vLLM, `turnstile serve`, or anything else that speaks OpenAI's protocol.

With `mode = "tokens"` prompts are ids and what comes back are ids with their log-probabilities; a server that cannot
return these is refused. With `mode = "text"` prompts are messages and what comes back is text (see `engines.talk`): for
evaluation and for judges.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from turnstile.engines.endpoint import Endpoint
from turnstile.engines.talk import END, conversation, spelled
from turnstile.errors import ConfigError, EngineError
from turnstile.lookup import nearest
from turnstile.types import F32, I32, Completion, Finish, Sampling

CERTAIN = 1e-3  # the log-probability of the only token that may be drawn differs from 0 by no more
HEALTHY = 5.0  # seconds for a server to say that it is there


class OpenAIEngine:
    """Obeys `engines.base.Engine`: the model of that name at `url` (default: the only one it serves).

    `key` names the environment variable with the server's key. At most `concurrent` requests are under way; each try
    may take `timeout` seconds, and what the server could not answer is asked again up to `retries` times. With
    `training` a server is refused whose log-probabilities are not of the distribution sampled from.

    Raises ConfigError, at the first request, for a server that does not know the model or cannot do what the mode
    needs; EngineGoneError while it does not answer, and EngineError for an answer that cannot be used.
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
        self._exact = True  # whether log-probabilities are of the distribution sampled from, however that is cut
        self._sessions: set[str] = set()
        self._numbers = itertools.count()
        self._meeting: asyncio.Task[None] | None = None

    def open(self, share: str) -> str:
        session = f"{share}#{next(self._numbers)}"
        self._sessions.add(session)
        return session

    def close(self, session: str) -> None:
        self._sessions.remove(session)

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

    async def generate(self, prompt_ids: I32, sampling: Sampling, session: str) -> Completion:
        if session not in self._sessions:
            raise EngineError(f"session {session!r} is not open")
        if len(prompt_ids) == 0:
            raise EngineError("the prompt is empty")
        await self.meet(prompt_ids)
        cut = sampling.temperature != 1 or sampling.top_p < 1 or sampling.top_k or sampling.min_p
        if self._training and cut and not self._exact:
            raise ConfigError(
                f"the server at {self.endpoint.url} gives log-probabilities from before temperature and truncation, "
                "which training cannot use; start vLLM with --logprobs-mode processed_logprobs"
            )
        started = time.monotonic()
        found = await (self._tokens if self._mode == "tokens" else self._text)(prompt_ids, sampling)
        took = time.monotonic() - started
        self._count(len(prompt_ids), len(found[0]), took)
        ids, logprobs, finish = found
        return Completion(
            token_ids=ids,
            logprobs=logprobs,
            versions=np.zeros(len(ids), np.int32),
            sampling=sampling,
            finish=finish,
            seconds=took,
        )

    async def meet(self, prompt_ids: I32) -> None:
        """Finds out, once, what the server is and can do; `prompt_ids` is any prompt. Who comes meanwhile waits for the
        same answer. Raises as `generate`."""
        if self._meeting is None:
            self._meeting = asyncio.ensure_future(self._meet(prompt_ids))
        meeting = self._meeting
        try:
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
            await self._probe(prompt_ids)

    async def _probe(self, prompt_ids: I32) -> None:
        """One token that is certain, for what the server returns of it."""
        certain = Sampling(max_tokens=1, top_k=1)
        found = _sampled(_choice(await self.endpoint.post("/completions", self._request(prompt_ids, certain))))
        if found is None:
            raise ConfigError(
                f"the server at {self.endpoint.url} does not return the ids of sampled tokens with their "
                "log-probabilities, which training needs (vLLM 0.10.2 and `turnstile serve` do); for evaluation set "
                "engine.mode = 'text'"
            )
        self._exact = all(abs(value) <= CERTAIN for value in found[1])

    async def _tokens(self, prompt_ids: I32, sampling: Sampling) -> tuple[I32, F32, Finish]:
        choice = _choice(await self.endpoint.post("/completions", self._request(prompt_ids, sampling)))
        found = _sampled(choice)
        where = f"the server at {self.endpoint.url}"
        if found is None or not 0 < len(found[0]) <= sampling.max_tokens:
            raise EngineError(
                f"{where} did not return 1 to {sampling.max_tokens} token ids with a log-probability of at most 0 each"
            )
        ids, logprobs = found
        if sampling.temperature == 0:  # certain, whatever the logits are
            logprobs = [0.0] * len(ids)
        return np.array(ids, np.int32), np.minimum(np.array(logprobs, np.float32), 0), _finish(choice, where)

    def _request(self, prompt_ids: I32, sampling: Sampling) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt_ids.tolist(),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "logprobs": 1,
            "return_token_ids": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            **_further(sampling),
        }

    async def _text(self, prompt_ids: I32, sampling: Sampling) -> tuple[I32, F32, Finish]:
        try:
            messages = [{"role": role, "content": text} for role, text in conversation(prompt_ids)]
        except ValueError as error:
            raise ConfigError(f"engine.mode = 'text': {error}") from None
        told = {
            "model": self.model,
            "messages": messages,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            **_further(sampling),
        }
        choice = _choice(await self.endpoint.post("/chat/completions", told))
        message = choice.get("message")
        text = message.get("content") if isinstance(message, Mapping) else None
        where = f"the server at {self.endpoint.url}"
        if text is None and isinstance(message, Mapping):
            text = ""  # a model that said nothing, or only thought
        if not isinstance(text, str):
            raise EngineError(f"{where} answered a conversation without a message")
        finish = _finish(choice, where)
        ids = np.concatenate([spelled(text), np.array([END] if finish == "stop" or not text else [], np.int32)])
        return ids, np.zeros(len(ids), np.float32), finish

    def _count(self, asked: int, sampled: int, seconds: float) -> None:
        """A request is counted when it was answered, however often it was sent."""
        for name, value in (
            ("requests", 1),
            ("tokens_asked", asked),
            ("tokens_sampled", sampled),
            ("seconds", seconds),
        ):
            self.stats[name] += value


def _further(sampling: Sampling) -> dict[str, Any]:
    """What not every server knows is only said where it says something."""
    rules = {"regex": sampling.regex, "grammar": sampling.grammar}
    told = {
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop": list(sampling.stop),
        "structured_outputs": {name: text for name, text in rules.items() if text},
    }
    return {name: value for name, value in told.items() if value}


def _items(found: object) -> list[Mapping[str, Any]]:
    return [item for item in found if isinstance(item, Mapping)] if isinstance(found, list) else []


def _choice(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = _items(answer.get("choices"))
    if len(choices) != 1:
        raise EngineError(f"the server answered with {len(choices)} choices instead of one")
    return choices[0]


def _sampled(choice: Mapping[str, Any]) -> tuple[list[int], list[float]] | None:
    """The sampled ids and their log-probabilities, if there is one for each."""
    ids, held = choice.get("token_ids"), choice.get("logprobs")
    logprobs = held.get("token_logprobs") if isinstance(held, Mapping) else None
    if not isinstance(ids, list) or not isinstance(logprobs, list) or len(ids) != len(logprobs):
        return None
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        return None
    if not all(isinstance(x, int | float) and math.isfinite(x) and x <= CERTAIN for x in logprobs):
        return None
    return ids, [float(value) for value in logprobs]


def _finish(choice: Mapping[str, Any], where: str) -> Finish:
    match choice.get("finish_reason"):
        case "length":
            return "length"
        case "stop" | "tool_calls" | "eos":
            return "stop"
        case other:
            raise EngineError(f"{where} broke off ({other!r} is no end of a turn)")
