"""Which parameters learn: all of them, the last layers, or low-rank adapters."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from turnstile.errors import ConfigError, MissingExtraError


def choose_trainable(
    model: PreTrainedModel,
    train: Literal["all", "top", "lora"],
    *,
    top_layers: int = 0,
    lora_rank: int = 16,
    lora_alpha: int = 32,
) -> list[nn.Parameter]:
    """Marks what learns and returns it, in a fixed order.

    `top` trains the last `top_layers` decoder layers and the final norm; embeddings and the layers below are
    frozen, and since nothing below needs a gradient their backward pass is never run. `lora` adds adapters of
    rank `lora_rank` to every linear layer of the decoder, in place (Hu et al., arXiv 2106.09685).
    """
    if train == "all":
        model.requires_grad_(True)
    elif train == "top":
        layers: Any = model.get_decoder().layers
        if not 0 < top_layers <= len(layers):
            raise ConfigError(f"model.top_layers = {top_layers}: this model has {len(layers)} layers; take 1 to that")
        model.requires_grad_(False)
        for layer in layers[len(layers) - top_layers :]:
            layer.requires_grad_(True)
        norm = getattr(model.get_decoder(), "norm", None)
        if norm is not None:
            norm.requires_grad_(True)
    else:
        _add_lora(model, lora_rank, lora_alpha)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _add_lora(model: PreTrainedModel, rank: int, alpha: int) -> None:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError:
        raise MissingExtraError("model.train = 'lora'", "lora") from None
    model.requires_grad_(False)
    torch.manual_seed(0)  # the adapters' first weights must not depend on what ran before
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear"), model)
    head = model.get_output_embeddings()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "lora_" in name and not any(parameter is p for p in head.parameters())


def adapter_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The adapters' weights by name; {} for a model that has none."""
    return {name: p.detach() for name, p in model.named_parameters() if "lora_" in name}


def merged_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights by their plain names, adapters added into the layers they sit on."""
    state = dict(model.state_dict())
    for prefix, module in model.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "get_delta_weight"):
            name = f"{prefix}.base_layer.weight"
            state[name] = state[name] + module.get_delta_weight("default").to(state[name].dtype)
    return {name.replace(".base_layer.", "."): value for name, value in state.items() if "lora_" not in name}
