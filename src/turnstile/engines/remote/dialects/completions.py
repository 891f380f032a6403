"""OpenAI's completions with ids in and out: `turnstile serve`, and for evaluation vLLM from 0.10.2 on."""

from __future__ import annotations

from collections.abc import Mapping

from turnstile.engines.remote.dialects.base import Answer, Connection, rules, sampled, the_one
from turnstile.engines.remote.weights import Weights, spread
from turnstile.errors import ConfigError
from turnstile.types import I32, Sampling


class Completions:
    """Obeys `engines.remote.dialects.base.Dialect`; gives weights to `turnstile serve` alone."""

    masked = False

    async def prepare(self, server: Connection) -> None:
        """Nothing of it outlives a request."""

    async def ask(
        self, server: Connection, model: str, prompt_ids: I32, sampling: Sampling, session: str = ""
    ) -> Answer | None:
        body = {
            "model": model,
            "prompt": prompt_ids.tolist(),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,  # also where it is off: for what is not said vLLM takes a model's own defaults
            "min_p": sampling.min_p,
            "seed": sampling.seed,
            "logprobs": 1,
            "return_token_ids": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        }
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if held := rules(sampling):
            body["structured_outputs"] = held
        choice = the_one((await server.post("/completions", body, session=session)).get("choices"))
        told = choice.get("logprobs")
        logprobs = told.get("token_logprobs") if isinstance(told, Mapping) else None
        found = sampled(choice.get("token_ids"), logprobs)
        if found is None:
            return None
        entropies, forced, count = choice.get("entropies"), choice.get("forced"), len(found[0])
        return Answer(
            ids=found[0],
            logprobs=found[1],
            finish=choice.get("finish_reason"),
            entropies=entropies if isinstance(entropies, list) and len(entropies) == count else None,
            forced=forced if isinstance(forced, list) and len(forced) == count else None,
            labels=spread(choice.get("weight_versions"), count),
        )

    async def load(self, server: Connection, weights: Weights) -> None:
        try:
            await server.control("/weights", {"folder": str(weights.folder), "version": weights.label})
        except ConfigError as error:
            raise ConfigError(
                f"{error}; training gives a server its weights, which turnstile serve takes with --weights-from"
            ) from None
