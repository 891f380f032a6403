"""The environments, rewards and trackers of a run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from turnstile.config import Kind, Recipe, TermConfig
from turnstile.envs.base import Env
from turnstile.envs.threads import Threads
from turnstile.errors import ConfigError
from turnstile.rewards.base import Term, Threshold
from turnstile.rewards.build import Scorer, make_term
from turnstile.rewards.graders import Grader
from turnstile.rewards.on_stop import StopRules
from turnstile.tracking.base import Tracker
from turnstile.tracking.board import StatusBoard
from turnstile.tracking.fanout import Trackers
from turnstile.wiring.kinds import bind, takes
from turnstile.wiring.sandboxes import make_sandboxes


class Shared(Protocol):
    """A resource that all episodes of a run share, such as sandboxes or a grader."""

    async def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The environment of episodes, and what they share.

    `make_env` makes an environment, `shared` holds the resources of all episodes, `graders` are keyed by name, and
    `board` shows the status of the episodes.
    """

    make_env: Callable[[], Env]
    shared: tuple[Shared, ...] = ()  # in the order in which they were made
    graders: Mapping[str, Grader] = field(default_factory=dict)
    board: StatusBoard = field(default_factory=StatusBoard)

    async def close(self) -> None:
        for part in reversed((*self.shared, *self.graders.values())):
            await part.close()


def make_world(
    recipe: Recipe,
    env: Callable[..., Env] | None = None,
    graders: Mapping[str, Grader] | None = None,
    board: StatusBoard | None = None,
) -> World:
    """Return the world of a recipe with its environment, or with `env` in its place.

    The world closes `graders` when it is closed. An environment that has a parameter `sandboxes`, `grader` or
    `problems` is given the run's. An environment whose methods are plain functions is called in threads.
    """
    world = _make_world(recipe, env)
    return replace(world, graders=graders or {}, board=board or world.board)


def _make_world(recipe: Recipe, env: Callable[..., Env] | None) -> World:
    threads = Threads(recipe.episode.concurrent)  # threads start only when needed
    maker = functools.partial(env, **recipe.env.knobs) if env is not None else bind("env", recipe.env, given=SHARED)
    if not any(takes(maker, name) for name in SHARED):
        return World(make_env=threads.around(maker), shared=(threads,))
    grades = takes(maker, "grader") or takes(maker, "problems")
    sandboxes = make_sandboxes(recipe.sandbox, run=recipe.name, grading=grades)
    shared: dict[str, Any] = {"sandboxes": sandboxes}
    if grades:
        from turnstile.swe.grading.grader import CodeGrader  # loaded only for repository tasks
        from turnstile.swe.problems.problems import Problems

        shared["grader"] = CodeGrader(sandboxes)
        shared["problems"] = Problems(shared["grader"])
    given = {name: value for name, value in shared.items() if takes(maker, name)}
    make_env = threads.around(functools.partial(maker, **given))
    return World(make_env=make_env, shared=(*shared.values(), threads))


SHARED = ("sandboxes", "grader", "problems")


def make_scorer(recipe: Recipe, reward: Callable[..., Any] | None = None) -> Scorer:
    """Return the scorer of a recipe's rewards. `reward`, a plain function, replaces the recipe's terms if given."""
    if reward is not None:
        terms = [make_term("reward", reward, level=1)]
    else:
        terms = [_make_term(term, f"rewards.terms[{place}]") for place, term in enumerate(recipe.rewards.terms)]
    compose = bind("compose", Kind(kind=recipe.rewards.compose))
    return Scorer(terms=tuple(terms), compose=compose, ends=StopRules.read(recipe.on_stop.model_dump()))


def _make_term(term: TermConfig, where: str) -> Term:
    gate = Threshold(value=term.gate.value, compare=term.gate.compare) if term.gate else None
    scope = term.scope or None
    try:
        return make_term(term.name, term.kind, term.knobs, level=term.level, weight=term.weight, gate=gate, scope=scope)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def make_trackers(recipe: Recipe, run: Path, *, board: StatusBoard | None = None, plain: bool = False) -> Tracker:
    """Return the trackers of a run.

    A tracker that has a parameter `board` is given the run's. With `plain`, trackers that have that option use it.
    """
    return Trackers([_make_tracker(kind, run, board or StatusBoard(), plain=plain) for kind in recipe.trackers])


def _make_tracker(kind: Kind, run: Path, board: StatusBoard, *, plain: bool) -> Tracker:
    maker = bind("tracker", kind, given=("run", "board"))
    given: dict[str, Any] = {"board": board} if takes(maker, "board") else {}
    if plain and takes(maker, "plain"):
        given["plain"] = True
    tracker: Tracker = maker(run, **given)
    return tracker
