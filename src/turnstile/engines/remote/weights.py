"""Weights that are given to servers: folders on this machine, and labels by which servers say what sampled a token."""

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

AS_IT_CAME = ("", "default")
"""What servers call the weights that they started with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """The weights of a version in a Hugging Face folder that servers on this machine load. `owner` is who trains, and
    `serial` counts what was given out, since a version may be given out twice. `head` says whether the output layer is
    among what learns."""

    version: int
    folder: Path
    owner: str
    serial: int
    head: bool = True

    @property
    def label(self) -> str:
        """By this name servers know them."""
        return f"{self.owner}/{self.serial}/{self.version}"

    def tied(self) -> bool:
        """Whether the output layer is the embedding."""
        config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        return bool(config.get("tie_word_embeddings"))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps the folder from being put away meanwhile (see `put_away`), also by other processes; the end of this one
        lets go of it."""
        try:
            descriptor = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise EngineError(f"the weights in {self.folder} cannot be read: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            yield
        finally:
            os.close(descriptor)


def put_away(folder: Path) -> bool:
    """Removes a folder of weights, unless a server is about to load it; says whether it did."""
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


def versions_of(labels: Sequence[str] | None, count: int, since: Weights | None, where: str) -> list[int]:
    """The version of each of `count` tokens that were asked for when a server had the weights `since` (None: those that
    it started with, which are version 0).

    Raises WeightsLostError where it has gone back to those it started with, ConfigError where somebody else has given
    it others, and EngineError where it does not say, or has others than it started with and was given none.
    """
    if labels is None or len(labels) != count:
        raise EngineError(f"{where} does not say of each token which weights it is of")
    found = {label: _version(label, since, where) for label in dict.fromkeys(labels)}
    return [found[label] for label in labels]


def _version(label: str, since: Weights | None, where: str) -> int:
    if since is None:
        if label not in AS_IT_CAME:
            raise EngineError(f"{where} sampled with weights {label!r}, which it was not given for this request")
        return 0
    if label in AS_IT_CAME:
        raise WeightsLostError(f"{where} was started again and has lost the weights that it was given")
    owner, _, rest = label.partition("/")
    serial, _, version = rest.partition("/")
    if owner != since.owner or not serial.isdecimal() or not version.isdecimal():
        raise ConfigError(f"{where} samples with weights that another run gave it; give each run servers of its own")
    if int(serial) < since.serial:
        raise EngineError(f"{where} sampled with weights of version {version}, after it was given {since.version}")
    return int(version)


def spread(spans: object, count: int) -> list[str] | None:
    """The label of each of `count` tokens, from spans of tokens that follow each other."""
    if not isinstance(spans, list):
        return None
    labels: list[str] = []
    for span in spans:
        label = span.get("version") if isinstance(span, Mapping) else None
        if not isinstance(label, str) or span.get("start") != len(labels):
            return None
        labels += [label] * (int(span.get("end") or 0) - len(labels))
    return labels if len(labels) == count else None
