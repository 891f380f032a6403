"""New weights for another process: a file of what learns, for each version."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import save_file

from turnstile.trainer.learner import Learner

KEPT = 2  # the newest, and the one before, which somebody may be reading


class WeightFiles:
    """Files in a folder of their own, which is emptied first. They are not flushed to the disk: nothing goes on from
    them after a crash."""

    def __init__(self, folder: Path, learner: Learner) -> None:
        learning = set(map(id, learner.parameters))
        self._parameters = {name: p for name, p in learner.model.named_parameters() if id(p) in learning}
        self._folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

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
