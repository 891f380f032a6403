"""Choose the trainable parameters: all, those of the last layers, or low-rank adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from turnstile.errors import ConfigError, MissingExtraError
from turnstile.models.checkpointing import decoder_layers
from turnstile.models.lora import compute_in_place


def choose_trainable(
    model: PreTrainedModel,
    train: Literal["all", "top", "lora"],
    *,
    top_layers: int = 0,
    lora_rank: int = 16,
    lora_alpha: int = 32,
) -> list[nn.Parameter]:
    """Mark the trainable parameters and return them in a fixed order.

    `top` trains the last `top_layers` decoder layers and the final norm; embeddings and the layers below are frozen,
    and their backward pass is never run. `lora` adds adapters of rank `lora_rank`, in place, to every linear layer of
    the decoder, or of its last `top_layers` if that is not 0 (Hu et al., arXiv 2106.09685). Adapters are in at least
    float32 even if the weights are in lower precision, in which an optimiser's small steps would be lost. Raises
    ConfigError if the model does not have `top_layers` layers, MissingExtraError without peft.
    """
    if train == "all":
        model.requires_grad_(True)
    elif train == "top":
        model.requires_grad_(False)
        for layer in _last_layers(model, top_layers, "take 1 to that"):
            layer.requires_grad_(True)
        for child in model.get_decoder().children():
            if "norm" in type(child).__name__.lower():
                child.requires_grad_(True)
    else:
        layers = _last_layers(model, top_layers, "take 0 for all, or 1 to that") if top_layers else ()
        _add_lora(model, lora_rank, lora_alpha, layers)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _last_layers(model: PreTrainedModel, count: int, advice: str) -> Sequence[nn.Module]:
    """Return the last `count` decoder layers. Raises ConfigError, ending with `advice`, for a wrong count."""
    layers = decoder_layers(model)
    if not 0 < count <= len(layers):
        raise ConfigError(f"model.top_layers = {count}: this model has {len(layers)} layers; {advice}")
    return layers[len(layers) - count :]


def _add_lora(model: PreTrainedModel, rank: int, alpha: int, layers: Sequence[nn.Module]) -> None:
    """Add adapters to all linear layers in `layers`, or in the whole decoder if it is empty; freeze the rest."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError:
        raise MissingExtraError("model.train = 'lora'", "lora") from None
    model.requires_grad_(False)
    torch.manual_seed(0)  # the adapters' initial weights must not depend on what ran before
    transposed = any(isinstance(layer, Conv1D) for layer in model.modules())  # GPT-2 stores its matrices transposed
    inside = {module for layer in layers for module in layer.modules()}
    chosen = [name for name, m in model.named_modules() if m in inside and isinstance(m, (nn.Linear, Conv1D))]
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=chosen or "all-linear", fan_in_fan_out=transposed)
    inject_adapter_in_model(config, model)
    for layer in model.modules():
        if _is_adapted(layer) and is_linear(layer):
            compute_in_place(layer)
    head = model.get_output_embeddings()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        parameter.requires_grad = "lora_" in name and not any(parameter is p for p in head.parameters())


def adapter_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the adapters' weights by name; {} for a model without adapters."""
    return {name: p.detach() for name, p in model.named_parameters() if "lora_" in name}


def merged_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the model's weights by their plain names, with adapters merged into their layers."""
    state = dict(model.state_dict())
    for prefix, module in model.named_modules():
        if _is_adapted(module):
            state[f"{prefix}.base_layer.weight"] = weight_of(module)
    return {name.replace(".base_layer.", "."): value for name, value in state.items() if "lora_" not in name}


def is_linear(layer: nn.Module) -> bool:
    """Return whether a layer is a plain linear layer, with or without adapters."""
    return type(layer.base_layer if _is_adapted(layer) else layer) is nn.Linear


def parameters_of(layer: nn.Module) -> list[nn.Parameter]:
    """Return all parameters of a layer, including its adapters'."""
    return list(layer.parameters())


def weight_of(layer: nn.Module) -> torch.Tensor:
    """Return the weight [out, in] of a linear layer, with its adapter added in the adapter's higher precision."""
    if not _is_adapted(layer):
        return cast(torch.Tensor, layer.weight).detach()
    base: torch.Tensor = cast(Any, layer).base_layer.weight.detach()
    delta: torch.Tensor = cast(Any, layer).get_delta_weight("default").detach()
    return base + delta


def bias_of(layer: nn.Module) -> torch.Tensor | None:
    """Return the bias [out] of a linear layer, or None if it has none."""
    bias: torch.Tensor | None = cast(Any, layer.base_layer if _is_adapted(layer) else layer).bias
    return None if bias is None else bias.detach()


def eps_of(norm: nn.Module) -> float | None:
    """Return the epsilon of a norm, None if it is not taken for an RMS norm or has no known epsilon.

    Any module with a weight that is not a LayerNorm is taken for one.
    """
    eps: float | None = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return eps if hasattr(norm, "weight") and not isinstance(norm, nn.LayerNorm) else None


def _is_adapted(layer: nn.Module) -> bool:
    return hasattr(layer, "base_layer") and hasattr(layer, "get_delta_weight")
