"""The policy that knows what came of an attempt, against a plain forward pass over the prompt that tells it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from made_groups import score
from modelserver import tiny_engine, tiny_network
from plays import SCAFFOLD, TASK, FakeEnv, player
from turnstile.agents.base import Scaffold
from turnstile.agents.history import with_hint
from turnstile.agents.parsing.hermes import HermesParser
from turnstile.agents.renderer import ChatRenderer
from turnstile.batching.rows import rows_of
from turnstile.batching.weights import token as token_weights
from turnstile.losses.distill import self_distill
from turnstile.trainer.feedback import Feedback
from turnstile.trainer.learner import Learner, LearnerConfig, Objective
from turnstile.trainer.optim import constant
from turnstile.types import Group, Row, Sampling, Stop

OUTCOMES = (0.0, 1.0, 1.0, 0.5)


async def played(words: Any, scaffold: Scaffold = SCAFFOLD) -> Group:
    plays = player(FakeEnv, engine=tiny_engine(words), scaffold=scaffold)
    (group,) = await plays.groups([TASK], len(OUTCOMES), label="train/1", seed=0)
    return group


def judged(group: Group) -> list[Any]:
    return [score(outcome, [0.0] * len(one.turns)) for outcome, one in zip(OUTCOMES, group.trajectories, strict=True)]


def rows(group: Group) -> list[Row]:
    return [
        row
        for one in group.trajectories
        for row in rows_of(one, [np.ones(len(turn.completion.token_ids), np.float32) for turn in one.turns])
    ]


def learner(words: Any) -> Learner:
    model = tiny_network(words)
    return Learner(model, list(model.parameters()), LearnerConfig(lr=1e-3, schedule=constant, warmup=0, total=9))


def feedback(words: Any, group: Group, scaffold: Scaffold = SCAFFOLD, **told: Any) -> Feedback:
    found = Feedback(learner(words), scaffold.renderer, **told)
    found.on_step_start([group], [judged(group)])
    return found


@torch.no_grad()
def plainly(words: Any, prompt: Any, row: Row, context: int) -> np.ndarray:
    """Log-probabilities f32[L] of a row's trained tokens behind another prompt than its first `context` tokens."""
    tokens = torch.from_numpy(np.concatenate([prompt, row.token_ids[context:]])).long()
    logp = tiny_network(words)(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0].numpy()
    found = np.concatenate([[0.0], logp])[len(prompt) :]
    return np.where(row.loss_mask, np.concatenate([np.zeros(context), found]), 0.0)


@pytest.mark.parametrize("kind", ["lines", "chat"])
async def test_the_prompt_tells_what_came_of_it(kind: str, bytes_: Any) -> None:
    scaffold = SCAFFOLD if kind == "lines" else Scaffold(ChatRenderer(bytes_), HermesParser())
    group = await played(bytes_, scaffold)
    group = replace(group, trajectories=tuple(replace(t, signals={"verdict": "bad"}) for t in group.trajectories))
    made = feedback(bytes_, group, scaffold, show=("verdict", "missing"), solution=False)
    text = "An attempt at this ended so:\n[verdict]\nbad\n\nok"
    found = made.provide(rows(group), Sampling())
    for row, marked, one in zip(rows(group), found, group.trajectories, strict=True):
        prompt = scaffold.renderer.prompt(with_hint(one.opening, text), one.tools)
        expected = plainly(bytes_, prompt, row, len(one.turns[0].context_ids))
        assert marked.extras["feedback_logprobs"] == pytest.approx(expected, abs=1e-4)
        assert np.array_equal(marked.token_ids, row.token_ids)
        assert np.abs(expected - row.logprobs)[row.loss_mask].max() > 0.05  # or it would say nothing


async def test_an_attempt_that_earned_more_is_shown(bytes_: Any) -> None:
    group = await played(bytes_)
    told = feedback(bytes_, group, last=False)
    texts = [told.text(group, judged(group), place) for place in range(4)]
    assert texts[1:3] == ["", ""]  # the best have nothing to learn from
    assert texts[0] == texts[3]
    assert texts[0].startswith("Another attempt did better:\n<episode>\n[user]\nGo.")
    lost = [replace(one, outcome=None, total=9.0) for one in judged(group)]
    assert told.text(group, [judged(group)[0], *lost[1:]], 0) == ""


async def test_feedback_is_bounded(bytes_: Any) -> None:
    group = await played(bytes_)
    long = replace(group.trajectories[0], signals={"log": "x" * 9000})
    group = replace(group, trajectories=(long, *group.trajectories[1:]))
    text = feedback(bytes_, group, show=("log",), chars=600).text(group, judged(group), 0)
    assert "characters left out" in text
    assert len(text) < 900


async def test_without_feedback_nothing_is_learned(bytes_: Any) -> None:
    group = await played(bytes_)
    made = feedback(bytes_, group, last=False, solution=False)
    found = made.provide(rows(group), Sampling())
    ours = made._learner
    before = [parameter.detach().clone() for parameter in ours.parameters]
    report, _, _ = ours.update(found, Objective(loss=self_distill, aggregation=token_weights))
    assert report["loss/kl_feedback"] == pytest.approx(0.0, abs=1e-6)
    assert report["optim/grad_norm"] == pytest.approx(0.0, abs=1e-5)
    assert all(torch.allclose(a, b, atol=2e-3) for a, b in zip(before, ours.parameters, strict=True))


async def test_feedback_without_room_is_told_once_and_teaches_nothing(
    bytes_: Any, caplog: pytest.LogCaptureFixture
) -> None:
    group = await played(bytes_)
    made, none = feedback(bytes_, group), feedback(bytes_, group, last=False, solution=False)
    made._window = 80
    found, plain = (one.provide(rows(group), Sampling()) for one in (made, none))
    for row, other in zip(found, plain, strict=True):
        assert row.extras["feedback_logprobs"] == pytest.approx(other.extras["feedback_logprobs"], abs=1e-5)
    (said,) = caplog.records
    assert "the model's window holds 80: nothing is learned from it there; lower loss.feedback.chars" in said.message


async def test_learning_from_it_goes_towards_it(bytes_: Any) -> None:
    group = await played(bytes_)
    made = feedback(bytes_, group)
    found = made.provide(rows(group), Sampling())
    objective = Objective(loss=self_distill, aggregation=token_weights)
    reports = [made._learner.update(found, objective)[0]["loss/kl_feedback"] for _ in range(8)]
    assert reports[-1] < reports[0]


async def test_a_context_that_was_rewritten_has_its_feedback_too(bytes_: Any) -> None:
    group = await played(bytes_)
    one = group.trajectories[0]
    said = (one.turns[0].message, *one.turns[0].observation)
    again = SCAFFOLD.renderer.prompt((*one.opening, *said), one.tools)
    turns = (one.turns[0], replace(one.turns[1], fresh=True, context_ids=again), *one.turns[2:])
    fresh = replace(one, turns=turns, stop=Stop.TURNS)
    group = replace(group, trajectories=(fresh, *group.trajectories[1:]))
    made = feedback(bytes_, group, solution=False)
    first, second, *_ = rows(group)
    found = made.provide([first, second], Sampling())
    text = "An attempt at this ended so:\nok"
    messages = (*with_hint(one.opening, text), *said)
    expected = plainly(bytes_, SCAFFOLD.renderer.prompt(messages, one.tools), second, len(again))
    assert found[1].extras["feedback_logprobs"] == pytest.approx(expected, abs=1e-4)
