"""Models by name, and the errors for missing ones."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import tiny_llama
from turnstile.errors import ConfigError, MissingExtraError
from turnstile.models.load import load_model, load_tokenizer, model_folder, pick_device, pick_dtype


@pytest.fixture
def folder(tmp_path: Path, words: Any) -> Path:
    tiny_llama(len(words), hidden=16).save_pretrained(tmp_path / "model")
    words.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_local_folder(folder: Path, words: Any) -> None:
    model = load_model(str(folder), device="cpu")
    assert model.dtype == torch.float32
    assert not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    expected = tiny_llama(len(words), hidden=16).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert load_tokenizer(str(folder)).encode("guess 7\n") == words.encode("guess 7\n")


def test_dtypes(folder: Path) -> None:
    assert load_model(str(folder), device="cpu", dtype="float64").dtype == torch.float64
    assert pick_dtype("auto", torch.device("cpu")) == torch.float32
    assert pick_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16
    with pytest.raises(ConfigError, match=r"model\.dtype = 'half': use auto, float32, bfloat16 or float64"):
        pick_dtype("half", torch.device("cpu"))  # type: ignore[arg-type]


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device().type == "cpu"
    with pytest.raises(ConfigError, match=r"model\.device = 'cuda:0': this machine has no usable CUDA device"):
        pick_device("cuda:0")


def test_missing_folder(tmp_path: Path) -> None:
    for name in (str(tmp_path / "none"), "./none", "~/none-at-all", "a/b/c"):
        with pytest.raises(ConfigError, match="does not exist; give a folder, a hub id, or smollm2-135m"):
            model_folder(name)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json; give a folder that save_pretrained wrote"):
        load_model(str(tmp_path))


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot be loaded: "):
        load_model(str(folder), device="cpu")


def test_unavailable_hub_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="model 'nobody/nothing' cannot be loaded: ") as raised:
        load_tokenizer("nobody/nothing")
    assert "\n" not in str(raised.value)


def test_packaged_model_names_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TURNSTILE_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"HuggingFaceTB/SmolLM2-135M-Instruct.*turnstile-rl\[smollm2\]"):
        model_folder("smollm2-135m")


def test_converted_model_is_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TURNSTILE_CACHE", str(tmp_path))
    kept = tmp_path / "models" / "smollm2-135m"
    kept.mkdir(parents=True)
    (kept / "config.json").write_text("{}")
    assert model_folder("smollm2-135m") == str(kept)
