"""Atomic checkpoints, written as folders under a temporary name, flushed, and renamed into place.

`checkpoints/step-000012/` holds the network as a plain Hugging Face folder (`model/`), the optimiser (`optimizer.pt`),
the auxiliary model if there is one (`learned.pt`), and everything else as JSON (`state.json`). `SHA256SUMS` lists the
checksums of all these files in the format of `sha256sum --check`, so that a torn or changed folder is detected when it
is read.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from turnstile.errors import CheckpointError
from turnstile.models.adapt import adapter_state, merged_state
from turnstile.records.gzip_log import flush
from turnstile.trainer import rng as rng
from turnstile.trainer.critic import AuxiliaryModel
from turnstile.trainer.learner import Learner

SUMS = "SHA256SUMS"
AUXILIARY = "learned.pt"
_NAME = re.compile(r"step-(\d{6})")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk whose checksums are correct."""

    path: Path
    step: int
    state: Mapping[str, Any]
    digest: str
    """The SHA-256 of `SHA256SUMS`."""

    @property
    def model(self) -> Path:
        """The network's Hugging Face folder."""
        return self.path / "model"


def save(
    folder: Path,
    step: int,
    learner: Learner,
    tokenizer: PreTrainedTokenizerBase,
    state: Mapping[str, Any],
    *,
    auxiliary: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Write the checkpoint of `step`, and return it.

    `auxiliary` is the state of the auxiliary model, tensors included. Raises CheckpointError on failure; checkpoints of
    other steps are not touched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for unfinished in folder.glob(".writing-*"):  # left by a process that was killed
        shutil.rmtree(unfinished)
    target = folder / f"step-{step:06d}"
    scratch = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder))
    try:
        save_model(learner.model, tokenizer, scratch / "model")
        tensors = {**learner.state(), "adapter": adapter_state(learner.model), "chance": rng.state()}
        torch.save(tensors, scratch / "optimizer.pt")
        if auxiliary is not None:
            torch.save(dict(auxiliary), scratch / AUXILIARY)
        (scratch / "state.json").write_text(json.dumps({"step": step, **state}, indent=1), encoding="utf-8")
        sums = {path.relative_to(scratch): _sha256(path) for path in sorted(scratch.rglob("*")) if path.is_file()}
        (scratch / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()), encoding="utf-8")
        for path in (*scratch.rglob("*"), scratch):
            flush(path)
        if target.exists():
            shutil.rmtree(target)
        scratch.rename(target)
        flush(folder)
    except (OSError, RuntimeError, SafetensorError) as error:  # json, torch.save and safetensors raise these
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written ({error}); earlier checkpoints are intact: "
            "fix the cause and run the same command again"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Checkpoint(target, step, state, _sha256(target / SUMS))


def prune(folder: Path, steps: Collection[int]) -> None:
    """Delete the checkpoints of all steps that are not in `steps`."""
    for path in folder.glob("step-*"):
        if (match := _NAME.fullmatch(path.name)) and int(match[1]) not in steps:
            shutil.rmtree(path)


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save the network, with adapters merged in, and its tokenizer as a plain Hugging Face folder."""
    model.save_pretrained(folder, state_dict=merged_state(model))
    tokenizer.save_pretrained(folder)


def latest(folder: Path, committed: Mapping[int, str] | None = None) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest intact checkpoint or None, and a warning for each newer one that was skipped.

    With `committed` (step -> digest), only checkpoints that are listed there with the same digest count.
    """
    warnings: list[str] = []
    newest_first = sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), reverse=True)
    for path in newest_first:
        try:
            if committed is not None and not _is_committed(path, committed):  # checked first: `read` hashes all files
                raise CheckpointError(f"checkpoint {path.name} is not in the ledger, so it was never finished")
            return read(path), warnings
        except CheckpointError as error:
            warnings.append(f"{error}; going back to the one before")
    return None, warnings


def _is_committed(path: Path, committed: Mapping[int, str]) -> bool:
    """Return whether the folder's digest is in `committed`; True if it has no checksums, since `read` refuses it."""
    match, sums = _NAME.fullmatch(path.name), path / SUMS
    return not sums.is_file() or (match is not None and committed.get(int(match[1])) == _sha256(sums))


def newest_folder(folder: Path) -> Path | None:
    """Return the newest checkpoint's folder, intact or not; None if there is none."""
    return max((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), default=None)


def weights_digests(folder: Path) -> dict[int, list[str]]:
    """Return, by step, the `SHA256SUMS` lines of each checkpoint's weight files."""
    digests = {}
    for path in folder.glob("step-*"):
        if (match := _NAME.fullmatch(path.name)) and (path / SUMS).is_file():
            lines = (path / SUMS).read_text(encoding="utf-8").splitlines()
            digests[int(match[1])] = [line for line in lines if line.endswith(".safetensors")]
    return digests


def read(path: Path) -> Checkpoint:
    """Return the checkpoint in a folder.

    Raises CheckpointError if a file is missing or its checksum is wrong.
    """
    try:
        text = (path / SUMS).read_text(encoding="utf-8")
        sums = {name: digest for digest, name in (line.split("  ", 1) for line in text.splitlines())}
    except (OSError, ValueError):
        raise CheckpointError(f"checkpoint {path.name} is torn: {SUMS} is missing or unreadable") from None
    if not text.endswith("  state.json\n"):  # the last line that `save` writes
        raise CheckpointError(f"checkpoint {path.name} is torn: {SUMS} is cut short")
    for name, digest in sums.items():
        if not (path / name).is_file():
            raise CheckpointError(f"checkpoint {path.name} is torn: {name} is missing")
        if _sha256(path / name) != digest:
            raise CheckpointError(f"checkpoint {path.name} is torn: {name} is not what was written")
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    return Checkpoint(path, int(state["step"]), state, _sha256(path / SUMS))


def restore(checkpoint: Checkpoint, learner: Learner) -> None:
    """Restore weights, optimiser and RNG states bit for bit.

    If the recipe trains adapters, only these are restored; the other weights stay those of the initial model. Raises
    CheckpointError if the checkpoint has another architecture or other adapters.
    """
    state = torch.load(checkpoint.path / "optimizer.pt", map_location="cpu", weights_only=True)
    adapter = adapter_state(learner.model)
    if adapter.keys() != state["adapter"].keys():
        raise CheckpointError(f"checkpoint {checkpoint.path.name} holds other adapters than the recipe trains")
    if adapter:
        for name, parameter in adapter.items():
            parameter.copy_(state["adapter"][name])
    else:
        load_weights(learner.model, checkpoint.model)
    learner.restore(state)
    rng.restore(state["chance"])


def restore_auxiliary(checkpoint: Checkpoint, part: AuxiliaryModel) -> None:
    """Restore the state of the auxiliary model bit for bit.

    Raises CheckpointError if the checkpoint has none.
    """
    file = checkpoint.path / AUXILIARY
    if not file.is_file():
        raise CheckpointError(f"checkpoint {checkpoint.path.name} has no auxiliary model, which credit.kind needs")
    part.restore(torch.load(file, map_location="cpu", weights_only=True))


def load_weights(model: PreTrainedModel, folder: Path) -> None:
    """Load the weights of a Hugging Face folder into an existing network.

    Raises CheckpointError if they do not fit its architecture.
    """
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights.update(load_file(file))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    missing = [name for name in missing if name not in tied]
    if missing or unexpected:
        wrong = (missing + unexpected)[0]
        raise CheckpointError(
            f"{folder} does not fit the model: {len(missing)} weights missing, {len(unexpected)} unknown, "
            f"for example {wrong}; check that model.id is the model of this checkpoint"
        )
    model.tie_weights()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
