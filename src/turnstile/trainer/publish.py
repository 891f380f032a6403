"""New weights for others: a file of what learns for another process, a whole folder for servers, for each version."""

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

KEPT = 2  # the newest, and the one before, which somebody may be reading


def _emptied(folder: Path) -> Path:
    """The folder, with nothing in it."""
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        raise RunFolderError(
            f"{folder}, where weights are handed out, cannot be emptied ({error.strerror}); remove it by hand"
        ) from None
    return folder


class WeightFiles:
    """Files in a folder of their own, which is emptied first. They are not flushed to the disk: nothing goes on from
    them after a crash."""

    def __init__(self, folder: Path, learner: Learner) -> None:
        learning = set(map(id, learner.parameters))
        self._parameters = {name: p for name, p in learner.model.named_parameters() if id(p) in learning}
        self._folder = _emptied(folder)

    def write(self, version: int) -> Path:
        """The file of this version, whole as soon as it is there. Raises OSError where there is no room."""
        file = self._folder / f"{version:06d}.safetensors"
        scratch = file.with_suffix(".writing")
        save_file({name: p.detach().contiguous() for name, p in self._parameters.items()}, scratch)
        scratch.replace(file)
        for old in sorted(self._folder.glob("*.safetensors"))[:-KEPT]:
            old.unlink()
        return file

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class WeightFolders:
    """Plain Hugging Face folders in a folder of their own, which is emptied first; the newest `kept` stay, and others
    for as long as a server loads them. They are not flushed to the disk either."""

    def __init__(
        self, folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, kept: int = KEPT
    ) -> None:
        self._folder, self._model, self._tokenizer, self._kept = _emptied(folder), model, tokenizer, kept
        self._numbers = itertools.count()

    def write(self, version: int) -> Path:
        """The folder of this version, whole as soon as it is there. Raises OSError where there is no room."""
        scratch = self._folder / ".writing"
        shutil.rmtree(scratch, ignore_errors=True)  # of one that failed
        save_model(self._model, self._tokenizer, scratch)
        found = self._folder / f"{next(self._numbers):06d}-{version}"
        scratch.rename(found)
        for old in sorted(self._folder.glob("[0-9]*"))[: -self._kept]:
            remove_unless_locked(old)
        return found

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
