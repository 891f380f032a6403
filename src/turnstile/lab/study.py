"""Measurements of many estimators on many worlds, with one line of figures for each pair."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from turnstile.errors import TurnstileError
from turnstile.lab.judge import Figures
from turnstile.lab.measure import Subject, label, make_bench, measure
from turnstile.lab.process import Process
from turnstile.lab.processes import make
from turnstile.lab.world import list_world, some_policy

JSON = Any


class Measured(Protocol):
    """An estimator or a loss with a name, its knobs and the invariants that it breaks."""

    @property
    def name(self) -> str: ...
    @property
    def knobs(self) -> Mapping[str, Any]: ...
    @property
    def broken(self) -> Mapping[int, str]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """The figures of one estimator on one world. If `figures` is None, `refused` says why it cannot be measured."""

    estimator: str  # its label, knobs included
    kind: str
    process: str
    knobs: dict[str, int]  # of the process
    size: int  # G
    groups: int
    seconds: float
    broken: tuple[int, ...]
    figures: Figures | None = None
    refused: str = ""
    seed: int = 0  # of the policy and of the samples
    drift: float = 0.0  # how far the policy has moved since it sampled, in logits
    branched: bool = False

    @property
    def column(self) -> str:
        """The column heading: process, how far the policy has moved, and whether attempts branch."""
        drift = f" +{self.drift:g}" if self.drift else ""
        return f"{self.process}{drift}{' branched' if self.branched else ''}"

    def to_json(self) -> JSON:
        """Return a JSON-serialisable dictionary in which infinite and NaN figures are strings."""
        body = asdict(self)
        if self.figures is not None:
            body["figures"] = {name: _json_number(value) for name, value in body["figures"].items()}
            body["figures"]["biased"] = self.figures.biased
        return body


def line_of(body: JSON) -> Line:
    """Return the line that `Line.to_json` turned into `body`."""
    figures = body["figures"]
    if figures is not None:
        figures = {name: value if isinstance(value, bool) else float(value) for name, value in figures.items()}
        del figures["biased"]
    return Line(**{**body, "broken": tuple(body["broken"]), "figures": None if figures is None else Figures(**figures)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A process, the size of its groups, and the number of groups to sample if their outcomes cannot be enumerated.

    `seed` also determines the policy. With `branched`, half of a group's attempts branch from the other half.
    """

    process: Process
    size: int = 8
    groups: int = 512
    seed: int = 0
    branched: bool = False


def sweeps(*, groups: int = 512) -> dict[str, list[Setting]]:
    """Return settings that vary the group size (on `stopping`), and the horizon and reward delay (on `delayed`)."""
    return {
        "size": [Setting(process=make("stopping"), size=size, groups=groups) for size in (2, 4, 8, 16)],
        "horizon": [Setting(process=make("delayed", horizon=h, delay=1), groups=groups) for h in (2, 3, 4, 5, 6)],
        "delay": [Setting(process=make("delayed", horizon=5, delay=d), groups=groups) for d in (0, 1, 2, 3, 5)],
    }


def study(
    subjects: Sequence[Subject], settings: Iterable[Setting], done: Callable[[Line], None] = lambda found: None
) -> list[Line]:
    """Return one line per subject and setting; all subjects of a setting are measured on the same groups.

    `done` is called with each line as soon as it is measured.
    """
    lines = []
    for setting in settings:
        world = list_world(setting.process)
        theta = some_policy(world, seed=setting.seed)
        bench = make_bench(
            world,
            theta,
            size=setting.size,
            groups=setting.groups,
            seed=setting.seed,
            branched=setting.branched,
        )
        for each in subjects:
            lines.append(line(setting, each, functools.partial(measure, each, bench)))
            done(lines[-1])
    return lines


def line(setting: Setting, subject: Measured, figures: Callable[[], Figures], *, drift: float = 0.0) -> Line:
    """Return the line of one subject in one setting.

    `figures` computes the figures; if it raises a TurnstileError, the line has no figures but the error's message.
    """
    began = time.perf_counter()
    found, refused = None, ""
    try:
        found = figures()
    except TurnstileError as error:
        refused = str(error)
    return Line(
        estimator=label(subject.name, subject.knobs),
        kind=subject.name,
        process=setting.process.name,
        knobs=dict(setting.process.knobs),
        size=setting.size,
        groups=setting.groups,
        seconds=round(time.perf_counter() - began, 3),
        broken=tuple(subject.broken),
        figures=found,
        refused=refused,
        seed=setting.seed,
        drift=drift,
        branched=setting.branched,
    )


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
