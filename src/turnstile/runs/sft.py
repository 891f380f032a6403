"""The stages before the first RL step: baselines, demonstrations and conversations, and training on them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from turnstile.config import Kind, Recipe
from turnstile.errors import ReplayError, TaskError
from turnstile.records.record import REHEARSAL, read_record
from turnstile.runs.run_folder import UNTOUCHED
from turnstile.runs.scripted import demonstrate
from turnstile.runs.session import RunContext, counter
from turnstile.tasks.conversations.conversation import Conversation
from turnstile.tasks.conversations.source import read_conversations
from turnstile.tasks.conversations.trajectories import TokenizedConversations, to_trajectories
from turnstile.trainer.learner import Learner, LearnerConfig, Objective
from turnstile.trainer.sft import demo_rows, warm_start
from turnstile.types import F32, Group, Score, Task, Trajectory
from turnstile.wiring.agent import Agent
from turnstile.wiring.kinds import bind


def read_recipe_conversations(recipe: Recipe) -> list[Conversation]:
    """Return the recipe's conversations to learn from. Raises TaskError, naming file and row, if one cannot be read."""
    return read_conversations(recipe.sft.conversations) if recipe.sft.conversations else []


async def baselines_and_warm_start(run: RunContext, learner: Learner, conversations: Sequence[Conversation]) -> None:
    """Run the stages before the first RL step: the baselines, then the warm start."""
    recipe = run.recipe
    for name, kind in recipe.eval.policies.items():
        await run.compare(name, kind, run.heldout)
    if recipe.eval.before:
        few = recipe.eval.baseline_tasks or len(run.heldout)
        await run.evaluate(UNTOUCHED, run.heldout[:few], samples=1)
    if not recipe.sft.wanted:
        return
    with run.timed("demonstrations"):
        demos = [*await _demonstrations(run), *_conversations(run, conversations)]
    with run.timed("warm start"):
        _learn_demos(run, learner, demos)


def learn_recorded(run: RunContext, learner: Learner, recorded: Path) -> None:
    """Repeat the warm start of another run from its record. Raises ReplayError if that has no demonstrations."""
    if not run.recipe.sft.wanted:
        return
    demos: list[Trajectory] = []
    for entry in read_record(recorded, phase="warmstart"):
        if entry.label == REHEARSAL:
            continue
        run.recorder.write(0, "warmstart", entry.group, entry.scores, label=entry.label)
        demos += entry.group.trajectories
    if not demos:
        raise ReplayError(f"run {str(recorded)!r} has recorded no demonstrations, and its recipe wants some")
    with run.timed("warm start"):
        _learn_demos(run, learner, demos)


async def _demonstrations(run: RunContext) -> list[Trajectory]:
    """Play, score and record demonstrations, and return them."""
    number = run.recipe.sft.demos
    if not number:
        return []
    done = counter(run.tracker, "playing demonstrations", number)
    demos = await demonstrate(run.recipe, run.world, run.agent.scaffold, run.train_tasks, done)
    for group, own in zip(demos, run.scorer(demos), strict=True):
        run.recorder.write(0, "warmstart", group, own)
    return [group.trajectories[0] for group in demos]


def _conversations(run: RunContext, conversations: Sequence[Conversation]) -> list[Trajectory]:
    """Return conversations as the agent's trajectories, after recording them under a label of their own.

    Their outcome is 1 if they are marked as resolved, otherwise 0.
    """
    if not conversations:
        return []
    done = counter(run.tracker, "reading conversations", len(conversations))
    played = play_conversations(run.recipe, conversations, run.agent, done)
    run.tracker.say(played.summary())
    for item in played.trajectories:
        group = Group(id=item.group, task=Task(id=item.task_id, env=""), trajectories=(item,))
        outcome = float(bool(item.signals.get("resolved")))
        score = Score(outcome={"agent": outcome}, turn=np.zeros(len(item.turns), np.float32), total=outcome)
        run.recorder.write(0, "warmstart", group, [score], label="conversations")
    return played.trajectories


def play_conversations(
    recipe: Recipe,
    conversations: Sequence[Conversation],
    agent: Agent,
    done: Callable[[Trajectory], None] = lambda trajectory: None,
) -> TokenizedConversations:
    """Return conversations as the agent's trajectories. Raises TaskError if none of them can be learned from."""
    warm = recipe.sft
    played = to_trajectories(
        conversations,
        agent.scaffold,
        context=agent.context,
        cut=warm.too_long == "cut",
        controls=agent.tokenizer.all_special_tokens,
        done=done,
    )
    if conversations and not played.trajectories:
        why = "; ".join(f"{count} of them: {why}" for why, count in played.left_out.most_common())
        raise TaskError(
            f"{warm.conversations}: nothing of its {len(conversations)} conversations can be learned ({why}); the "
            f"agent's renderer is {recipe.agent.renderer.kind!r}, its parser {recipe.agent.parser.kind!r}, its context "
            f"{agent.context} tokens"
        )
    return played


def _learn_demos(run: RunContext, learner: Learner, demos: Sequence[Trajectory]) -> None:
    """Do the supervised warm start. It has its own optimiser, so that RL begins without optimiser state."""
    warm = run.recipe.sft
    rows = demo_rows(demos, functools.partial(_key_weights, weight=warm.key_weight))
    steps = warm.epochs * -(-len(rows) // warm.batch)
    plan = LearnerConfig(
        lr=warm.lr,
        schedule=bind("schedule", Kind(kind="linear")),
        warmup=warm.warmup,
        total=steps,
        clip=run.recipe.train.clip,
        budget=run.recipe.train.max_tokens_per_microbatch,
        checkpointing=run.recipe.train.checkpointing,
    )
    objective = Objective(loss=bind("loss", Kind(kind="sft")), aggregation=bind("loss_aggregation", Kind(kind="token")))

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
    run.engine.publish(0)


def _key_weights(demo: Trajectory, turn: int, *, weight: float) -> F32:
    """Return the weights of a turn's tokens: `weight` for the first, which decides the action, and 1 for the rest."""
    weights = np.ones(len(demo.turns[turn].completion.token_ids), np.float32)
    weights[:1] = weight
    return weights
