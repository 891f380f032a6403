"""Checkpoints that are whole or not there: a folder written aside, flushed, and renamed into place.

`checkpoints/step-000012/` holds the network as a plain Hugging Face folder (`model/`), the optimiser
(`optimizer.pt`), what learns beside it, if anything does (`learned.pt`), and everything else as JSON (`state.json`).
`SHA256SUMS` lists the checksums of all of them as `sha256sum --check` reads it, so that a torn or changed folder is
found out when it is read.
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
from turnstile.trainer import rng as chance
from turnstile.trainer.critic import AuxiliaryModel
from turnstile.trainer.learner import Learner

SUMS = "SHA256SUMS"
LEARNED = "learned.pt"
_NAME = re.compile(r"step-(\d{6})")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint on disk, found whole."""

    path: Path
    step: int
    state: Mapping[str, Any]
    digest: str
    """The checksum of its list of files."""

    @property
    def model(self) -> Path:
        return self.path / "model"


def save(
    folder: Path,
    step: int,
    learner: Learner,
    tokenizer: PreTrainedTokenizerBase,
    state: Mapping[str, Any],
    *,
    learned: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Writes the checkpoint of `step`. `learned`: what a part that learns beside the policy keeps, tensors and all.

    Raises CheckpointError where that cannot be done; then those before stand.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".writing-*"):  # by a process that was killed
        shutil.rmtree(left)
    target = folder / f"step-{step:06d}"
    scratch = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder))
    try:
        save_model(learner.model, tokenizer, scratch / "model")
        numbers = {**learner.state(), "adapter": adapter_state(learner.model), "chance": chance.state()}
        torch.save(numbers, scratch / "optimizer.pt")
        if learned is not None:
            torch.save(dict(learned), scratch / LEARNED)
        (scratch / "state.json").write_text(json.dumps({"step": step, **state}, indent=1), encoding="utf-8")
        sums = {path.relative_to(scratch): _sha256(path) for path in sorted(scratch.rglob("*")) if path.is_file()}
        (scratch / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()), encoding="utf-8")
        for path in (*scratch.rglob("*"), scratch):
            flush(path)
        if target.exists():
            shutil.rmtree(target)
        scratch.rename(target)
        flush(folder)
    except (OSError, RuntimeError, SafetensorError) as error:  # what the writers of files raise
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written ({error}); what was saved before stands: "
            "mend that and run the same command again"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Checkpoint(target, step, state, _sha256(target / SUMS))


def keep(folder: Path, steps: Collection[int]) -> None:
    """Removes the checkpoints of all steps but these."""
    for path in folder.glob("step-*"):
        if (match := _NAME.fullmatch(path.name)) and int(match[1]) not in steps:
            shutil.rmtree(path)


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """The network, adapters merged in, and its tokenizer as a plain Hugging Face folder."""
    model.save_pretrained(folder, state_dict=merged_state(model))
    tokenizer.save_pretrained(folder)


def latest(folder: Path, committed: Mapping[int, str] | None = None) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, and a line for each newer one that is torn. With `committed` (step -> digest) only
    those count, and only as they were then."""
    complaints: list[str] = []
    found = sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), reverse=True)
    for path in found:
        try:
            if committed is not None and not _is_committed(path, committed):  # asked first, as `read` hashes all files
                raise CheckpointError(f"checkpoint {path.name} is not in the ledger, so it was never finished")
            return read(path), complaints
        except CheckpointError as error:
            complaints.append(f"{error}; going back to the one before")
    return None, complaints


def _is_committed(path: Path, committed: Mapping[int, str]) -> bool:
    """Whether the ledger names this folder's list of checksums; a folder without one is left to `read`."""
    match, sums = _NAME.fullmatch(path.name), path / SUMS
    return not sums.is_file() or (match is not None and committed.get(int(match[1])) == _sha256(sums))


def newest(folder: Path) -> Path | None:
    """The folder of the newest checkpoint, whole or not."""
    return max((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), default=None)


def weights_digests(folder: Path) -> dict[int, list[str]]:
    """The checksums of the weights in each checkpoint, by step, as their lists say."""
    found = {}
    for path in folder.glob("step-*"):
        if (match := _NAME.fullmatch(path.name)) and (path / SUMS).is_file():
            lines = (path / SUMS).read_text(encoding="utf-8").splitlines()
            found[int(match[1])] = [line for line in lines if line.endswith(".safetensors")]
    return found


def read(path: Path) -> Checkpoint:
    """Raises CheckpointError when a file is missing or not what was written."""
    try:
        text = (path / SUMS).read_text(encoding="utf-8")
        sums = {name: digest for digest, name in (line.split("  ", 1) for line in text.splitlines())}
    except (OSError, ValueError):
        raise CheckpointError(f"checkpoint {path.name} is torn: {SUMS} is missing or unreadable") from None
    if not text.endswith("  state.json\n"):  # the last of them
        raise CheckpointError(f"checkpoint {path.name} is torn: {SUMS} is cut short")
    for name, digest in sums.items():
        if not (path / name).is_file():
            raise CheckpointError(f"checkpoint {path.name} is torn: {name} is missing")
        if _sha256(path / name) != digest:
            raise CheckpointError(f"checkpoint {path.name} is torn: {name} is not what was written")
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    return Checkpoint(path, int(state["step"]), state, _sha256(path / SUMS))


def restore(checkpoint: Checkpoint, learner: Learner) -> None:
    """Puts weights and optimiser back in place, bit by bit.

    With adapters, the layers below them are the frozen ones of the model the run started from. Raises
    CheckpointError when the checkpoint is of another architecture or of other trained parameters.
    """
    state = torch.load(checkpoint.path / "optimizer.pt", map_location="cpu", weights_only=True)
    adapter = adapter_state(learner.model)
    if adapter.keys() != state["adapter"].keys():
        raise CheckpointError(f"checkpoint {checkpoint.path.name} and the recipe do not train the same adapters")
    if adapter:
        for name, parameter in adapter.items():
            parameter.copy_(state["adapter"][name])
    else:
        load_weights(learner.model, checkpoint.model)
    learner.restore(state)
    chance.restore(state["chance"])


def restore_learned(checkpoint: Checkpoint, part: AuxiliaryModel) -> None:
    """Puts a part that learns beside the policy back in place, bit by bit. Raises CheckpointError when the checkpoint
    holds none."""
    file = checkpoint.path / LEARNED
    if not file.is_file():
        raise CheckpointError(f"checkpoint {checkpoint.path.name} holds nothing of the part that credit.kind learns")
    part.restore(torch.load(file, map_location="cpu", weights_only=True))


def load_weights(model: PreTrainedModel, folder: Path) -> None:
    """The weights of a Hugging Face folder into a network that is already there.

    Raises CheckpointError when they belong to another architecture.
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
            f"for example {wrong}; is model.id another?"
        )
    model.tie_weights()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
