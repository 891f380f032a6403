"""The episode loop, in which an agent and its environment alternate turn by turn until the episode ends."""

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
from turnstile.agents.history import with_hint
from turnstile.engines.base import Engine, RemoteEngine
from turnstile.engines.remote.downtime import DowntimeTracker, report_downtime
from turnstile.envs.base import Env, Step, reached_rates
from turnstile.errors import EngineError, InfrastructureError, SandboxError, VerifierError
from turnstile.tracking.board import EpisodeStatus
from turnstile.types import I32, JSON, Message, Sampling, Stage, Stop, Task, ToolSpec, Trajectory, Turn

T = TypeVar("T")
MAX_DOWNTIME = 1800.0  # seconds that the engine may be down during one episode


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits that end an episode. 0 means no limit."""

    turns: int = 8
    tokens: int = 0  # tokens sampled in the whole episode
    context: int = 0  # tokens in the context: prompt, observations and sampled tokens
    seconds: float = 300.0  # wall-clock time of the turns, excluding the final measuring and engine downtime
    measure_seconds: float = 3600.0  # for the final measuring; twice what the environments here allow for grading
    max_downtime: float = MAX_DOWNTIME  # maximum engine downtime, in seconds, by which `seconds` is extended
    unparsed: int = 0  # turns in a row without a parsable action


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """Identifies an episode and thereby determines its random numbers.

    They depend only on the task, `seed`, `number`, `stream` (`group` if `stream` is empty), and the requests made (see
    `Seeds`). `hint` is added to the prompt that the environment gives.
    """

    group: str
    number: int
    seed: int
    stream: str = ""
    hint: str = ""


class Seeds:
    """Draws the seeds of an attempt's requests.

    A seed depends only on the attempt, the prompt's ids, and how often the attempt has already used that prompt.
    Parallel requests and branches therefore have their own seeds, independent of their order and of the platform.
    """

    def __init__(self, task: Task, attempt: Attempt) -> None:
        self._attempt = f"{attempt.seed}/{task.id}/{attempt.stream or attempt.group}/{attempt.number}"
        self._asked: Counter[str] = Counter()

    def draw(self, prompt_ids: I32) -> int:
        """Return the seed of the next request with this prompt, in [0, 2^56)."""
        prompt = hashlib.blake2b(prompt_ids.astype("<i4").tobytes(), digest_size=16).hexdigest()
        text = f"{self._attempt}/{prompt}/{self._asked[prompt]}"
        self._asked[prompt] += 1
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


async def play(  # noqa: PLR0913 - called in one place, by keyword
    task: Task,
    attempt: Attempt,
    *,
    env: Env,
    engine: Engine,
    session: str,
    scaffold: Scaffold,
    sampling: Sampling,
    limits: Limits,
    on_turn: Callable[[int, Turn], None] = lambda number, turn: None,
    on_status: Callable[[EpisodeStatus], None] = lambda status: None,
    tolerates: Callable[[Exception], bool] = lambda fault: False,
) -> Trajectory:
    """Play and measure one episode. The caller closes the session and the environment.

    `on_turn` is called with each turn, numbered from 0, at every `Stage` that it reaches; `on_status` is called with
    the episode's status. A turn counts from the moment it is sampled, even if the episode ends before the environment
    answers.

    An infrastructure failure at any point results in a trajectory with `Stop.ERROR`, the turns so far and the error's
    text. Any other exception is a program error. It ends the episode in the same way if `tolerates` accepts it and it
    comes from neither the engine nor `on_turn`; otherwise it propagates.
    """
    episode = _Episode(task, attempt, env, engine, session, scaffold, sampling, limits, on_turn, on_status)
    try:
        clock = asyncio.timeout(limits.seconds or None)
        try:
            async with clock:
                stop = await episode.run(clock)
        except TimeoutError:
            if not clock.expired():
                raise  # raised by the environment itself: an error of the program
            if not episode.opened:
                raise SandboxError(f"the environment did not open within {limits.seconds:g} s") from None
            await episode.check_engine()
            stop = Stop.TIMEOUT
        on_status(EpisodeStatus.GRADING)
        played = episode.to_trajectory(stop, await episode.measure())
        return replace(played, rates=reached_rates(env, played))
    except InfrastructureError as failure:
        error = f"{type(failure).__name__}: {failure}"
    except Exception as fault:
        if episode.downtime is not None or episode.reporting or not tolerates(fault):
            raise  # an error in the engine or in `on_turn`, which other episodes share
        error = f"{type(fault).__name__}: {fault}"
    return replace(episode.to_trajectory(Stop.ERROR, {}), error=error)


class _Episode:
    """The state of one episode while it is played."""

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
        on_turn: Callable[[int, Turn], None],
        on_status: Callable[[EpisodeStatus], None],
    ) -> None:
        self.on_turn, self.on_status = on_turn, on_status
        self.task, self.attempt, self.env, self.engine = task, attempt, env, engine
        self.session, self.scaffold, self.sampling, self.limits = session, scaffold, sampling, limits
        self.seeds = Seeds(task, attempt)
        self.started = time.monotonic()
        self.opened = False
        self.downtime: DowntimeTracker | None = None  # tracker of the request in flight
        self.reporting = False  # whether `on_turn` is being called
        self.downtime_reason = ""  # why the engine was down when the clock ended the episode
        self.opening: tuple[Message, ...] = ()
        self.tools: tuple[ToolSpec, ...] = ()
        self.turns: list[Turn] = []
        self.times = {"generate": 0.0, "environment": 0.0}

    async def run(self, clock: asyncio.Timeout) -> Stop:
        """Play turns until one ends the episode, and return the stop reason. Engine downtime extends `clock`."""
        start = await self._time_phase("environment", self.env.reset(self.task))
        self.opened, self.opening, self.tools = True, tuple(start.messages), tuple(start.tools)
        renderer, parser = self.scaffold.renderer, self.scaffold.parser
        history = list(with_hint(start.messages, self.attempt.hint))
        prompt_ids = added = renderer.prompt(history, start.tools)
        fresh, sampled, unparsed = False, 0, 0
        while True:
            budget = self._token_budget(len(prompt_ids), sampled)
            if isinstance(budget, Stop):
                return budget
            sampling = replace(self.sampling, max_tokens=budget, stop=renderer.stop, seed=self.seeds.draw(prompt_ids))
            with report_downtime(functools.partial(self._on_downtime, clock)) as self.downtime:
                completion = await self._time_phase(
                    "generate", self.engine.generate(prompt_ids, sampling, self.session)
                )
            self.downtime = None
            message = parser.parse(renderer.text(completion.token_ids), start.tools)
            step = await self._act(
                Turn(context_ids=added, completion=completion, message=message, fresh=fresh, stage=Stage.SAMPLED)
            )
            sampled += len(completion.token_ids)
            unparsed = 0 if message.tool_calls else unparsed + 1
            stop = self._stop_reason(step, unparsed)
            if stop is not None:
                return stop
            history.append(message)
            context = renderer.observation(history, step.messages, start.tools, completion.token_ids)
            history.extend(step.messages)
            added, fresh = context.ids, context.fresh
            prompt_ids = added if fresh else np.concatenate([prompt_ids, completion.token_ids, added])

    async def _act(self, turn: Turn) -> Step:
        """Pass the turn's message to the environment and return its step.

        The turn is recorded first and completed with the environment's answer, so an episode that ends in between keeps
        its sampled tokens.
        """
        number = len(self.turns)
        self.turns.append(turn)
        self._report_turn(number, turn)
        self.turns[number] = turn = replace(turn, state_key=self.env.state_key(), stage=Stage.DELIVERED)
        self._report_turn(number, turn)
        began = time.monotonic()
        step = await self._time_phase("environment", self.env.step(turn.message))
        self.turns[number] = turn = replace(
            turn,
            observation=step.messages,
            rewards=step.rewards,
            signals=step.signals,
            seconds=time.monotonic() - began,
            stage=Stage.COMPLETED,
        )
        self._report_turn(number, turn)
        return step

    def _report_turn(self, number: int, turn: Turn) -> None:
        """Pass the turn to `on_turn`, marking any error there as not the environment's."""
        self.reporting = True
        self.on_turn(number, turn)
        self.reporting = False

    async def measure(self) -> Mapping[str, JSON]:
        """Return the environment's final measurements. Raise VerifierError if they take longer than the limit."""
        began = time.monotonic()
        clock = asyncio.timeout(self.limits.measure_seconds or None)
        try:
            async with clock:
                return await self.env.measure()
        except TimeoutError:
            if not clock.expired():
                raise  # raised by the environment itself: an error of the program
            raise VerifierError(
                f"the environment did not measure the episode within {self.limits.measure_seconds:g} s; give its "
                "grader a time limit of its own, or raise episode.measure_seconds"
            ) from None
        finally:
            self.times["measure"] = time.monotonic() - began

    def to_trajectory(self, stop: Stop, signals: Mapping[str, JSON]) -> Trajectory:
        """Return the trajectory so far, with this stop reason and these signals."""
        return Trajectory(
            task_id=self.task.id,
            group=self.attempt.group,
            attempt=self.attempt.number,
            turns=tuple(self.turns),
            stop=stop,
            signals=signals,
            opening=self.opening,
            tools=self.tools,
            hint=self.attempt.hint,
            times={**self.times, "total": time.monotonic() - self.started},
        )

    async def check_engine(self) -> None:
        """Raise EngineError if the engine was down when the clock ended the episode.

        The engine counts as down if the clock ended a request that the server was not answering, or if downtime beyond
        `max_downtime` used up the episode's time.
        """
        if self.downtime is None and not self.downtime_reason:
            return
        if (
            self.downtime is not None
            and not self.downtime_reason
            and isinstance(self.engine, RemoteEngine)
            and not await self.engine.is_reachable(self.session)
        ):
            self.downtime_reason = "the server does not answer"
            self.times["downtime"] = self.times.get("downtime", 0.0) + self.downtime.since_last()
        if self.downtime_reason:
            raise EngineError(f"episode.seconds passed while the model's server was down: {self.downtime_reason}")

    def _on_downtime(self, clock: asyncio.Timeout, why: str, seconds: float) -> None:
        """Record the downtime and extend the clock by it, by at most `max_downtime` in total."""
        before = self.times.get("downtime", 0.0)
        self.times["downtime"] = before + seconds
        extension = min(seconds, max(0.0, self.limits.max_downtime - before))
        if clock.expired() or extension < seconds:
            self.downtime_reason = why
        if not clock.expired() and (when := clock.when()) is not None:
            clock.reschedule(when + extension)

    def _token_budget(self, context_tokens: int, sampled: int) -> int | Stop:
        """Return how many tokens the next turn may sample, or the stop reason if there is no next turn."""
        budget = self.sampling.max_tokens
        if self.limits.context:
            if context_tokens >= self.limits.context:
                return Stop.CONTEXT
            budget = min(budget, self.limits.context - context_tokens)
        if self.limits.tokens:
            if sampled >= self.limits.tokens:
                return Stop.TOKENS
            budget = min(budget, self.limits.tokens - sampled)
        return budget

    def _stop_reason(self, step: Step, unparsed: int) -> Stop | None:
        """Return why the episode ends after this step, or None if it continues."""
        if step.terminated:
            return Stop.SUBMITTED if step.submitted else Stop.DONE
        if self.limits.unparsed and unparsed >= self.limits.unparsed:
            return Stop.PARSE
        if step.truncated or (self.limits.turns and len(self.turns) >= self.limits.turns):
            return Stop.TURNS
        return None

    async def _time_phase(self, phase: str, work: Awaitable[T]) -> T:
        began = time.monotonic()
        self.on_status(EpisodeStatus.GENERATING if phase == "generate" else EpisodeStatus.ACTING)
        try:
            return await work
        finally:
            self.times[phase] += time.monotonic() - began
