"""The sampling pass matches the model, fused where the family allows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import tiny_llama
from networks import FAMILIES, network
from turnstile.engines.local.cpu.decoder import CpuDecoder
from turnstile.engines.local.inference import Inference, _try_decoder
from turnstile.models.adapt import choose_trainable
from turnstile.models.attention import CausalLayout, forward_hidden, use_layouts
from turnstile.models.frozen_layers import capture_activations
from turnstile.models.head import project

TOKENS, POSITIONS = torch.arange(3, 20), torch.arange(17) + 90
LIKE_LLAMA = {"llama", "mistral", "qwen2", "qwen3", "smollm3"}


@torch.no_grad()
def both(model: torch.nn.Module, inference: Inference, keep: int = 0) -> None:
    """Compare the pass and its logits with the model's own."""
    with capture_activations(model, keep) as kept:
        plain = forward_hidden(model, TOKENS, POSITIONS, CausalLayout())
    found = inference.hidden(TOKENS, POSITIONS, CausalLayout(), keep)
    for one, other in zip(found, (plain, *kept), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(inference.logits(found[0]), project(model, plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_matches_the_model(family: str) -> None:
    model = network(family)
    use_layouts(model)
    inference = Inference(model)
    both(model, inference, keep=1 if hasattr(model.get_decoder(), "layers") else 0)
    assert (inference._decoder is not None) == (family in LIKE_LLAMA)


@pytest.mark.parametrize("change", [{"attention_bias": True, "mlp_bias": True}, {"hidden_act": "gelu"}])
def test_fuses_variants_of_llama(change: dict[str, object]) -> None:
    model = network("llama", **change)
    use_layouts(model)
    inference = Inference(model)
    both(model, inference)
    assert (inference._decoder is not None) == ("hidden_act" not in change)


@pytest.mark.parametrize(
    ("family", "change", "fused"),
    [
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, True),
        ("smollm3", {"num_hidden_layers": 4}, False),  # every fourth layer does not rotate
        ("glm4_moe", {"first_k_dense_replace": 2, "head_dim": 8, "pad_token_id": 0}, False),  # half of a head rotates
    ],
)
def test_fuses_supported_rotary_embeddings_only(family: str, change: dict[str, object], fused: bool) -> None:
    model = network(family, **change)
    use_layouts(model)
    inference = Inference(model)
    both(model, inference)
    assert (inference._decoder is not None) == fused


def test_other_dtypes_and_unpacked_models_run_unfused() -> None:
    for model, packed in ((network(dtype=torch.float64), True), (network(), False)):
        use_layouts(model)
        inference = Inference(model, packed=packed)
        both(model, inference)
        assert inference._decoder is None


def test_zero_embeddings_do_not_prevent_fusion() -> None:
    """Padding tokens have zero embeddings, and the first one's hidden state is zero."""
    model = tiny_llama(64)
    use_layouts(model)
    inference = Inference(model)
    both(model, inference)
    assert inference._decoder is not None


@pytest.mark.parametrize(("far", "near", "fused"), [(8, 0, True), (9, 0, False), (0, 1, False), (0, 0, True)])
def test_tolerance_of_the_fused_decoder(monkeypatch: pytest.MonkeyPatch, far: int, near: int, fused: bool) -> None:
    """A quarter of the tokens may be off by more than rounding, none by much."""
    model = network("llama")
    use_layouts(model)
    honest = CpuDecoder.hidden

    def hidden(self: CpuDecoder, *args: Any) -> list[Tensor]:
        (found,) = honest(self, *args)
        found[:far] *= 1.001
        found[:near] *= 1.02
        return [found]

    monkeypatch.setattr(CpuDecoder, "hidden", hidden)
    assert (_try_decoder(model) is not None) == fused


def learn(parameters: list[torch.nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.data.mul_(1.1)  # past the counter that changes in place raise


@pytest.mark.parametrize(("train", "layers"), [("all", 0), ("top", 1), ("lora", 0), ("lora", 1)])
def test_follows_trained_weights(train: str, layers: int) -> None:
    model = network()
    use_layouts(model)
    inference = Inference(model)
    both(model, inference)
    learning = choose_trainable(model, train, top_layers=layers, lora_rank=2)  # type: ignore[arg-type]
    for _ in range(2):
        learn(learning)
        inference.invalidate()
        both(model, inference, keep=1)
        assert inference._decoder is not None


def test_follows_replaced_parameters() -> None:
    """Including those of norms, which are multiplied into the next projection."""
    model = network()
    use_layouts(model)
    inference = Inference(model)
    both(model, inference)
    layer = model.get_decoder().layers[0]
    for module in (layer.input_layernorm, layer.post_attention_layernorm, layer.mlp.up_proj):
        module.weight = torch.nn.Parameter(2 * module.weight.detach())
        inference.invalidate()
        both(model, inference)
        assert inference._decoder is not None


@pytest.mark.parametrize(("family", "train"), [("llama", "all"), ("gemma", "all"), ("gemma", "lora")])
def test_computes_on_copies(family: str, train: str) -> None:
    """Also with adapters, and without a fused decoder."""
    model = network(family)
    use_layouts(model)
    choose_trainable(model, train)  # type: ignore[arg-type]
    inference = Inference(model)

    def found() -> Tensor:
        return inference.hidden(TOKENS, POSITIONS, CausalLayout())[0]

    before = found()
    projection = model.get_decoder().layers[0].mlp.up_proj
    projection = getattr(projection, "base_layer", projection)
    projection.weight.data.mul_(2)
    assert torch.equal(found(), before)
    projection.weight.requires_grad_(False).mul_(1)  # a change in place is seen without being told
    assert not torch.allclose(found(), before)
