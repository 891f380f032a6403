"""Dialect of SGLang, which uses /generate with ids in and out, and reloads weights from a folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnstile.engines.remote.dialects.base import Connection, RawCompletion, parse_tokens
from turnstile.engines.remote.weights import PublishedWeights
from turnstile.errors import ConfigError, EngineError
from turnstile.types import I32, Sampling


class SGLangDialect:
    """Dialect of SGLang, which draws with its own random numbers and ignores a request's seed."""

    logprobs_are_masked = True

    async def prepare(self, server: Connection) -> None:
        """Do nothing, since no state outlives a request."""

    async def complete(
        self, server: Connection, model: str, prompt_ids: I32, sampling: Sampling, session: str = ""
    ) -> RawCompletion | None:
        """Sample via /generate. Raises ConfigError for a grammar, which SGLang does not support."""
        params: dict[str, Any] = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "stop": list(sampling.stop),
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        if sampling.regex:
            params["regex"] = sampling.regex
        if sampling.grammar:
            raise ConfigError("SGLang does not support grammars in Lark's notation; use sampling.regex")
        body = {"input_ids": prompt_ids.tolist(), "sampling_params": params, "return_logprob": True}
        raw = (await server.post("/generate", body, root=True, session=session)).get("meta_info")
        listed = raw.get("output_token_logprobs") if isinstance(raw, Mapping) else None
        if not isinstance(raw, Mapping) or not isinstance(listed, list):
            return None
        if not all(isinstance(each, list) and len(each) >= 2 for each in listed):
            return None
        pairs = parse_tokens([each[1] for each in listed], [each[0] for each in listed])
        if pairs is None:
            return None
        end, label = raw.get("finish_reason"), raw.get("weight_version")
        return RawCompletion(
            ids=pairs[0],
            logprobs=pairs[1],
            finish=end.get("type") if isinstance(end, Mapping) else end,
            labels=[label] * len(pairs[0]) if isinstance(label, str) else None,
        )

    async def load(self, server: Connection, weights: PublishedWeights) -> None:
        """Reload weights from their folder.

        SGLang finishes requests under way first, so each completion has one version. Raises EngineError if the reload
        fails.
        """
        body = {"model_path": str(weights.folder), "weight_version": weights.label, "flush_cache": True}
        answer = await server.control("/update_weights_from_disk", body, root=True)
        if answer.get("success") is not True:
            raise EngineError(f"the server at {server.url} did not load {weights.folder} ({answer.get('message')})")
