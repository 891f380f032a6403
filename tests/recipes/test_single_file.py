"""The algorithm on one page and the library give the same gradient for the same episodes."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from turnstile.batching.weights import token
from turnstile.credit.grpo import grpo
from turnstile.losses.ppo import ppo
from turnstile.rewards.base import Threshold
from turnstile.rewards.build import Scorer, make_term
from turnstile.trainer.learner import Learner, Objective, Plan
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


def test_gradients_agree(page: Any) -> None:
    model = page.make_model(0)
    page.warm_start(model, random.Random(0))
    model = model.double()
    torch.manual_seed(3)
    played = page.play(model, [secret for secret in SECRETS for _ in range(ATTEMPTS)])
    with torch.no_grad():  # so that the ratio is not 1 everywhere
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
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
    advantages, _ = grpo(groups, scores, {}, {})
    prepared = prepare(groups, scores, advantages, drop_flat=True)
    learner = Learner(model, list(model.parameters()), Plan(lr=0.0, schedule=constant, warmup=0, total=1, clip=1e9))
    found: list[torch.Tensor] = []
    learner.optimizer.register_step_pre_hook(lambda *_: found.append(gradients(model)))
    learner.update([row for group in prepared.rows for row in group], Objective(loss=ppo, weigh=token))
    assert float(expected.norm()) > 1e-3
    assert float((found[0] - expected).norm() / expected.norm()) < 1e-6


def test_the_page_fits_its_promise() -> None:
    assert len(PATH.read_text().splitlines()) <= 300
    assert "turnstile" not in "".join(line for line in PATH.read_text().splitlines() if "import" in line)
