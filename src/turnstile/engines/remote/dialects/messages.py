"""Dialect for any server of messages, which takes conversations and returns texts (see `engines.text_codec`).

There are no log-probabilities, so the turns cannot be trained on.
"""

from __future__ import annotations

from collections.abc import Mapping

from turnstile.engines.remote.dialects.base import Connection, RawCompletion, constraints_of, only_choice
from turnstile.engines.remote.weights import PublishedWeights
from turnstile.engines.text_codec import END_ID, decode_messages, encode_text
from turnstile.errors import ConfigError, EngineError
from turnstile.types import I32, Sampling


class MessagesDialect:
    """Dialect of OpenAI's chat completions, which cannot load weights."""

    logprobs_are_masked = True

    async def prepare(self, server: Connection) -> None:
        """Do nothing, since no state outlives a request."""

    async def complete(
        self, server: Connection, model: str, prompt_ids: I32, sampling: Sampling, session: str = ""
    ) -> RawCompletion | None:
        """Sample via /chat/completions; the log-probabilities are 0.

        Raises ConfigError if the prompt does not consist of encoded messages.
        """
        try:
            messages = [{"role": role, "content": text} for role, text in decode_messages(prompt_ids)]
        except ValueError as error:
            raise ConfigError(f"engine.mode = 'text': {error}") from None
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
        }
        optional = {
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop": list(sampling.stop),
            "structured_outputs": constraints_of(sampling),
        }
        body |= {name: value for name, value in optional.items() if value}  # not every server knows these
        choice = only_choice((await server.post("/chat/completions", body)).get("choices"))
        message, finish = choice.get("message"), choice.get("finish_reason")
        text = message.get("content") if isinstance(message, Mapping) else None
        if text is None and isinstance(message, Mapping):
            text = ""  # the model returned nothing, or only reasoning
        if not isinstance(text, str):
            raise EngineError(f"the server at {server.url} answered a conversation without a message")
        ids = [*encode_text(text).tolist(), *([] if finish == "length" and text else [END_ID])]
        return RawCompletion(ids=ids, logprobs=[0.0] * len(ids), finish=finish)

    async def load(self, server: Connection, weights: PublishedWeights) -> None:
        """Raise ConfigError, since training needs ids and log-probabilities."""
        raise ConfigError("engine.mode = 'text' is for evaluation and judges; training needs ids: use 'tokens'")
