"""Episodes that follow a script: demonstrations to learn from, and policies to compare with a model."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from turnstile.agents.base import Parser, Scaffold
from turnstile.config import Kind, Recipe
from turnstile.engines.scripted import ScriptedEngine
from turnstile.errors import ConfigError, TaskError
from turnstile.records.record import label_of
from turnstile.rollout.failures import Failures
from turnstile.runs.run_folder import FINAL, UNTOUCHED, WARM
from turnstile.types import Group, Message, Stop, Task, ToolSpec, Trajectory
from turnstile.wiring.agent import make_player
from turnstile.wiring.kinds import bind, takes
from turnstile.wiring.world import World

Act = Callable[[Sequence[Message]], Message]


GIVEN = ("task", "rng")
MODEL = "model"
"""The name that selects the model where a policy's name is expected."""


def check_scripts(recipe: Recipe) -> None:
    """Raise ConfigError if a demonstrator or a policy cannot be used, before anything is played."""
    if recipe.sft.demos:
        bind("demonstrator", recipe.sft.demonstrator, given=GIVEN)
    check_policies(recipe)


def check_policies(recipe: Recipe) -> None:
    """Raise ConfigError if a policy cannot be used, or if its name is invalid or taken."""
    labels: dict[str, str] = {}
    for name, kind in recipe.eval.policies.items():
        if name in (MODEL, UNTOUCHED, WARM, FINAL) or not re.fullmatch(r"(?!step[-_])[\w-]+", name):
            raise ConfigError(
                f"eval.policies: {name!r} cannot be a policy's name; take letters, digits, - and _, and none of "
                f"{MODEL}, {UNTOUCHED}, {WARM}, {FINAL} and step-..., which are the model and its own evaluations"
            )
        if (other := labels.setdefault(label_of(name), name)) != name:
            raise ConfigError(
                f"eval.policies: {other!r} and {name!r} would be recorded under one label, {label_of(name)}; "
                "rename one of them"
            )
        bind("policy", kind, given=GIVEN)


async def demonstrate(
    recipe: Recipe, world: World, scaffold: Scaffold, tasks: Sequence[Task], done: Callable[[Trajectory], None]
) -> list[Group]:
    """Play `sft.demos` oracle episodes, and return each as a group of one.

    If there are fewer tasks, they are used again. Turns that a demonstration only shows are marked as not trainable.
    """
    demonstrator = bind("demonstrator", recipe.sft.demonstrator, given=GIVEN)
    rng = random.Random(f"demos/{recipe.seed}")
    chosen: list[Task] = []
    while len(chosen) < recipe.sft.demos:
        chosen += rng.sample(list(tasks), min(len(tasks), recipe.sft.demos - len(chosen)))
    scripts = [demonstrator(task, rng) for task in chosen]
    played = await play_scripts(
        recipe,
        world,
        scaffold,
        chosen,
        [_reader(task, [step.message for step in script]) for task, script in zip(chosen, scripts, strict=True)],
        label="demos",
        done=done,
    )
    return [
        _mark_trainable(group, [step.trainable for step in script])
        for group, script in zip(played, scripts, strict=True)
    ]


async def play_policy(
    recipe: Recipe,
    world: World,
    scaffold: Scaffold,
    kind: Kind,
    tasks: Sequence[Task],
    done: Callable[[Trajectory], None],
) -> list[Group]:
    """Play one episode of each task with the policy that `kind` names."""
    policy = bind("policy", kind, given=GIVEN)

    def act(task: Task) -> Act:
        agent: Act
        if takes(policy, "rng"):
            agent = policy(task, rng=random.Random(f"{kind.kind}/{recipe.seed}/{task.id}"))
        else:
            agent = policy(task)
        return agent

    agents = [act(task) for task in tasks]
    return await play_scripts(recipe, world, scaffold, tasks, agents, label=kind.kind, done=done)


async def play_scripts(
    recipe: Recipe,
    world: World,
    scaffold: Scaffold,
    tasks: Sequence[Task],
    acts: Sequence[Act],
    *,
    label: str,
    done: Callable[[Trajectory], None],
) -> list[Group]:
    """Play one episode of each task, with actions from `acts` written in the syntax of the scaffold's parser."""
    tools = await _tools(world, tasks[0])

    def speak(session: str, turn: int, prompt_ids: Any) -> str:
        place = int(session.partition("/")[2].partition("/")[0])
        return write_action(tasks[place], acts[place](()), scaffold.parser, tools)

    engine = ScriptedEngine(scaffold.renderer, speak)
    player = make_player(recipe, world, scaffold, engine, recipe.episode.context)
    player = replace(player, retries=0, failures=Failures())  # a script can be read only once
    return await player.groups(tasks, 1, label=label, seed=recipe.seed, done=done)


def write_action(task: Task, message: Message, parser: Parser, tools: Sequence[ToolSpec]) -> str:
    """Return a script's action in the agent's syntax. Raises TaskError if the parser would read another action."""
    text = parser.write(message, tools)
    if _calls(parser.parse(text, tools)) != _calls(message):
        raise TaskError(
            f"task {task.id}: its script's action {text!r} cannot be said in the syntax of this agent; for actions of "
            "several lines take agent.renderer=chat and agent.parser=hermes, or leave such tasks out, for repository "
            "tasks with tasks.where={unique=true}"
        )
    return text


def _calls(message: Message) -> list[tuple[str, dict[str, str]]]:
    """Return a message's tool calls, with their arguments as text, for comparison."""
    return [(call.name, {key: str(value) for key, value in call.arguments.items()}) for call in message.tool_calls]


async def _tools(world: World, task: Task) -> Any:
    env = world.make_env()
    try:
        return (await env.reset(task)).tools
    finally:
        await env.close()


def _reader(task: Task, messages: Sequence[Message]) -> Act:
    """Return an agent that says `messages` one by one, and raises TaskError if the episode needs more."""
    rest = iter(messages)

    def act(_: Sequence[Message]) -> Message:
        message = next(rest, None)
        if message is None:
            raise TaskError(
                f"demonstration of {task.id}: its {len(messages)} actions did not end the episode; check that the "
                "demonstrator has the environment's knobs and that the tokenizer knows every character of its actions"
            )
        return message

    return act


def _mark_trainable(group: Group, trainable: Sequence[bool]) -> Group:
    """Return a group of one with its turns marked as trainable or not.

    Raises TaskError if the episode failed or ended before its script did, or if an action was cut short.
    """
    (played,) = group.trajectories
    cut = [turn.message.content for turn in played.turns if turn.completion.finish == "length"]
    if cut:
        raise TaskError(f"demonstration of {group.task.id}: {cut[0]!r} was cut; raise sampling.max_tokens")
    if len(played.turns) != len(trainable) or played.stop is Stop.ERROR:
        why = played.error or f"it ended ({played.stop.value}) after {len(played.turns)} of {len(trainable)} actions"
        raise TaskError(f"demonstration of {group.task.id}: {why}; raise episode.turns or check the task")
    turns = tuple(replace(turn, trainable=flag) for turn, flag in zip(played.turns, trainable, strict=True))
    return replace(group, trajectories=(replace(played, turns=turns),))
