"""Weights published to servers as folders on this machine, and the labels by which servers report them."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from turnstile.errors import ConfigError, EngineError, WeightsLostError

INITIAL_LABELS = ("", "default")
"""Labels that servers report for the weights that they started with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedWeights:
    """One version of the weights, in a Hugging Face folder that servers on this machine load.

    `owner` identifies the training run; `serial` counts publications, since a version may be published twice. `head`
    says whether the output layer is trained.
    """

    version: int
    folder: Path
    owner: str
    serial: int
    head: bool = True

    @property
    def label(self) -> str:
        """The name by which servers report these weights."""
        return f"{self.owner}/{self.serial}/{self.version}"

    def has_tied_head(self) -> bool:
        """Return whether the output layer is tied to the embedding."""
        config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        return bool(config.get("tie_word_embeddings"))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep the folder from being removed by `remove_unless_locked`, in this or another process.

        The lock ends with the process that holds it. Raises EngineError if the folder cannot be opened.
        """
        try:
            descriptor = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise EngineError(f"the weights in {self.folder} cannot be read: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            yield
        finally:
            os.close(descriptor)


def remove_unless_locked(folder: Path) -> bool:
    """Remove a folder of weights unless it is locked for loading; return whether it was removed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        shutil.rmtree(folder)
        return True
    finally:
        os.close(descriptor)


def versions_of(labels: Sequence[str] | None, count: int, since: PublishedWeights | None, where: str) -> list[int]:
    """Return the version of each of `count` tokens, given their labels.

    `since` are the weights that the server had when it was asked; None stands for the initial weights, version 0.
    Raises WeightsLostError if the server has gone back to its initial weights, ConfigError if another run has given it
    weights, and EngineError if there is no label for each token, or if it samples with weights that it was not given.
    """
    if labels is None or len(labels) != count:
        raise EngineError(f"{where} does not report the weights of each token")
    version_of = {label: _version_of(label, since, where) for label in dict.fromkeys(labels)}
    return [version_of[label] for label in labels]


def _version_of(label: str, since: PublishedWeights | None, where: str) -> int:
    if since is None:
        if label not in INITIAL_LABELS:
            raise EngineError(f"{where} sampled with weights {label!r}, which it was not given for this request")
        return 0
    if label in INITIAL_LABELS:
        raise WeightsLostError(f"{where} was started again and has lost the weights that it was given")
    owner, _, rest = label.partition("/")
    serial, _, version = rest.partition("/")
    if owner != since.owner or not serial.isdecimal() or not version.isdecimal():
        raise ConfigError(f"{where} samples with weights that another run gave it; give each run servers of its own")
    if int(serial) < since.serial:
        raise EngineError(f"{where} sampled with weights of version {version}, after it was given {since.version}")
    return int(version)


def labels_per_token(spans: object, count: int) -> list[str] | None:
    """Return the label of each of `count` tokens from spans of consecutive tokens; None if they do not fit."""
    if not isinstance(spans, list):
        return None
    labels: list[str] = []
    for span in spans:
        label = span.get("version") if isinstance(span, Mapping) else None
        if not isinstance(label, str) or span.get("start") != len(labels):
            return None
        labels += [label] * (int(span.get("end") or 0) - len(labels))
    return labels if len(labels) == count else None
