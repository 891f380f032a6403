"""What comes before the first RL step: the baselines, the demonstrations, and learning from them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from turnstile.build.kinds import bind
from turnstile.build.run_folder import UNTOUCHED
from turnstile.build.scripts import demonstrate
from turnstile.build.session import Run, counter
from turnstile.config import Kind
from turnstile.trainer.learner import Learner, Objective, Plan
from turnstile.trainer.warmstart import demo_rows, warm_start
from turnstile.types import F32, Trajectory


async def baselines_and_warm_start(run: Run, learner: Learner) -> None:
    """What comes before the first RL step: the baselines, then the warm start."""
    recipe = run.recipe
    for name, kind in recipe.eval.policies.items():
        await run.compare(name, kind, run.heldout)
    if recipe.eval.before:
        few = recipe.eval.baseline_tasks or len(run.heldout)
        await run.evaluate(UNTOUCHED, run.heldout[:few], samples=1)
    if not recipe.warmstart.demos:
        return
    done = counter(run.tracker, "playing demonstrations", recipe.warmstart.demos)
    with run.timed("demonstrations"):
        demos = await demonstrate(recipe, run.world, run.agent.scaffold, run.train_tasks, done)
    scores = run.scorer(demos)
    for group, own in zip(demos, scores, strict=True):
        run.recorder.write(0, "warmstart", group, own)
    with run.timed("warm start"):
        _learn_demos(run, learner, [group.trajectories[0] for group in demos])


def _learn_demos(run: Run, learner: Learner, demos: Sequence[Trajectory]) -> None:
    """The supervised warm start, with an optimiser of its own so that RL begins with fresh moments."""
    warm = run.recipe.warmstart
    rows = demo_rows(demos, functools.partial(_key_weights, weight=warm.key_weight))
    steps = warm.epochs * -(-len(rows) // warm.batch)
    plan = Plan(
        lr=warm.lr,
        schedule=bind("schedule", Kind(kind="linear")),
        warmup=warm.warmup,
        total=steps,
        clip=run.recipe.train.clip,
        budget=run.recipe.train.budget,
    )
    objective = Objective(loss=bind("loss", Kind(kind="sft")), weigh=bind("weights", Kind(kind="token")))

    def say(done: int, total: int, metrics: dict[str, float]) -> None:
        run.tracker.progress("warm start", done, total)
        if done % max(1, total // 5) == 0:
            run.tracker.say(f"warm start {done}/{total}: loss {metrics['loss/total']:.3f}")

    warm_start(
        Learner(run.agent.model, learner.parameters, plan),
        rows,
        objective,
        epochs=warm.epochs,
        batch=warm.batch,
        seed=run.recipe.seed,
        report=say,
    )
    run.agent.engine.publish(0)


def _key_weights(demo: Trajectory, turn: int, *, weight: float) -> F32:
    """1 for every token, `weight` for the first of a turn: it decides which action is taken."""
    weights = np.ones(len(demo.turns[turn].completion.token_ids), np.float32)
    weights[:1] = weight
    return weights
