"""The one loop: an agent and its environment, turn by turn, until something ends it."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from turnstile.agents.base import Scaffold
from turnstile.agents.history import hinted
from turnstile.engines.base import Engine, RemoteEngine
from turnstile.engines.remote.downtime import DowntimeTracker, report_downtime
from turnstile.envs.base import Env, Step
from turnstile.errors import EngineError, InfrastructureError, SandboxError, VerifierError
from turnstile.tracking.board import EpisodeStatus
from turnstile.types import I32, JSON, Message, Sampling, Stage, Stop, Task, ToolSpec, Trajectory, Turn

T = TypeVar("T")
AWAY = 1800.0  # seconds that an engine may be away under one episode


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What ends an episode that does not end by itself. 0 means no limit."""

    turns: int = 8
    tokens: int = 0  # sampled in the whole episode
    context: int = 0  # held at once: prompt, observations and sampled tokens
    seconds: float = 300.0  # wall clock, of the turns; not of measuring at the end, nor while the engine is away
    measure_seconds: float = 3600.0  # of measuring; twice what the longest suite of tests here may take (1800 s)
    away: float = AWAY  # of all that the engine is away, by which the clock is put forward at most
    unparsed: int = 0  # turns in a row in which no action could be read


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """Which episode this is. Its random numbers depend on the task, `seed`, `number` and `stream` (where that is
    empty: `group`), on what is asked (`Seeds`), and on nothing else. `hint` stands in its prompt besides what the
    environment begins with."""

    group: str
    number: int
    seed: int
    stream: str = ""
    hint: str = ""


class Seeds:
    """Gives each request of an attempt its seed, which depends on the attempt, the prompt's ids, and how often the
    attempt has asked with that prompt before. So requests that are made side by side, or on branches, have seeds of
    their own, whatever their order and the platform."""

    def __init__(self, task: Task, attempt: Attempt) -> None:
        self._attempt = f"{attempt.seed}/{task.id}/{attempt.stream or attempt.group}/{attempt.number}"
        self._asked: Counter[str] = Counter()

    def draw(self, prompt_ids: I32) -> int:
        """The seed of the next request with this prompt, in [0, 2^56)."""
        prompt = hashlib.blake2b(prompt_ids.astype("<i4").tobytes(), digest_size=16).hexdigest()
        text = f"{self._attempt}/{prompt}/{self._asked[prompt]}"
        self._asked[prompt] += 1
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


async def play(
    task: Task,
    attempt: Attempt,
    *,
    env: Env,
    engine: Engine,
    session: str,
    scaffold: Scaffold,
    sampling: Sampling,
    limits: Limits,
    turned: Callable[[int, Turn], None] = lambda number, turn: None,
    moved: Callable[[EpisodeStatus], None] = lambda place: None,
    forgives: Callable[[Exception], bool] = lambda fault: False,
) -> Trajectory:
    """Plays one episode to its end and measures it; closes neither the session nor the environment. `turned` is told
    of each turn, numbered from 0, at every `Stage` that it reaches, `moved` where the episode is.

    A turn counts from the moment it is sampled, whether or not the environment answers it before the end.

    An infrastructure failure anywhere gives a trajectory with `Stop.ERROR`, the turns so far and the error's
    text; every other exception is a fault of the program and propagates, unless it is neither the engine's nor of
    `turned` and `forgives` says that it is to be taken in the same way.
    """
    episode = _Episode(task, attempt, env, engine, session, scaffold, sampling, limits, turned, moved)
    started = time.monotonic()
    signals: Mapping[str, JSON] = {}
    error = None
    try:
        clock = asyncio.timeout(limits.seconds or None)
        try:
            async with clock:
                stop = await episode.run(clock)
        except TimeoutError:
            if not clock.expired():
                raise  # the environment's own, and a fault
            if not episode.opened:
                raise SandboxError(f"the environment did not open within {limits.seconds:g} s") from None
            await episode.check_engine()
            stop = Stop.TIMEOUT
        moved(EpisodeStatus.GRADING)
        signals = await episode.measure()
    except InfrastructureError as failure:
        stop, error = Stop.ERROR, f"{type(failure).__name__}: {failure}"
    except Exception as fault:
        if episode.away is not None or episode.telling or not forgives(fault):
            raise  # one in the engine, or in the books, which other episodes share
        stop, error = Stop.ERROR, f"{type(fault).__name__}: {fault}"
    return Trajectory(
        task_id=task.id,
        group=attempt.group,
        attempt=attempt.number,
        turns=tuple(episode.turns),
        stop=stop,
        signals=signals,
        opening=episode.opening,
        tools=episode.tools,
        hint=attempt.hint,
        error=error,
        times={**episode.times, "total": time.monotonic() - started},
    )


class _Episode:
    """The state of one episode between its turns."""

    def __init__(
        self,
        task: Task,
        attempt: Attempt,
        env: Env,
        engine: Engine,
        session: str,
        scaffold: Scaffold,
        sampling: Sampling,
        limits: Limits,
        turned: Callable[[int, Turn], None],
        moved: Callable[[EpisodeStatus], None],
    ) -> None:
        self.turned, self.moved = turned, moved
        self.task, self.attempt, self.env, self.engine = task, attempt, env, engine
        self.session, self.scaffold, self.sampling, self.limits = session, scaffold, sampling, limits
        self.seeds = Seeds(task, attempt)
        self.opened = False
        self.away: DowntimeTracker | None = None  # of the request that is being made
        self.telling = False  # a turn is being written down
        self.cut = ""  # why the engine was away when the clock ended the episode
        self.opening: tuple[Message, ...] = ()
        self.tools: tuple[ToolSpec, ...] = ()
        self.turns: list[Turn] = []
        self.times = {"generate": 0.0, "environment": 0.0}

    async def run(self, clock: asyncio.Timeout) -> Stop:
        """Turns until an end; returns which. `clock` is put forward by the time in which the engine was away."""
        start = await self._timed("environment", self.env.reset(self.task))
        self.opened, self.opening, self.tools = True, tuple(start.messages), tuple(start.tools)
        renderer, parser = self.scaffold.renderer, self.scaffold.parser
        history = list(hinted(start.messages, self.attempt.hint))
        held = added = renderer.prompt(history, start.tools)
        fresh, sampled, unparsed = False, 0, 0
        while True:
            room = self._room(len(held), sampled)
            if isinstance(room, Stop):
                return room
            sampling = replace(self.sampling, max_tokens=room, stop=renderer.stop, seed=self.seeds.draw(held))
            with report_downtime(functools.partial(self._lost, clock)) as self.away:
                completion = await self._timed("generate", self.engine.generate(held, sampling, self.session))
            self.away = None
            message = parser.parse(renderer.text(completion.token_ids), start.tools)
            step = await self._act(
                Turn(context_ids=added, completion=completion, message=message, fresh=fresh, stage=Stage.SAMPLED)
            )
            sampled += len(completion.token_ids)
            unparsed = 0 if message.tool_calls else unparsed + 1
            stop = self._ended(step, unparsed)
            if stop is not None:
                return stop
            history.append(message)
            context = renderer.observation(history, step.messages, start.tools, completion.token_ids)
            history.extend(step.messages)
            added, fresh = context.ids, context.fresh
            held = added if fresh else np.concatenate([held, completion.token_ids, added])

    async def _act(self, turn: Turn) -> Step:
        """Has the environment take the turn's action. The turn is there before, and completed with the answer."""
        number = len(self.turns)
        self.turns.append(turn)
        self._tell(number, turn)
        self.turns[number] = turn = replace(turn, state_key=self.env.state_key(), stage=Stage.DELIVERED)
        self._tell(number, turn)
        began = time.monotonic()
        step = await self._timed("environment", self.env.step(turn.message))
        self.turns[number] = turn = replace(
            turn,
            observation=step.messages,
            rewards=step.rewards,
            signals=step.signals,
            seconds=time.monotonic() - began,
            stage=Stage.COMPLETED,
        )
        self._tell(number, turn)
        return step

    def _tell(self, number: int, turn: Turn) -> None:
        """Has the turn written down. What goes wrong with that is no fault of the environment's."""
        self.telling = True
        self.turned(number, turn)
        self.telling = False

    async def measure(self) -> Mapping[str, JSON]:
        """What came of it. Raises VerifierError where that takes longer than the limit."""
        began = time.monotonic()
        clock = asyncio.timeout(self.limits.measure_seconds or None)
        try:
            async with clock:
                return await self.env.measure()
        except TimeoutError:
            if not clock.expired():
                raise  # the environment's own, and a fault
            raise VerifierError(
                f"the environment did not measure the episode within {self.limits.measure_seconds:g} s; give its "
                "grader a time limit of its own, or raise episode.measure_seconds"
            ) from None
        finally:
            self.times["measure"] = time.monotonic() - began

    async def check_engine(self) -> None:
        """Raises EngineError where the clock ended a request that the engine was not answering, or ended the episode
        early because the engine had been away for too long."""
        if self.away is None and not self.cut:
            return
        if (
            self.away is not None
            and not self.cut
            and isinstance(self.engine, RemoteEngine)
            and not await self.engine.is_reachable(self.session)
        ):
            self.cut = "the server does not say that it is there"
            self.times["away"] = self.times.get("away", 0.0) + self.away.since_last()
        if self.cut:
            raise EngineError(f"episode.seconds were over while the model was away: {self.cut}")

    def _lost(self, clock: asyncio.Timeout, why: str, seconds: float) -> None:
        before = self.times.get("away", 0.0)
        self.times["away"] = before + seconds
        granted = min(seconds, max(0.0, self.limits.away - before))
        if clock.expired() or granted < seconds:
            self.cut = why
        if not clock.expired() and (when := clock.when()) is not None:
            clock.reschedule(when + granted)

    def _room(self, held: int, sampled: int) -> int | Stop:
        """How many tokens the next turn may sample, or why there is no next turn."""
        room = self.sampling.max_tokens
        if self.limits.context:
            if held >= self.limits.context:
                return Stop.CONTEXT
            room = min(room, self.limits.context - held)
        if self.limits.tokens:
            if sampled >= self.limits.tokens:
                return Stop.TOKENS
            room = min(room, self.limits.tokens - sampled)
        return room

    def _ended(self, step: Step, unparsed: int) -> Stop | None:
        if step.terminated:
            return Stop.SUBMITTED if step.submitted else Stop.DONE
        if self.limits.unparsed and unparsed >= self.limits.unparsed:
            return Stop.PARSE
        if step.truncated or (self.limits.turns and len(self.turns) >= self.limits.turns):
            return Stop.TURNS
        return None

    async def _timed(self, phase: str, work: Awaitable[T]) -> T:
        began = time.monotonic()
        self.moved(EpisodeStatus.GENERATING if phase == "generate" else EpisodeStatus.ACTING)
        try:
            return await work
        finally:
            self.times[phase] += time.monotonic() - began
