"""SGLang: its own /generate, with ids in and out, and its reload from a folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnstile.engines.remote.dialects.base import Answer, Connection, sampled
from turnstile.engines.remote.weights import Weights
from turnstile.errors import ConfigError, EngineError
from turnstile.types import I32, Sampling


class SGLang:
    """Obeys `engines.remote.dialects.base.Dialect`. It draws by random numbers of its own, and not by a request's
    seed."""

    masked = True

    async def prepare(self, server: Connection) -> None:
        """Nothing of it outlives a request."""

    async def ask(
        self, server: Connection, model: str, prompt_ids: I32, sampling: Sampling, session: str = ""
    ) -> Answer | None:
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
            raise ConfigError("SGLang takes no grammar in Lark's notation; hold answers with sampling.regex")
        body = {"input_ids": prompt_ids.tolist(), "sampling_params": params, "return_logprob": True}
        told = (await server.post("/generate", body, root=True, session=session)).get("meta_info")
        tokens = told.get("output_token_logprobs") if isinstance(told, Mapping) else None
        if not isinstance(told, Mapping) or not isinstance(tokens, list):
            return None
        if not all(isinstance(each, list) and len(each) >= 2 for each in tokens):
            return None
        found = sampled([each[1] for each in tokens], [each[0] for each in tokens])
        if found is None:
            return None
        end, label = told.get("finish_reason"), told.get("weight_version")
        return Answer(
            ids=found[0],
            logprobs=found[1],
            finish=end.get("type") if isinstance(end, Mapping) else end,
            labels=[label] * len(found[0]) if isinstance(label, str) else None,
        )

    async def load(self, server: Connection, weights: Weights) -> None:
        """It waits for what is under way, so that an answer is of one version."""
        body = {"model_path": str(weights.folder), "weight_version": weights.label, "flush_cache": True}
        found = await server.control("/update_weights_from_disk", body, root=True)
        if found.get("success") is not True:
            raise EngineError(f"the server at {server.url} did not load {weights.folder} ({found.get('message')})")
