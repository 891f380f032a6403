"""The policy's probability of the task's answer during an episode, from which `information_gain` is computed."""

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
from turnstile.rewards.graders import Stateless, with_signals
from turnstile.types import I32, Group, Stop, Task, Trajectory

PLACE = "{answer}"


class AnswerProbabilities(Stateless):
    """Writes answer_probabilities [p_0, ..., p_K], the policy's probabilities of the answer (arXiv 2510.14967).

    p_0 is the probability of the task's answer before the first turn and p_t that after turn t (IGPO), for the reward
    `information_gain`. The engine that plays computes p_t by teacher forcing, with the weights of the step: the agent's
    context at the beginning of turn t + 1 is followed by `form` up to its {answer}, then by the answer, which is
    `data[key]` of the task. p_t is exp of the mean log-probability of the answer's tokens, or of their sum with `mean =
    False`. Log-probabilities are the model's own, at temperature 1. Scoring an answer costs as much as decoding its
    tokens, K + 1 times per episode.

    A p_t is None if its context and answer exceed the model's window, for example after an episode that filled it. The
    whole signal is None for an episode without turns, and if no model plays. K counts the turns that the environment
    answered. Raises ConfigError for a task without an answer, for a `form` without its placeholder, and if the engine
    cannot score given tokens.
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
            lead, answer = self._form_and_answer_ids(group.task, tokenizer)
            anchor = engine.open(group.id)  # keeps what the attempts have in common until all are done
            try:
                jobs = [self._episode(engine, one, lead, answer) for one in group.trajectories]
                found = list(await asyncio.gather(*jobs))
            finally:
                engine.close(anchor)
        pairs = zip(group.trajectories, found, strict=True)
        return replace(group, trajectories=tuple(with_signals(one, answer_probabilities=known) for one, known in pairs))

    def check(self, task: Task) -> None:
        """Raise ConfigError for a task without an answer."""
        self._answer(task)

    def _answer(self, task: Task) -> str:
        answer = task.data.get(self._key)
        if answer is None or not str(answer).strip():
            raise ConfigError(
                f"grader 'answer_probabilities': task {task.id!r} has no {self._key!r} in its data (there: "
                f"{', '.join(task.data) or 'nothing'})"
            )
        return str(answer).strip()

    def _form_and_answer_ids(self, task: Task, tokenizer: Tokenizer) -> tuple[I32, I32]:
        """Return the ids before the answer and those of the answer. Blanks between the two belong to the answer."""
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
        if trajectory.without_open_turn is trajectory:  # else what follows the last turn is unknown
            prompts.append(self._next_context(trajectory))
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

    def _next_context(self, trajectory: Trajectory) -> I32:
        """Return the context that the agent would have in one more turn."""
        assert self._renderer is not None
        last = trajectory.turns[-1]
        history = (*messages_before(trajectory, len(trajectory.turns) - 1), last.message)
        sampled = last.completion.token_ids
        context = self._renderer.observation(history, last.observation, trajectory.tools, sampled)
        held = ids_before(trajectory)[-1]
        return context.ids if context.fresh else np.concatenate([held, sampled, context.ids])
