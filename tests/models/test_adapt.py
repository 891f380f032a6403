"""Exactly the chosen parameters are trainable."""

from __future__ import annotations

import builtins
from typing import Any, Literal

import pytest
import torch

from networks import network, stock
from turnstile.errors import ConfigError, MissingExtraError
from turnstile.models.adapt import choose_trainable, merged_state


def learning(model: torch.nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_all() -> None:
    model = network()
    model.requires_grad_(False)
    chosen = choose_trainable(model, "all")
    assert [id(p) for p in chosen] == [id(p) for p in model.parameters()]
    assert learning(model) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("layers", [1, 2])
def test_top(layers: int) -> None:
    model = network()
    chosen = choose_trainable(model, "top", top_layers=layers)
    expected = {
        name for name, _ in model.named_parameters() if any(f".layers.{k}." in name for k in range(2 - layers, 2))
    }
    assert learning(model) == expected | {"model.norm.weight"}
    assert len(chosen) == len(expected) + 1


@pytest.mark.parametrize(("train", "layers"), [("top", 0), ("top", 3), ("lora", 3)])
def test_rejects_a_wrong_number_of_layers(train: Literal["top", "lora"], layers: int) -> None:
    advice = "take 0 for all, or 1 to that" if train == "lora" else "take 1 to that"
    with pytest.raises(ConfigError, match=f"model.top_layers = {layers}: this model has 2 layers; {advice}"):
        choose_trainable(network(), train, top_layers=layers)


def test_lora() -> None:
    model = network()
    plain = stock(model)
    chosen = choose_trainable(model, "lora", lora_rank=3, lora_alpha=6)
    found = learning(model)
    assert len(found) == len(chosen) == 2 * 2 * 7  # A and B for q, k, v, o, gate, up and down of two layers
    assert all("lora_" in name for name in found)
    assert {min(parameter.shape) for parameter in chosen} == {3}
    tokens = torch.arange(3, 12)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, plain(tokens).logits)  # at first adapters add nothing
    twin = network()
    torch.manual_seed(99)
    for one, other in zip(chosen, choose_trainable(twin, "lora", lora_rank=3, lora_alpha=6), strict=True):
        assert torch.equal(one, other)


def test_adapters_on_bfloat16_weights_are_in_float32_and_learn() -> None:
    """A step of 1e-6 is lost in bfloat16 weights of 0.01; the adapters' output is close to that on float32."""
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        model = network(dtype=dtype)
        chosen = choose_trainable(model, "lora", lora_rank=3)
        assert {parameter.dtype for parameter in chosen} == {torch.float32}
        for parameter in chosen:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        logits = model(torch.arange(3, 12)[None]).logits
        with torch.no_grad():
            again = model(torch.arange(3, 12)[None]).logits  # what is sampled is what is trained
            torch.testing.assert_close(again, logits, rtol=0, atol=0 if dtype == torch.bfloat16 else 1e-5)
        logits.float().square().mean().backward()
        before = [parameter.detach().clone() for parameter in chosen]
        torch.optim.SGD(chosen, lr=1e-6).step()
        found.append([parameter.grad for parameter in chosen])
        assert all((parameter != old).any() for parameter, old in zip(chosen, before, strict=True))
        learnt = merged_state(model)["model.layers.1.mlp.up_proj.weight"]
        for parameter in chosen:
            parameter.data *= 1 + 1e-4
        assert (merged_state(model)["model.layers.1.mlp.up_proj.weight"] != learnt).float().mean() > 0.5
    for low, full in zip(*found, strict=True):
        assert low is not None
        assert full is not None
        assert low.dtype == torch.float32
        assert torch.cosine_similarity(low.flatten(), full.flatten(), dim=0) > 0.9


def test_adapters_match_peft_and_its_gradients() -> None:
    """In float64, to rounding: logits, and the gradients of adapters and of their inputs."""
    given = torch.randn(2, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = []
    for ours in (True, False):
        model = network(dtype=torch.float64)
        for parameter in choose_trainable(model, "lora", lora_rank=3, lora_alpha=5):
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).double()
        if not ours:
            for layer in model.modules():
                if hasattr(layer, "base_layer"):
                    del layer.forward  # back to that of its class
        states = given.clone().requires_grad_()
        logits = model(inputs_embeds=states).logits
        logits.square().mean().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        assert None not in gradients.values()
        found.append({"logits": logits.detach(), "states": states.grad, **gradients})
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_merging_adapters_into_plain_weights() -> None:
    model = network()
    plain = stock(model)
    with torch.no_grad():
        for parameter in choose_trainable(model, "lora", lora_rank=2):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    merged = merged_state(model)
    assert merged.keys() == plain.state_dict().keys()
    tokens = torch.arange(3, 12)[None]
    with torch.no_grad():
        before = plain(tokens).logits.clone()
        plain.load_state_dict(merged)
        torch.testing.assert_close(model(tokens).logits, plain(tokens).logits, rtol=0, atol=1e-4)
    assert (plain(tokens).logits - before).abs().max() > 0.1


def test_lora_names_the_extra_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_peft(name: str, *rest: Any) -> Any:
        if name == "peft":
            raise ModuleNotFoundError("No module named 'peft'", name="peft")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_peft)
    with pytest.raises(MissingExtraError, match=r"model.train = 'lora' needs .*turnstile-rl\[lora\]"):
        choose_trainable(network(), "lora")
