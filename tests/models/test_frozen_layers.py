"""A pass that begins above the frozen layers matches the whole pass, where the family allows it."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from networks import FAMILIES, VOCABULARY, network, random_rows
from turnstile.batching.forest import pack_prefix_trees
from turnstile.batching.weights import token as token_weights
from turnstile.losses.reinforce import reinforce
from turnstile.models.adapt import adapter_state, choose_trainable
from turnstile.models.attention import CausalLayout, ForestLayout, forward_hidden, use_layouts
from turnstile.models.frozen_layers import capture_activations, count_frozen_layers, forward_above, forward_below
from turnstile.trainer.learner import Learner, LearnerConfig, Objective
from turnstile.trainer.optim import constant


@pytest.mark.parametrize(("top", "frozen"), [(1, 2), (2, 1), (3, 0)])
def test_counts_layers_below_the_first_trainable_one(top: int, frozen: int) -> None:
    model = network("qwen3", num_hidden_layers=3)
    use_layouts(model)
    choose_trainable(model, "top", top_layers=top)
    assert count_frozen_layers(model) == frozen


@pytest.mark.parametrize(("top", "frozen"), [(1, 2), (3, 0), (0, 0)])
def test_counts_layers_below_the_adapters(top: int, frozen: int) -> None:
    model = network("qwen3", num_hidden_layers=3)
    use_layouts(model)
    learns = choose_trainable(model, "lora", top_layers=top, lora_rank=2)
    assert count_frozen_layers(model) == frozen
    assert len(learns) == 2 * 7 * (top or 3)  # two matrices for each of a layer's seven
    assert all(".layers." in name and int(name.split(".layers.")[1][0]) >= frozen for name in adapter_state(model))


@pytest.mark.parametrize("train", ["top", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_in_every_mode(family: str, train: Literal["top", "lora"]) -> None:
    model = network(family)
    learns = choose_trainable(model, train, top_layers=1, lora_rank=2)
    plan = LearnerConfig(lr=1e-2, schedule=constant, warmup=0, total=1)
    learner, before = Learner(model, learns, plan), [one.detach().clone() for one in learns]
    report, _, _ = learner.update(random_rows(), Objective(loss=reinforce, aggregation=token_weights))
    assert report["optim/grad_norm"] > 0
    assert not all(torch.equal(one, other) for one, other in zip(learns, before, strict=True))
    if train == "top":
        norms = [name for name, one in model.named_parameters() if one.requires_grad and "layers.1" not in name]
        assert any("norm" in name or "ln_f" in name for name in norms)


def test_nothing_is_skipped_if_all_layers_train() -> None:
    model = network()
    use_layouts(model)
    choose_trainable(model, "all")
    assert count_frozen_layers(model) == 0
    adapted = network()
    use_layouts(adapted)
    choose_trainable(adapted, "lora")
    assert count_frozen_layers(adapted) == 0


def test_nothing_is_skipped_if_embeddings_are_scaled() -> None:
    model = network("granite")
    use_layouts(model)
    choose_trainable(model, "top", top_layers=1)
    assert count_frozen_layers(model) == 0


@pytest.mark.parametrize("layers", [1, 2])
def test_forward_above_matches_the_whole_pass(layers: int) -> None:
    model = network(num_hidden_layers=3, dtype=torch.float64)
    use_layouts(model)
    rows = random_rows(6)
    (batch,) = pack_prefix_trees(rows, token_weights(rows), budget=1000)
    layout = ForestLayout(batch)
    with torch.no_grad():
        with capture_activations(model, layers) as seen:
            whole = forward_hidden(model, batch.tokens, batch.positions, layout)
        above = forward_above(model, layers, seen[0], batch.positions, layout)
        assert len(seen) == 1
        assert torch.equal(above, whole)
        assert torch.equal(forward_below(model, layers, batch.tokens, batch.positions, layout), seen[0])
        assert len(model.get_decoder().layers) == 3
        forward_hidden(model, batch.tokens, batch.positions, layout)
    assert len(seen) == 1  # only what happens inside


def test_layers_are_restored_after_an_error() -> None:
    model = network()
    use_layouts(model)
    with pytest.raises(RuntimeError):
        forward_above(model, 1, torch.zeros(3, 7), torch.arange(3), CausalLayout())
    with pytest.raises(IndexError):
        forward_below(model, 1, torch.tensor([VOCABULARY]), torch.arange(1), CausalLayout())
    assert len(model.get_decoder().layers) == 2
    assert not any(layer._forward_hooks for layer in model.get_decoder().layers)


def test_capturing_zero_layers_keeps_nothing() -> None:
    model = network()
    use_layouts(model)
    with capture_activations(model, 0) as seen:
        forward_hidden(model, torch.arange(3), torch.arange(3), CausalLayout())
    assert seen == []
