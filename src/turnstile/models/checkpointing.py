"""Activation checkpointing: only the input of each decoder layer is kept for the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel


@contextmanager
def checkpoint_layers(model: PreTrainedModel, *, enabled: bool = True) -> Iterator[None]:
    """Let layers that run inside recompute their activations in the backward pass, inside or later.

    The switch of transformers works in training mode only; models stay in evaluation mode here.
    """
    layers = decoder_layers(model) if enabled else []
    try:
        for layer in layers:
            recomputed = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
            vars(layer)["forward"] = recomputed
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers, whatever their name in the family."""
    count = model.config.get_text_config().num_hidden_layers
    stacks = [child for child in model.get_decoder().children() if isinstance(child, nn.ModuleList)]
    (layers,) = [stack for stack in stacks if len(stack) == count][:1] or [nn.ModuleList()]
    return list(layers)
