"""Which families may attend through layouts, and that nothing else changes for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from networks import FAMILIES, network, stock
from turnstile.errors import ConfigError
from turnstile.models.attention import NAME, use_layouts

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mistral", {"sliding_window": 16}, "window 16"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, "sliding_attention"),
    ("gemma2", {"head_dim": 8}, "sliding_attention, attn_logit_softcapping, window 4096"),
    ("gemma2", {"head_dim": 8, "layer_types": ["full_attention"] * 2, "sliding_window": None}, "softcapping"),
    ("mamba", {"state_size": 4}, "linear_attention"),
    ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}, "does not let transformers change how"),
    ("stablelm", {}, "does not let transformers change how"),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("family", "knobs", "why"), REFUSED)
def test_refuses_what_a_layout_cannot_say(family: str, knobs: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"model family '{family}' .*{why}.*; take one with full attention"):
        use_layouts(network(family, **knobs))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_call_is_as_before(family: str) -> None:
    model = network(family, dtype=torch.float64)
    plain = stock(model)
    use_layouts(model)
    use_layouts(model)  # again, as the engine and the learner both do
    assert model.config._attn_implementation == NAME
    tokens = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, plain(tokens).logits, rtol=0, atol=1e-10)


def test_a_padded_batch_is_refused() -> None:
    model = network()
    use_layouts(model)
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    with pytest.raises(ValueError, match="takes no attention mask"):
        model.get_decoder()(torch.tensor([[0, 5, 6], [5, 6, 7]]), attention_mask=mask[:, None, None].bool())
