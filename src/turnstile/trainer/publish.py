"""Publishing of weights, as files of trained parameters (for a process) or Hugging Face folders (for servers)."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from turnstile.engines.remote.weights import remove_unless_locked
from turnstile.errors import RunFolderError
from turnstile.trainer.checkpoint import save_model
from turnstile.trainer.learner import Learner

VERSIONS_KEPT = 2  # the newest and the previous one, which another process may be reading


def _make_empty(folder: Path) -> Path:
    """Delete the folder's contents, or create the folder, and return it.

    Raises RunFolderError on failure.
    """
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        raise RunFolderError(
            f"the weights folder {folder} cannot be emptied ({error.strerror}); remove it by hand"
        ) from None
    return folder


class WeightFiles:
    """A folder of weight files, which is emptied first. No run resumes from them, so they are not flushed to disk."""

    def __init__(self, folder: Path, learner: Learner) -> None:
        trained = set(map(id, learner.parameters))
        self._parameters = {name: p for name, p in learner.model.named_parameters() if id(p) in trained}
        self._folder = _make_empty(folder)

    def write(self, version: int) -> Path:
        """Write the weights of a version to a file and return it. The file appears atomically.

        Raises OSError if the disk is full.
        """
        file = self._folder / f"{version:06d}.safetensors"
        scratch = file.with_suffix(".writing")
        save_file({name: p.detach().contiguous() for name, p in self._parameters.items()}, scratch)
        scratch.replace(file)
        for old in sorted(self._folder.glob("*.safetensors"))[:-VERSIONS_KEPT]:
            old.unlink()
        return file

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


class WeightFolders:
    """A folder of Hugging Face folders, which is emptied first. They are not flushed to disk.

    The newest `kept` folders stay, and so do older ones that a server is still loading.
    """

    def __init__(
        self, folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, kept: int = VERSIONS_KEPT
    ) -> None:
        self._folder, self._model, self._tokenizer, self._kept = _make_empty(folder), model, tokenizer, kept
        self._numbers = itertools.count()

    def write(self, version: int) -> Path:
        """Write the weights of a version to a folder and return it. The folder appears atomically.

        Raises OSError if the disk is full.
        """
        scratch = self._folder / ".writing"
        shutil.rmtree(scratch, ignore_errors=True)  # left by a write that failed
        save_model(self._model, self._tokenizer, scratch)
        target = self._folder / f"{next(self._numbers):06d}-{version}"
        scratch.rename(target)
        for old in sorted(self._folder.glob("[0-9]*"))[: -self._kept]:
            remove_unless_locked(old)
        return target

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
