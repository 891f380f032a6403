"""A tracker that writes TensorBoard files to `RUN/tensorboard`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt

from turnstile.errors import MissingExtraError
from turnstile.tracking.base import Scalars

try:
    from torch.utils.tensorboard import SummaryWriter
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "tensorboard":
        raise
    SummaryWriter = None


class TensorboardTracker:
    """Writes every number that a step logs as a scalar and every message as text.

    Raises MissingExtraError if TensorBoard is not installed.
    """

    def __init__(self, run: Path, *, flush_secs: NonNegativeInt = 30) -> None:
        if SummaryWriter is None:
            raise MissingExtraError("tracker 'tensorboard'", "tensorboard")
        self._folder = Path(run) / "tensorboard"
        self._flush_secs = flush_secs
        self._step = 0
        self._writer = self._open(None)

    def log(self, step: int, metrics: Scalars) -> None:
        self._step = step
        for name, value in metrics.items():
            if value is not None and not isinstance(value, str):
                self._writer.add_scalar(name, float(value), step)

    def say(self, line: str, *, level: str = "info") -> None:
        self._writer.add_text(f"messages/{level}", line, self._step)

    def progress(self, label: str, done: int, total: int) -> None:
        """Do nothing, since progress makes no useful curve."""

    def resume_at(self, step: int) -> None:
        self._writer.close()
        self._step = step
        self._writer = self._open(step + 1)  # TensorBoard hides that step and later ones in earlier files

    def sync(self) -> None:
        self._writer.flush()  # the best that TensorBoard offers; metrics.jsonl has the same numbers

    def close(self) -> None:
        self._writer.close()

    def _open(self, purge_step: int | None) -> Any:
        return SummaryWriter(str(self._folder), purge_step=purge_step, flush_secs=self._flush_secs)
