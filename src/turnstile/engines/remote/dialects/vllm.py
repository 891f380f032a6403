"""Dialect of vLLM for training, with ids in and out, the weights of each token, and weight reloads from a folder.

The paths that load weights exist only if the server was started with VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from turnstile.engines.remote.dialects.base import Connection, RawCompletion, constraints_of, only_choice, parse_tokens
from turnstile.engines.remote.weights import INITIAL_LABELS, PublishedWeights, labels_per_token
from turnstile.errors import ConfigError, EngineError, EngineGoneError
from turnstile.types import I32, Sampling

_log = logging.getLogger(__name__)
RESUME_TIMEOUT = 30.0  # seconds in which a server must resume after a reload, even a cancelled one


class VLLMDialect:
    """Dialect of vLLM's token-level API."""

    logprobs_are_masked = True

    def __init__(self) -> None:
        self._packs_layers: bool | None = None  # None until known

    async def prepare(self, server: Connection) -> None:
        """Resume a server that was left paused.

        A trainer that is killed during a reload leaves the server paused, with weights that belong to no version.
        """
        try:
            paused = (await server.get("/is_paused", root=True)).get("is_paused")
        except ConfigError as error:
            raise _missing_feature_error(error) from None
        if paused is not False:
            _log.warning("the server at %s was left paused by a reload; resuming it", server.url)
            await _resume(server, INITIAL_LABELS[1])

    async def complete(
        self, server: Connection, model: str, prompt_ids: I32, sampling: Sampling, session: str = ""
    ) -> RawCompletion | None:
        """Sample via /inference/v1/generate."""
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
        if constraints := constraints_of(sampling):
            params["structured_outputs"] = constraints
        body = {"model": model, "token_ids": prompt_ids.tolist(), "sampling_params": params}
        response = await server.post("/inference/v1/generate", body, root=True, session=session)
        choice = only_choice(response.get("choices"))
        raw = choice.get("logprobs")
        content = raw.get("content") if isinstance(raw, Mapping) else None
        if not isinstance(content, list) or not all(isinstance(each, Mapping) for each in content):
            return None
        pairs = parse_tokens(choice.get("token_ids"), [each.get("logprob") for each in content])
        if pairs is None or pairs[0] != [each.get("token_id") for each in content]:
            return None
        return RawCompletion(
            ids=pairs[0],
            logprobs=pairs[1],
            finish=choice.get("finish_reason"),
            labels=labels_per_token(choice.get("weight_versions"), len(pairs[0])),
        )

    async def load(self, server: Connection, weights: PublishedWeights) -> None:
        """Reload weights between two tokens; requests under way are paused and continue with the new weights.

        Raises ConfigError for vLLM on a CPU if the trained output layer is tied to the embedding.
        """
        try:
            if self._packs_layers is None:
                self._packs_layers = await _is_on_cpu(server)
            if not (self._packs_layers and weights.head and weights.has_tied_head()):
                await _reload(server, weights)
                return
        except ConfigError as error:
            raise _missing_feature_error(error) from None
        raise ConfigError(
            f"the server at {server.url} is vLLM on a CPU, which does not reload an output layer that is tied to "
            "the embedding, as this model's is; train over turnstile serve, or with model.train = 'top' or 'lora'"
        )


def _missing_feature_error(error: ConfigError) -> ConfigError:
    """Return the error to raise for a vLLM server that lacks the paths that load weights."""
    return ConfigError(
        f"{error}; training loads weights into the server, so start vLLM with "
        "VLLM_SERVER_DEV_MODE=1 and --enable-scale-out (0.32 works; older versions lack /update_weight_version)"
    )


async def _is_on_cpu(server: Connection) -> bool:
    """Return whether vLLM runs on a CPU, where it packs its layers."""
    config = (await server.get("/server_info?config_format=json", root=True)).get("vllm_config")
    device = config.get("device_config") if isinstance(config, Mapping) else None
    return isinstance(device, Mapping) and device.get("device") == "cpu"


async def _reload(server: Connection, weights: PublishedWeights) -> None:
    """Pause the server, reload its weights, drop its prefix cache and resume it."""
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(weights.folder)}}
    await server.control("/pause?mode=keep", {}, root=True)
    label = INITIAL_LABELS[1]  # for tokens sampled after a failed reload
    try:
        await server.control("/collective_rpc", reload, root=True)
        answer = await server.control("/reset_prefix_cache?reset_running_requests=true", {}, root=True)
        if answer.get("success") is False:
            raise EngineError(f"the server at {server.url} could not drop values cached with other weights")
        label = weights.label
    finally:
        await _resume(server, label)


async def _resume(server: Connection, label: str) -> None:
    """Set the label of the weights and resume sampling.

    Raises EngineGoneError after RESUME_TIMEOUT seconds. A request's timeout would be too long, since a reload is
    usually cancelled because the server hangs.
    """
    try:
        async with asyncio.timeout(RESUME_TIMEOUT):
            await server.control("/update_weight_version", {"new_version": label}, root=True)
            await server.control("/resume", {}, root=True)
    except TimeoutError:
        raise EngineGoneError(f"the server at {server.url} did not resume {RESUME_TIMEOUT:g} s after reload") from None
