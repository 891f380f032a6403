"""Activation checkpointing keeps less memory and changes no gradient."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from networks import FAMILIES, distance, gradient, network, random_rows
from turnstile.batching.forest import pack_prefix_trees
from turnstile.batching.weights import token as token_weights
from turnstile.models.adapt import choose_trainable
from turnstile.models.attention import forward_forest, use_layouts
from turnstile.models.checkpointing import checkpoint_layers, decoder_layers


@pytest.mark.parametrize("family", FAMILIES)
def test_finds_decoder_layers_of_every_family(family: str) -> None:
    assert len(decoder_layers(network(family))) == 2


@pytest.mark.parametrize(("train", "layers"), [("all", 0), ("top", 2), ("lora", 0), ("lora", 2)])
def test_keeps_less_memory_and_the_same_gradients(train: Literal["all", "top", "lora"], layers: int) -> None:
    model = network(num_hidden_layers=4)
    use_layouts(model)
    choose_trainable(model, train, top_layers=layers)
    rows = random_rows(8)
    (batch,) = pack_prefix_trees(rows, token_weights(rows), budget=1000)

    def slopes(wanted: bool) -> tuple[dict[str, Tensor], int]:
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept[tensor.data_ptr()] = tensor.numel()
            return tensor

        with (
            checkpoint_layers(model, enabled=wanted),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            hidden = forward_forest(model, batch)
        amount = sum(kept.values())
        hidden.square().sum().backward()
        return gradient(model), amount

    (plain, much), (again, little) = slopes(False), slopes(True)
    assert max(distance({name: again[name] for name in plain}, plain)) < 1e-6
    assert little < much / 2
    assert all("forward" not in vars(layer) for layer in decoder_layers(model))
