"""What every kind takes, for `src/turnstile/knobs.json`: types as annotated, ranges as annotated or found by trying.

A function refuses a number by a ConfigError that names the knob. So each knob is given numbers on both sides of what a
range is likely to begin or end at, and those are written down from which it refuses all.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import json
import typing
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from turnstile.credit.base import estimate
from turnstile.credit.samples import sample_aux, sample_group, sample_score
from turnstile.errors import ConfigError
from turnstile.lookup import KINDS, load, part_of, resolve
from turnstile.losses.check import DECLARED, sample_batch
from turnstile.swe.rewards import outcome_class
from turnstile.types import Task

TINY, HUGE = 1e-6, 1e6
FLOATS = (-HUGE, -1.0, -TINY, 0.0, TINY, 0.5, 1 - TINY, 1.0, 1 + TINY, 2.0, HUGE)
INTS = (-1000, -1, 0, 1, 2, 3, 1000)
FROM: Mapping[float, tuple[str, float]] = {
    0.0: ("least", 0), TINY: ("above", 0), 1.0: ("least", 1), 1 + TINY: ("above", 1), 2.0: ("least", 2),
}  # fmt: skip
TO: Mapping[float, tuple[str, float]] = {1.0: ("most", 1), 1 - TINY: ("below", 1), 0.0: ("most", 0)}
"""The first and the last number that is taken -> the range's end. At any other number what is refused hangs on another
knob, as where one must be below the other."""
TABLE_TYPE = "collections.abc.Mapping[str, typing.Any]"
"""The type of a knob that is a table of knobs."""
ANNOTATED = {"ge": "least", "gt": "above", "le": "most", "lt": "below"}
"""How an annotation calls the end of a range -> how the table does."""
NEEDS = {
    ("engine", "openai"): ("aiohttp", "remote"),
    ("sandbox", "container"): ("docker", "container"),
    ("sandbox", "remote"): ("aiohttp", "remote"),
    ("tracker", "tensorboard"): ("tensorboard", "tensorboard"),
}
"""Kinds that need an optional dependency: its package, and the extra that brings it."""
REWARDLESS = {declared.kind for declared in DECLARED if 7 in declared.exempt}
"""Losses that learn without any advantage."""


def knob_table(given: Mapping[str, set[str]]) -> str:
    """The table as JSON. `given` are the parameters of a room that are passed in, and so are not knobs."""
    found = {
        room: {kind: _entry(room, kind, given.get(room, set())) for kind in kinds} for room, kinds in KINDS.items()
    }
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def _entry(room: str, kind: str, given: set[str]) -> dict[str, Any]:
    thing = resolve(room, kind)
    parameters = list(inspect.signature(thing).parameters.values())
    hints = typing.get_type_hints(thing.__init__ if isinstance(thing, type) else thing, include_extras=True)
    knobs = {
        p.name: _knob(room, thing, p, hints.get(p.name, Any))
        for p in parameters
        if p.name not in given
        and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
        and not (room == "engine" and p.name == "model" and p.default is p.empty)
    }
    entry: dict[str, Any] = {"knobs": knobs}
    if (part := part_of(thing)) is not None:
        keys = part_knobs(load(part.path, f"{room} kind {kind!r}"))
        knobs[part.section] = {"type": TABLE_TYPE, "default": "{}", "keys": keys}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        entry["any"] = True
    if room == "loss" and kind in REWARDLESS:
        entry["rewardless"] = True
    if (room, kind) in NEEDS:
        entry["needs"] = dict(zip(("package", "extra"), NEEDS[room, kind], strict=True))
    return entry


def part_knobs(thing: Any) -> dict[str, dict[str, Any]]:
    """The keys of a part's table, with the ranges that their annotations give."""
    hints = typing.get_type_hints(thing.__init__, include_extras=True)
    parameters = inspect.signature(thing).parameters.values()
    return {p.name: _knob("part", thing, p, hints[p.name]) for p in parameters if p.kind is p.KEYWORD_ONLY}


def _knob(room: str, thing: Any, parameter: inspect.Parameter, hint: Any) -> dict[str, Any]:
    bounds: tuple[Any, ...] = getattr(hint, "__metadata__", ())
    hint = typing.get_args(hint)[0] if bounds else hint
    knob: dict[str, Any] = {"type": _spelled(hint)}
    if parameter.default is not parameter.empty:
        knob["default"] = repr(parameter.default)
    if dataclasses.is_dataclass(hint):
        own = typing.get_type_hints(hint, include_extras=True)
        parameters = inspect.signature(hint).parameters.values()
        return {
            **knob,
            "type": TABLE_TYPE,
            "keys": {one.name: _knob("", hint, one, own[one.name]) for one in parameters},
        }
    number = {float, int} & {hint, *typing.get_args(hint)}
    if number and room in TRIALS and thing is not outcome_class:  # whose numbers must rise from one to the next
        knob |= _range(lambda value: TRIALS[room](thing, {parameter.name: value}), parameter.name, int in number)
    inner = itertools.chain.from_iterable(getattr(one, "metadata", (one,)) for one in bounds)  # of a Field: its own
    for bound in inner:
        knob |= {end: getattr(bound, name) for name, end in ANNOTATED.items() if hasattr(bound, name)}
    return knob


def _spelled(hint: Any) -> str:
    """An annotation as `turnstile.knobs` reads it; of classes of ours any value will do."""
    text = (
        hint.__name__
        if isinstance(hint, type) and hint.__module__ == "builtins" and not typing.get_args(hint)
        else str(hint)
    )
    return text if "turnstile" not in text and "<" not in text and "~" not in text else "typing.Any"


def _range(call: Callable[[float], object], name: str, whole: bool) -> dict[str, float]:
    """The ends of what a knob takes, where it has any."""
    numbers = INTS if whole else FLOATS
    taken = [value for value in numbers if _takes(call, name, value)]
    if not taken or len(taken) == len(numbers):
        return {}
    found = {}
    if taken[0] != numbers[0] and float(taken[0]) in FROM:
        end, bound = FROM[float(taken[0])]
        found[end] = bound
    if taken[-1] != numbers[-1] and float(taken[-1]) in TO:
        end, bound = TO[float(taken[-1])]
        found[end] = bound
    return found


def _takes(call: Callable[[float], object], name: str, value: float) -> bool:
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            call(value)
    except ConfigError as error:
        return name not in str(error)
    except Exception:  # it takes the number, and comes to grief over what was made up
        return True
    return True


def _credit(thing: Any, knobs: dict[str, Any]) -> None:
    groups = [sample_group(np.random.default_rng(0), "g", (2, 3, 2, 3))]
    scores = [[sample_score(float(t.attempt), np.zeros(len(t.turns), np.float32)) for t in groups[0].trajectories]]
    needed = {"size": 4} if "size" in inspect.signature(thing).parameters else {}
    estimate(functools.partial(thing, **needed | knobs), groups, scores, sample_aux(groups), {})


def _loss(thing: Any, knobs: dict[str, Any]) -> None:
    batch, logprobs = sample_batch()
    thing(logprobs, batch, **knobs)


def _reward(thing: Any, knobs: dict[str, Any]) -> None:
    group = sample_group(np.random.default_rng(0), "g", (2,))
    needed = {p.name: 4 for p in list(inspect.signature(thing).parameters.values())[2:] if p.default is p.empty}
    thing(Task(id="task", env="check"), group.trajectories[0], **needed | knobs)


TRIALS: Mapping[str, Callable[[Any, dict[str, Any]], None]] = {
    "credit": _credit,
    "loss": _loss,
    "loss_multiplier": lambda thing, knobs: thing(sample_batch()[0], **knobs),
    "loss_aggregation": lambda thing, knobs: thing([], **knobs),
    "reward": _reward,
    "engine": lambda thing, knobs: thing("http://127.0.0.1/v1", **knobs),
}
"""Rooms whose kinds can be tried on what is made up."""
