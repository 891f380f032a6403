"""vLLM for training: its ids in and out with the weights of each token, and its folder reload.

The paths that give it weights are there when it was started with VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from turnstile.engines.remote.dialects.base import Answer, Connection, rules, sampled, the_one
from turnstile.engines.remote.weights import AS_IT_CAME, Weights, spread
from turnstile.errors import ConfigError, EngineError, EngineGoneError
from turnstile.types import I32, Sampling

_log = logging.getLogger(__name__)
ENDING = 30.0  # seconds for a server to go on after a reload, or after one that was given up


class VLLM:
    """Obeys `engines.remote.dialects.base.Dialect`."""

    masked = True

    def __init__(self) -> None:
        self._packs: bool | None = None  # not known yet

    async def prepare(self, server: Connection) -> None:
        """A trainer that was killed in a reload has left the server paused, with nobody's weights; it would answer
        nothing from then on."""
        try:
            paused = (await server.get("/is_paused", root=True)).get("is_paused")
        except ConfigError as error:
            raise _unfit(error) from None
        if paused is not False:
            _log.warning("the server at %s was left paused in a reload; it goes on", server.url)
            await _go_on(server, AS_IT_CAME[1])

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
        try:
            packs = self._packs = await _is_on_cpu(server) if self._packs is None else self._packs
            if not (packs and weights.head and weights.tied()):
                await _reload(server, weights)
                return
        except ConfigError as error:
            raise _unfit(error) from None
        raise ConfigError(
            f"the server at {server.url} is vLLM on a CPU, whose reload does not renew an output layer that is tied to "
            "the embedding, as this model's is; train over turnstile serve, or with model.train = 'top' or 'lora'"
        )


def _unfit(error: ConfigError) -> ConfigError:
    return ConfigError(
        f"{error}; training gives a server its weights, which vLLM takes where it is started with "
        "VLLM_SERVER_DEV_MODE=1 and --enable-scale-out (0.32 does; older ones lack /update_weight_version)"
    )


async def _is_on_cpu(server: Connection) -> bool:
    """There vLLM packs its layers."""
    config = (await server.get("/server_info?config_format=json", root=True)).get("vllm_config")
    device = config.get("device_config") if isinstance(config, Mapping) else None
    return isinstance(device, Mapping) and device.get("device") == "cpu"


async def _reload(server: Connection, weights: Weights) -> None:
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(weights.folder)}}
    await server.control("/pause?mode=keep", {}, root=True)
    label = AS_IT_CAME[1]  # what is sampled after a reload that failed is nobody's
    try:
        await server.control("/collective_rpc", reload, root=True)
        found = await server.control("/reset_prefix_cache?reset_running_requests=true", {}, root=True)
        if found.get("success") is False:
            raise EngineError(f"the server at {server.url} keeps what it computed with other weights")
        label = weights.label
    finally:
        await _go_on(server, label)


async def _go_on(server: Connection, label: str) -> None:
    """With tokens of that label. One that hangs is not waited for as long as for an answer: who gives up a reload does
    so because of it."""
    try:
        async with asyncio.timeout(ENDING):
            await server.control("/update_weight_version", {"new_version": label}, root=True)
            await server.control("/resume", {}, root=True)
    except TimeoutError:
        raise EngineGoneError(f"the server at {server.url} did not go on within {ENDING:g} s of a reload") from None
