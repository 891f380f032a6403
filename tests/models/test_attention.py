"""Which families may attend through layouts, and that nothing else changes for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from networks import FAMILIES, UNSHARED, network, random_rows, stock
from turnstile.batching.forest import pack_prefix_trees
from turnstile.batching.weights import token as token_weights
from turnstile.errors import ConfigError
from turnstile.models.attention import NAME, forward_forest, try_layouts, use_layouts


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("family", "knobs", "why"), UNSHARED)
def test_rejects_families_beyond_plain_attention(family: str, knobs: dict[str, Any], why: str) -> None:
    model = network(family, **knobs)
    before = model.config._attn_implementation
    with pytest.raises(ConfigError, match=f"model family '{family}' .*{why}.*; take one with full attention"):
        use_layouts(model)
    assert why in try_layouts(model)
    assert model.config._attn_implementation == before


def test_rejects_length_dependent_rope() -> None:
    model = network()
    model.config.rope_parameters = {"full_attention": {"rope_type": "longrope", "rope_theta": 1e4}}
    assert "rope_type 'longrope'" in try_layouts(model)


@pytest.mark.parametrize("argument", ["softcap", "s_aux", "sliding_window"])
def test_rejects_undeclared_attention_arguments(argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For future families: the arguments that reach attention are checked, not only the configuration."""
    model = network()
    attend = type(model.get_decoder().layers[0].self_attn).forward

    def asking(self: Any, *arguments: Any, **named: Any) -> Any:
        return attend(self, *arguments, **named, **({argument: 1.0} if self.layer_idx == 1 else {}))

    monkeypatch.setattr(type(model.get_decoder().layers[0].self_attn), "forward", asking)
    with pytest.raises(ConfigError, match=rf"model family 'llama' .*\({argument}\); take one with full attention"):
        use_layouts(model)
    assert model.config._attn_implementation != NAME


def test_stock_model_rejects_shared_rows() -> None:
    model, rows = network(), random_rows(5)
    (shared,) = pack_prefix_trees(rows, token_weights(rows), budget=1000)
    with pytest.raises(ValueError, match="cannot take rows that share tokens"):
        forward_forest(model, shared)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_call_is_unchanged(family: str) -> None:
    model = network(family, dtype=torch.float64)
    plain = stock(model)
    use_layouts(model)
    use_layouts(model)  # again, as the engine and the learner both do
    assert model.config._attn_implementation == NAME
    tokens = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, plain(tokens).logits, rtol=0, atol=1e-10)


def test_rejects_a_padded_batch() -> None:
    model = network()
    use_layouts(model)
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    with pytest.raises(ValueError, match="does not take an attention mask"):
        model.get_decoder()(torch.tensor([[0, 5, 6], [5, 6, 7]]), attention_mask=mask[:, None, None].bool())
