"""Any server of messages: a conversation goes there and a text comes back (see `engines.text_codec`), which has no
log-probabilities, so that nothing of it can be trained on."""

from __future__ import annotations

from collections.abc import Mapping

from turnstile.engines.remote.dialects.base import Answer, Connection, rules, the_one
from turnstile.engines.remote.weights import Weights
from turnstile.engines.text_codec import END, conversation, spelled
from turnstile.errors import ConfigError, EngineError
from turnstile.types import I32, Sampling


class Messages:
    """Obeys `engines.remote.dialects.base.Dialect`, and takes no weights."""

    masked = True

    async def prepare(self, server: Connection) -> None:
        """Nothing of it outlives a request."""

    async def ask(
        self, server: Connection, model: str, prompt_ids: I32, sampling: Sampling, session: str = ""
    ) -> Answer | None:
        try:
            messages = [{"role": role, "content": text} for role, text in conversation(prompt_ids)]
        except ValueError as error:
            raise ConfigError(f"engine.mode = 'text': {error}") from None
        told = {
            "model": model,
            "messages": messages,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
        }
        further = {
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop": list(sampling.stop),
            "structured_outputs": rules(sampling),
        }
        told |= {name: value for name, value in further.items() if value}  # not every server knows these
        choice = the_one((await server.post("/chat/completions", told)).get("choices"))
        message, finish = choice.get("message"), choice.get("finish_reason")
        text = message.get("content") if isinstance(message, Mapping) else None
        if text is None and isinstance(message, Mapping):
            text = ""  # a model that said nothing, or only thought
        if not isinstance(text, str):
            raise EngineError(f"the server at {server.url} answered a conversation without a message")
        ids = [*spelled(text).tolist(), *([] if finish == "length" and text else [END])]
        return Answer(ids=ids, logprobs=[0.0] * len(ids), finish=finish)

    async def load(self, server: Connection, weights: Weights) -> None:
        raise ConfigError("engine.mode = 'text' is for evaluation and judges; training needs ids: use 'tokens'")
