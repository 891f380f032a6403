"""vLLM for training: its ids in and out with the weights of each token, and its folder reload.

The paths that give it weights are there when it was started with VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnstile.engines.dialects.base import Answer, Connection, rules, sampled, the_one
from turnstile.engines.weights import AS_IT_CAME, Weights, spread
from turnstile.errors import ConfigError, EngineError
from turnstile.types import I32, Sampling


class VLLM:
    """Obeys `engines.dialects.base.Dialect`."""

    masked = True

    async def ask(
        self, server: Connection, model: str, prompt_ids: I32, sampling: Sampling, session: str = ""
    ) -> Answer | None:
        params: dict[str, Any] = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": sampling.seed,
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "logprobs": 0,  # of the sampled token alone
        }
        if held := rules(sampling):
            params["structured_outputs"] = held
        body = {"model": model, "token_ids": prompt_ids.tolist(), "sampling_params": params}
        choice = the_one((await server.post("/inference/v1/generate", body, root=True, session=session)).get("choices"))
        told = choice.get("logprobs")
        content = told.get("content") if isinstance(told, Mapping) else None
        if not isinstance(content, list) or not all(isinstance(each, Mapping) for each in content):
            return None
        found = sampled(choice.get("token_ids"), [each.get("logprob") for each in content])
        if found is None or found[0] != [each.get("token_id") for each in content]:
            return None
        return Answer(
            ids=found[0],
            logprobs=found[1],
            finish=choice.get("finish_reason"),
            labels=spread(choice.get("weight_versions"), len(found[0])),
        )

    async def load(self, server: Connection, weights: Weights) -> None:
        """Between two tokens: what is under way is held, and goes on from its tokens with the new weights."""
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(weights.folder)}}
        try:
            await server.control("/pause?mode=keep", {}, root=True)
            label = AS_IT_CAME[1]  # what is sampled after a reload that failed is nobody's
            try:
                await server.control("/collective_rpc", reload, root=True)
                found = await server.control("/reset_prefix_cache?reset_running_requests=true", {}, root=True)
                if found.get("success") is False:
                    raise EngineError(f"the server at {server.url} keeps what it computed with other weights")
                label = weights.label
            finally:
                await server.control("/update_weight_version", {"new_version": label}, root=True)
                await server.control("/resume", {}, root=True)
        except ConfigError as error:
            raise ConfigError(
                f"{error}; training gives a server its weights, which vLLM takes where it is started with "
                "VLLM_SERVER_DEV_MODE=1 (0.32 does; older ones lack /update_weight_version)"
            ) from None
