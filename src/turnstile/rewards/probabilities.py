"""How likely the policy finds the task's answer as an episode goes on: what `information_gain` is computed from."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from turnstile.agents.base import Renderer, Tokenizer
from turnstile.agents.history import ids_before, messages_before
from turnstile.engines.base import Engine, ScoringEngine
from turnstile.errors import ConfigError
from turnstile.rewards.graders import Stateless, told
from turnstile.types import I32, Group, Stop, Task, Trajectory

PLACE = "{answer}"


class AnswerProbabilities(Stateless):
    """Writes answer_probabilities, [p_0, ..., p_K]: the policy's own probability of the task's answer before the first
    turn and after each (IGPO, arXiv 2510.14967), for the reward `information_gain`.

    p_t is asked of the engine that plays, with the weights of the step, by teacher forcing: behind what the agent held
    when turn t + 1 would begin stands `form` up to its {answer}, and the answer is `data[key]` of the task. It is exp
    of the mean log-probability of the answer's tokens; of their sum with `mean = False`. Log-probabilities are the
    model's own, at temperature 1. An answer costs as many tokens of decoding as it has, K + 1 times an episode.

    A p_t whose question and answer reach past the model's window is None, as after an episode that filled it. None in
    place of all of them for an episode without turns, and where no model plays. K counts the turns that the
    environment answered. Raises ConfigError for a task without an answer, for a `form` without its place, and where
    the engine cannot tell.
    """

    def __init__(
        self,
        *,
        engine: Engine | None,
        renderer: Renderer | None,
        tokenizer: Tokenizer | None,
        key: str = "answer",
        form: str = "The answer is {answer}",
        mean: bool = True,
    ) -> None:
        if form.count(PLACE) != 1:
            raise ConfigError(f"grader 'answer_probabilities' wants {PLACE} once in its form, got {form!r}")
        if engine is not None and not isinstance(engine, ScoringEngine):
            raise ConfigError(
                "grader 'answer_probabilities' asks how likely given tokens are, which only a model in this process "
                f"tells, and {type(engine).__name__} does not: play with engine.kind = 'transformers'"
            )
        self._engine, self._renderer, self._tokenizer = engine, renderer, tokenizer
        self._key, self._form, self._mean = key, form, mean

    async def grade(self, groups: Sequence[Group], step: int | None) -> list[Group]:
        return [await self._group(group) for group in groups]

    async def _group(self, group: Group) -> Group:
        engine, tokenizer = self._engine, self._tokenizer
        if engine is None or tokenizer is None:
            found: list[list[float | None] | None] = [None] * len(group.trajectories)
        else:
            lead, answer = self._words(group.task, tokenizer)
            anchor = engine.open(group.id)  # keeps what the attempts have in common until all are done
            try:
                jobs = [self._episode(engine, one, lead, answer) for one in group.trajectories]
                found = list(await asyncio.gather(*jobs))
            finally:
                engine.close(anchor)
        pairs = zip(group.trajectories, found, strict=True)
        return replace(group, trajectories=tuple(told(one, answer_probabilities=known) for one, known in pairs))

    def check(self, task: Task) -> None:
        """Raises ConfigError for a task without an answer."""
        self._answer(task)

    def _answer(self, task: Task) -> str:
        answer = task.data.get(self._key)
        if answer is None or not str(answer).strip():
            raise ConfigError(
                f"grader 'answer_probabilities': task {task.id!r} has no {self._key!r} in its data (there: "
                f"{', '.join(task.data) or 'nothing'})"
            )
        return str(answer).strip()

    def _words(self, task: Task, tokenizer: Tokenizer) -> tuple[I32, I32]:
        """The ids before the answer, and the answer's; blanks between the two are the answer's, as tokens have it."""
        lead = self._form.partition(PLACE)[0]
        bare = lead.rstrip(" ")
        texts = (bare, f"{lead[len(bare) :]}{self._answer(task)}")
        before, asked = (tokenizer.encode(text, add_special_tokens=False) if text else [] for text in texts)
        return np.array(before, np.int32), np.array(asked, np.int32)

    async def _episode(
        self, engine: Engine, trajectory: Trajectory, lead: I32, answer: I32
    ) -> list[float | None] | None:
        if trajectory.stop is Stop.ERROR or not trajectory.turns:
            return None
        prompts = ids_before(trajectory)
        if trajectory.without_open_turn is trajectory:  # else nobody knows what stands behind the last turn
            prompts.append(self._behind(trajectory))
        jobs = [self._one(engine, trajectory.group, np.concatenate([prompt, lead]), answer) for prompt in prompts]
        found = list(await asyncio.gather(*jobs))
        return None if all(value is None for value in found) else found

    async def _one(self, engine: Engine, share: str, prompt: I32, answer: I32) -> float | None:
        assert isinstance(engine, ScoringEngine)
        if len(prompt) + len(answer) > engine.window():
            return None
        session = engine.open(share)
        try:
            logprobs = (await engine.score(prompt, answer, session)).astype(np.float64)
        finally:
            engine.close(session)
        return min(1.0, math.exp(logprobs.mean() if self._mean else logprobs.sum()))

    def _behind(self, trajectory: Trajectory) -> I32:
        """What the agent would hold if there were a turn more."""
        assert self._renderer is not None
        last = trajectory.turns[-1]
        history = (*messages_before(trajectory, len(trajectory.turns) - 1), last.message)
        sampled = last.completion.token_ids
        context = self._renderer.observation(history, last.observation, trajectory.tools, sampled)
        held = ids_before(trajectory)[-1]
        return context.ids if context.fresh else np.concatenate([held, sampled, context.ids])
