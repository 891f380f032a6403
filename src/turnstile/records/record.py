"""The record of every episode: its contexts, sampled tokens, rewards granted and withheld, credit and training.

It is in `RUN/record/`, with one append-only file for each step and phase. Each entry is a gzip member of its own
(`gzip_log.py`), so a process killed during a write loses only that entry. A crash of the machine loses no entry written
before the last `Recorder.sync`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from turnstile.errors import TurnstileError
from turnstile.records.codec import decode, encode
from turnstile.records.gzip_log import Appender, read_members
from turnstile.types import F32, Group, Score

Phase = Literal["warmstart", "train", "eval"]
PerToken = tuple[tuple[F32, ...], ...]
"""[trajectory][turn] -> f32[n], one value per sampled token of a group."""

WEIGHT, LOGPROB = "weight", "logprob"
"""Names in `Entry.trained`: each token's weight in the loss, and its log-probability before the update.

Other names may be added.
"""

REHEARSAL, REPLAYED = "rehearsal", "again"
"""Labels of samples stored before the first step, and of replayed attempts of earlier steps."""

_FILE = re.compile(r"(?P<step>\d{6,})-(?P<phase>[a-z]+)(?:-(?P<label>[\w.]+))?\.jsonl\.gz")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One group as it was played, scored and trained. `label` distinguishes evaluations of one step.

    `scores` are in the order of the group's trajectories. `advantages` and each array of `trained` are
    [trajectory][turn] -> f32[n]; they are None and {} if the group was not trained on.
    """

    step: int
    phase: Phase
    group: Group
    scores: tuple[Score, ...]
    advantages: PerToken | None = None
    trained: Mapping[str, PerToken] = field(default_factory=dict)
    label: str = ""

    def __post_init__(self) -> None:
        if self.phase not in get_args(Phase):
            raise ValueError(f"phase {self.phase!r}: known are {', '.join(get_args(Phase))}")
        if self.label and not re.fullmatch(r"[\w.]+", self.label):
            raise ValueError(f"label {self.label!r}: use letters, digits, dots and underscores")
        attempts = len(self.group.trajectories)
        if len(self.scores) != attempts:
            raise ValueError(f"group {self.group.id!r} of {attempts} trajectories has {len(self.scores)} scores")
        for name, arrays in {"advantages": self.advantages or (), **self.trained}.items():
            if name != "advantages" or self.advantages is not None:
                _check_shape(self.group, name, arrays)


def label_of(name: str) -> str:
    """Return the label for an evaluation with this name. Characters unfit for a file name are replaced."""
    return re.sub(r"[^\w.]+", "_", name)[-100:]


class Recorder:
    """Appends entries to the record of one run."""

    def __init__(self, run: Path) -> None:
        self._folder = Path(run) / "record"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._appender = Appender(self._folder)

    def write(
        self,
        step: int,
        phase: Phase,
        group: Group,
        scores: Sequence[Score],
        advantages: Sequence[Sequence[F32]] | None = None,
        trained: Mapping[str, Sequence[Sequence[F32]]] | None = None,
        *,
        label: str = "",
    ) -> None:
        """Append one group. It survives the death of the process; see `sync` for a crash of the machine.

        Readers see only the last of several writes of a group with the same step, phase and label. Raises ValueError if
        the arrays do not fit the group.
        """
        entry = Entry(
            step=step,
            phase=phase,
            group=group,
            scores=tuple(scores),
            advantages=None if advantages is None else _as_tuples(advantages),
            trained={name: _as_tuples(arrays) for name, arrays in (trained or {}).items()},
            label=label,
        )
        self._appender.append(self._folder / _file_name(step, phase, label), encode(entry))

    def drop(self, step: int, phase: Phase, label: str) -> None:
        """Remove the record of a step, phase and label."""
        self._appender.remove(self._folder / _file_name(step, phase, label))

    def sync(self) -> None:
        """Flush everything written so far to the disk."""
        self._appender.sync()

    def resume_at(self, step: int) -> None:
        """Remove everything recorded after `step`, from which the run resumes; it will be recorded again."""
        for path, file_step, _, _ in _files(self._folder):
            if file_step > step:
                self._appender.remove(path)


def read_record(
    run: Path, *, phase: Phase | None = None, step: int | None = None, label: str | None = None
) -> Iterator[Entry]:
    """Return the entries of a run in the order of steps, each group of a step, phase and label once.

    A filter that is None accepts everything. `label` may also be the name of an evaluation. Damaged entries, such as
    those of a killed writer, are skipped with one warning per file in the log. Raises TurnstileError if the run has no
    record.
    """
    folder = Path(run) / "record"
    if not folder.is_dir():
        raise TurnstileError(f"run {str(run)!r} has no record of episodes; give the folder of a run, such as runs/NAME")
    return _read(folder, phase, step, None if label is None else label_of(label))


def _read(folder: Path, phase: str | None, step: int | None, label: str | None) -> Iterator[Entry]:
    for path, file_step, file_phase, file_label in _files(folder):
        if phase in (None, file_phase) and step in (None, file_step) and label in (None, file_label):
            entries = (decode(body, Entry) for body in read_members(path))
            yield from {entry.group.id: entry for entry in entries}.values()


def _files(folder: Path) -> list[tuple[Path, int, str, str]]:
    """Return (path, step, phase, label) of each file, ordered by step and within a step as in `Phase`."""
    order = {name: index for index, name in enumerate(get_args(Phase))}
    files = [
        (path, int(match["step"]), match["phase"], match["label"] or "")
        for path in folder.iterdir()
        if (match := _FILE.fullmatch(path.name)) and match["phase"] in order
    ]
    return sorted(files, key=lambda item: (item[1], order[item[2]], item[3]))


def _file_name(step: int, phase: str, label: str) -> str:
    return f"{step:06d}-{phase}{'-' if label else ''}{label}.jsonl.gz"


def _as_tuples(arrays: Sequence[Sequence[F32]]) -> PerToken:
    return tuple(tuple(turns) for turns in arrays)


def _check_shape(group: Group, name: str, arrays: Sequence[Sequence[Any]]) -> None:
    expected = [[len(turn.completion.token_ids) for turn in item.turns] for item in group.trajectories]
    lengths = [[len(values) for values in turns] for turns in arrays]
    if lengths != expected:
        raise ValueError(f"{name} of group {group.id!r} have the lengths {lengths}, but its turns {expected}")
