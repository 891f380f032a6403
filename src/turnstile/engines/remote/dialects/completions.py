"""Dialect of OpenAI's completions with ids in and out, for `turnstile serve`, or vLLM from 0.10.2 in evaluation."""

from __future__ import annotations

from collections.abc import Mapping

from turnstile.engines.remote.dialects.base import Connection, RawCompletion, constraints_of, only_choice, parse_tokens
from turnstile.engines.remote.weights import PublishedWeights, labels_per_token
from turnstile.errors import ConfigError
from turnstile.types import I32, Sampling


class CompletionsDialect:
    """Dialect of OpenAI's completions, which can load weights into `turnstile serve` only."""

    logprobs_are_masked = False

    async def prepare(self, server: Connection) -> None:
        """Do nothing, since no state outlives a request."""

    async def complete(
        self, server: Connection, model: str, prompt_ids: I32, sampling: Sampling, session: str = ""
    ) -> RawCompletion | None:
        """Sample via /completions."""
        body = {
            "model": model,
            "prompt": prompt_ids.tolist(),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,  # also when off: vLLM replaces omitted settings with the model's own defaults
            "min_p": sampling.min_p,
            "seed": sampling.seed,
            "logprobs": 1,
            "return_token_ids": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        }
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if constraints := constraints_of(sampling):
            body["structured_outputs"] = constraints
        choice = only_choice((await server.post("/completions", body, session=session)).get("choices"))
        raw = choice.get("logprobs")
        logprobs = raw.get("token_logprobs") if isinstance(raw, Mapping) else None
        pairs = parse_tokens(choice.get("token_ids"), logprobs)
        if pairs is None:
            return None
        entropies, forced, count = choice.get("entropies"), choice.get("forced"), len(pairs[0])
        return RawCompletion(
            ids=pairs[0],
            logprobs=pairs[1],
            finish=choice.get("finish_reason"),
            entropies=entropies if isinstance(entropies, list) and len(entropies) == count else None,
            forced=forced if isinstance(forced, list) and len(forced) == count else None,
            labels=labels_per_token(choice.get("weight_versions"), count),
        )

    async def load(self, server: Connection, weights: PublishedWeights) -> None:
        """Load weights via /weights. Raises ConfigError if the server was not started for that."""
        try:
            await server.control("/weights", {"folder": str(weights.folder), "version": weights.label})
        except ConfigError as error:
            raise ConfigError(
                f"{error}; training loads weights into the server, so start turnstile serve with --weights-from"
            ) from None
