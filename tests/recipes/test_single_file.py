"""The algorithm on one page and the library give the same gradient for the same episodes."""

from __future__ import annotations

import ast
import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from networks import keep_precision
from turnstile.batching.weights import token
from turnstile.credit.grpo import grpo
from turnstile.losses.ppo import ppo
from turnstile.rewards.base import Threshold
from turnstile.rewards.build import Scorer, make_term
from turnstile.trainer.learner import Learner, LearnerConfig, Objective
from turnstile.trainer.optim import constant
from turnstile.trainer.prepare import prepare
from turnstile.types import Completion, Group, Message, Sampling, Stop, Task, Trajectory, Turn

PATH = Path(__file__).parent.parent.parent / "recipes" / "single_file.py"
ATTEMPTS, SECRETS = 6, [1, 4, 7, 5]


@pytest.fixture(scope="module")
def page() -> Any:
    spec = importlib.util.spec_from_file_location("single_file", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["single_file"] = module
    spec.loader.exec_module(module)
    return module


def recorded(played: Any, group: str, attempt: int) -> Trajectory:
    """An episode of the page as the library records it."""
    turns = tuple(
        Turn(
            context_ids=np.array(turn.context, np.int32),
            completion=Completion(
                token_ids=np.array(turn.ids, np.int32),
                logprobs=np.array(turn.logprobs, np.float32),
                versions=np.zeros(len(turn.ids), np.int32),
                sampling=Sampling(),
                finish="stop",
                seconds=0.0,
            ),
            message=Message(role="assistant"),
            rewards={"consistent": reward},
        )
        for turn, reward in zip(played.turns, played.steps, strict=True)
    )
    return Trajectory(
        task_id=group, group=group, attempt=attempt, turns=turns, stop=Stop.DONE, signals={"outcome": played.outcome}
    )


def gradients(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("budget", [10_000, 60])
def test_gradients_agree(page: Any, budget: int) -> None:
    """Padded rows there, prefix trees here: the same gradient, to what float64 can say."""
    model = page.make_model(0)
    page.warm_start(model, random.Random(0))
    model = keep_precision(model.double())
    torch.manual_seed(3)
    played = page.play(model, [secret for secret in SECRETS for _ in range(ATTEMPTS)])
    with torch.no_grad():  # so that the ratio is not 1 everywhere
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    rewards = [page.gated(trajectory.outcome, trajectory.steps) for trajectory in played]
    rows = page.rows_of(played, rewards, ATTEMPTS)
    model.zero_grad()  # the warm start left some
    page.total_loss(model, rows, page.ppo).backward()
    expected = gradients(model)

    groups = [
        Group(
            id=f"g{g}",
            task=Task(id=f"g{g}", env="guess"),
            trajectories=tuple(recorded(played[g * ATTEMPTS + a], f"g{g}", a) for a in range(ATTEMPTS)),
        )
        for g in range(len(SECRETS))
    ]
    outcome = make_term("outcome", "signal", level=1, gate=Threshold(value=page.GATE))
    steps = make_term("consistent", "env", level=0)
    scores = Scorer(terms=(outcome, steps))(groups)
    assert [score.total for own in scores for score in own] == pytest.approx(rewards)
    advantages = grpo(groups, scores)
    prepared = prepare(groups, scores, advantages, drop_zero_advantage=True)
    assert any(score.withheld["consistent"].any() for own in scores for score in own)
    plan = LearnerConfig(lr=0.0, schedule=constant, warmup=0, total=1, clip=1e9, budget=budget)
    learner = Learner(model, list(model.parameters()), plan)
    found: list[torch.Tensor] = []
    learner.optimizer.register_step_pre_hook(lambda *_: found.append(gradients(model)))
    rows_there = [row for group in prepared.rows for row in group]
    assert len(rows_there) == len(rows)
    report, _, _ = learner.update(rows_there, Objective(loss=ppo, aggregation=token))
    assert 0 < report["loss/clipped"] < 1
    assert report["tokens/unique"] < report["tokens/rows"]
    assert float(expected.norm()) > 1e-3
    assert float((found[0] - expected).norm() / expected.norm()) < 1e-9


def test_recorded_logprobs_are_those_of_the_policy(page: Any) -> None:
    model = page.make_model(1)
    played = page.play(model, [1, 4, 7])
    for trajectory in played:
        row = page.row_of(trajectory, 1.0)
        ids = torch.tensor([row.ids])
        with torch.no_grad():
            logp = model(ids[:, :-1]).logits[0].log_softmax(dim=-1).gather(1, ids[0, 1:, None])[:, 0]
        mask = torch.tensor(row.mask[1:])
        torch.testing.assert_close(logp[mask], torch.tensor(row.logprobs[1:])[mask], rtol=0, atol=1e-5)


def test_by_hand(page: Any) -> None:
    assert page.gated(page.WON, [0.125, 0.0, 0.125]) == 1.25
    assert page.gated(page.LOST, [0.125, 0.125, 0.125]) == 0.0  # not above the gate
    assert page.gated(page.NOTHING, [0.0, 0.0, 0.0]) == -0.5
    assert page.grpo([0.0, 1.0, 0.0, 1.0]) == pytest.approx([-0.866024, 0.866024, -0.866024, 0.866024], abs=1e-5)
    assert page.grpo([0.5, 0.5, 0.5]) == [0.0, 0.0, 0.0]
    assert page.parse(page.encode("guess 3 \n")) == 3
    for text in ("guess 3", "guess guess \n", "3 \n", "\n", "find 3 \n"):
        assert page.parse(page.encode(text)) is None
    game = page.Game(5)
    assert [game.step(number) for number in (4, 3, 6)] == ["higher", "higher", "lower"]
    assert (game.consistent, game.over(), game.outcome()) == ([True, False, True], True, page.LOST)


@pytest.mark.slow
def test_it_learns_to_listen(page: Any) -> None:
    """Who does not listen wins 3 of 7 games at most. Seventy steps take seeds 0, 1 and 2 to .6 or more."""
    before, after = page.train(seed=0, steps=70)
    assert before < 0.45
    assert after > 0.55


def test_the_page_fits_its_promise() -> None:
    text = PATH.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 300
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert imported - sys.stdlib_module_names == {"torch", "transformers"}
