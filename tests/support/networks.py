"""Tiny networks of many families for tests, and the same weights as transformers itself runs them."""

from __future__ import annotations

import copy
import io
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from turnstile.types import F32, Row

VOCABULARY = 40
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": None},
    "gemma": {"head_dim": 8},
    "phi": {},
    "phi3": {"pad_token_id": 0},
    "smollm3": {"pad_token_id": 0},
    "olmo2": {"pad_token_id": 0},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
}
"""Families whose layers are plain attention over positions, with what makes each tiny."""

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
}  # fmt: skip
UNSHARED: list[tuple[str, dict[str, Any], str]] = [
    ("mistral", {"sliding_window": 4}, "window 4"),
    ("phi3", {"sliding_window": 4, "pad_token_id": 0}, "window 4"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, "sliding_attention"),
    ("gemma2", {"head_dim": 8, "sliding_window": 4}, "sliding_attention, attn_logit_softcapping, window 4"),
    ("gemma3_text", {"head_dim": 8, "sliding_window": 4}, "sliding_attention"),
    ("gpt_oss", {"head_dim": 8, "num_local_experts": 4, "pad_token_id": 0, "sliding_window": 4}, "sliding_attention"),
    ("mamba", {"state_size": 4}, "linear_attention"),
    ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}, "does not let transformers change how"),
    ("llama", {"rope_parameters": DYNAMIC}, "rope_type 'dynamic'"),
    ("phi3", {"rope_parameters": LONG, "pad_token_id": 0}, "rope_type 'longrope'"),
    ("stablelm", {}, "does not let transformers change how"),
]
"""Families that cannot attend through layouts: (name, what makes it tiny, what is said of it)."""


def network(
    family: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0, **more: Any
) -> PreTrainedModel:
    """About 20,000 random weights, large enough that every token before matters; norms in full precision."""
    size: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    config = AutoConfig.for_model(family, **{**size, **FAMILIES.get(family, {}), **more})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            deviation = 0.2 if parameter.dim() > 1 else 0.05
            parameter.data += deviation * torch.randn(parameter.shape)
    return keep_precision(model.to(dtype))


def stock(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that attends as transformers does."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("sdpa")
    return twin


def keep_precision(model: PreTrainedModel) -> PreTrainedModel:
    """Its RMS norms computed in the network's own dtype; transformers casts to float32 whatever comes in."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            offset = 1.0 if "Gemma" in type(module).__name__ else 0.0
            module.forward = types.MethodType(_rms_norm(offset), module)
    return model


def _rms_norm(offset: float) -> Any:
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        eps = getattr(module, "variance_epsilon", None) or module.eps
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (offset + module.weight)

    return forward


def random_rows(
    count: int = 8, *, seed: int = 0, vocabulary: int = VOCABULARY, trunk: int = 6, private: int = 9
) -> list[Row]:
    """Rows that branch off from each other at random places; some tokens of each are trained."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for number in range(count):
        head = rng.integers(3, vocabulary, rng.integers(1, trunk + 1))
        if rows and rng.random() < 0.75:
            other = rows[rng.integers(len(rows))].token_ids
            head = other[: rng.integers(1, len(other) + 1)]
        tokens = np.concatenate([head, rng.integers(3, vocabulary, rng.integers(1, private + 1))])
        mask = rng.random(len(tokens)) < 0.6
        mask[0], mask[-1] = False, True
        rows.append(row_of(tokens, mask, rng=rng, origin=(f"g{number % 3}", number)))
    return rows


def row_of(
    tokens: Sequence[int] | np.ndarray,
    mask: Sequence[bool] | np.ndarray,
    *,
    rng: np.random.Generator,
    origin: tuple[str, int] = ("g", 0),
    temperature: float = 0.75,
) -> Row:
    """A row with random numbers where it is trained."""
    trained = np.asarray(mask, np.bool_)
    length = len(trained)
    return Row(
        token_ids=np.asarray(tokens, np.int32),
        loss_mask=trained,
        logprobs=np.where(trained, -3 * rng.random(length), 0).astype(np.float32),
        advantages=np.where(trained, rng.normal(size=length), 0).astype(np.float32),
        turn_ids=np.where(trained, np.arange(length) // 3, -1).astype(np.int32),
        versions=np.zeros(length, np.int32),
        origin=origin,
        temperature=temperature,
        extras={"ref_logprobs": np.where(trained, -3 * rng.random(length), 0).astype(np.float32)},
    )


def stored(state: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint gives back of a learned part's state."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    found: dict[str, Any] = torch.load(file, weights_only=True)
    return found


def plain_logprobs(model: PreTrainedModel, row: Row) -> Tensor:
    """Log-probabilities [n] of a row's trained tokens: the row alone through a stock model."""
    tokens = torch.from_numpy(row.token_ids).long()
    logits = model(tokens[None], use_cache=False).logits[0, :-1] / row.temperature
    logp = logits.log_softmax(dim=-1).gather(1, tokens[1:, None])[:, 0]
    return logp[torch.from_numpy(row.loss_mask)[1:]]


def trained(row: Row, values: F32) -> Tensor:
    """A per-token array [L] of a row where the row is trained, [n]."""
    return torch.from_numpy(values[row.loss_mask])


def gradient(model: PreTrainedModel) -> dict[str, Tensor]:
    """The gradient by parameter, taken off the model; zeros where there was none."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        parameter.grad = None
    return found


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, float]:
    """(worst of any tensor, of all tensors together): the relative L2 distance of two gradients. Tensors that
    have no gradient but rounding (the key biases of a model without rotation) count in the whole alone."""
    whole = torch.cat([tensor.flatten() for tensor in expected.values()]).norm()
    off = torch.cat([(found[name] - tensor).flatten() for name, tensor in expected.items()]).norm()
    each = [
        float((found[name] - tensor).norm() / tensor.norm())
        for name, tensor in expected.items()
        if tensor.norm() > 1e-6 * whole
    ]
    return max(each), float(off / whole)
