"""A checker for authors of environments. Run it in a test and expect an empty list."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from turnstile.envs.base import Env, Start, Step
from turnstile.envs.threads import Threads
from turnstile.errors import InfrastructureError
from turnstile.types import JSON, Message, Task, ToolCall, ToolSpec

_SAMPLES: Mapping[str, JSON] = {
    "string": "x", "integer": 1, "number": 0.5, "boolean": True, "array": [], "object": {}, "null": None,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _Episode:
    """The opening of one episode, (state key, action, answer) by turn, and its measurements."""

    start: Start
    turns: tuple[tuple[str, Message, Step], ...]
    signals: Mapping[str, JSON]


async def check_env(make_env: Callable[[], Env], task: Task, *, actions: Sequence[Message] | None = None) -> list[str]:
    """Play `task` several times and return the problems found, one per line.

    `actions` should be a sensible episode, preferably one that ends the task; by default every tool is called once,
    with arguments of its schema's types. The checks are that all returned values have the right form; that the same
    actions give the same episode, even if two episodes are interleaved; that in states with equal keys the same action
    gets the same answer; that garbage is answered without an exception; and that `measure` works at any time.
    InfrastructureError propagates, since it says nothing about the environment. Plain methods are called in threads, as
    in a run.
    """
    threads = Threads(workers=2)
    try:
        return await _problems(threads.around(make_env), task, actions)
    finally:
        await threads.close()


async def _problems(make_env: Callable[[], Env], task: Task, actions: Sequence[Message] | None) -> list[str]:
    try:
        start = await _opening(make_env, task)
        script = list(_each_tool(start.tools) if actions is None else actions)
        first = await _play(make_env, task, script)
        again, beside = await _play_two(make_env, task, script)
        garbage = _garbage(start.tools)
        strange = [await _play(make_env, task, [action, *script[:1]]) for action in garbage]
        twice = await _play(make_env, task, [*script, *script])
        unplayed = await _play(make_env, task, [])
    except InfrastructureError:
        raise
    except Exception as error:  # whatever the checked environment raises is the finding
        return [f"raised {type(error).__name__}: {error}; answer what the agent did, or raise InfrastructureError"]
    episodes = [first, again, beside, twice, *strange, unplayed]
    problems = _opening_problems(start)
    for episode in episodes:
        problems += _episode_problems(episode)
    if again != first:
        problems.append("the same actions on the same task gave another episode; take all chance from task.seed")
    elif beside != first:
        problems.append("two interleaved episodes disturb each other; keep no state outside the instance")
    problems += _key_problems(episodes)
    return list(dict.fromkeys(problems))


async def _opening(make_env: Callable[[], Env], task: Task) -> Start:
    env = make_env()
    try:
        return await env.reset(task)
    finally:
        await env.close()


async def _play(make_env: Callable[[], Env], task: Task, script: Sequence[Message]) -> _Episode:
    env = make_env()
    try:
        start = await env.reset(task)
        turns: list[tuple[str, Message, Step]] = []
        for action in script:
            key, step = env.state_key(), await env.step(action)
            turns.append((key, action, step))
            if step.terminated or step.truncated:
                break
        return _Episode(start=start, turns=tuple(turns), signals=await env.measure())
    finally:
        await env.close()


async def _play_two(make_env: Callable[[], Env], task: Task, script: Sequence[Message]) -> tuple[_Episode, _Episode]:
    """Play the script in two interleaved episodes, and return both."""
    one, two = make_env(), make_env()
    try:
        starts = [await env.reset(task) for env in (one, two)]
        turns: tuple[list[tuple[str, Message, Step]], ...] = ([], [])
        for action in script:
            for env, seen in zip((one, two), turns, strict=True):
                key, step = env.state_key(), await env.step(action)
                seen.append((key, action, step))
            if turns[0][-1][2].terminated or turns[0][-1][2].truncated:
                break
        first, second = [
            _Episode(start=start, turns=tuple(seen), signals=await env.measure())
            for start, seen, env in zip(starts, turns, (one, two), strict=True)
        ]
        return first, second
    finally:
        await one.close()
        await two.close()


def _each_tool(tools: Sequence[ToolSpec]) -> list[Message]:
    return [_calling(tool.name, _arguments(tool)) for tool in tools]


def _garbage(tools: Sequence[ToolSpec]) -> list[Message]:
    """Return messages like those of a model that has not yet learnt the format."""
    wrong = [_calling(tool.name, {}) for tool in tools]
    wrong += [_calling(tool.name, {name: [1] for name in _arguments(tool)}) for tool in tools]
    return [
        Message(role="assistant"),
        Message(role="assistant", content="\x00\ud83d \u2028 garbage"),
        _calling("no_such_tool", {"x": 1}),
        *wrong,
    ]


def _calling(name: str, arguments: Mapping[str, JSON]) -> Message:
    return Message(role="assistant", tool_calls=(ToolCall(id="call00000", name=name, arguments=arguments),))


def _arguments(tool: ToolSpec) -> dict[str, JSON]:
    properties: Mapping[str, Mapping[str, JSON]] = tool.schema.get("properties", {})
    return {name: _SAMPLES.get(str(schema.get("type", "string")), "x") for name, schema in properties.items()}


def _opening_problems(start: Start) -> list[str]:
    problems = []
    if not any(message.content for message in start.messages):
        problems.append("reset gives no message with content; the agent must be told something")
    if any(message.role == "assistant" for message in start.messages[-1:]):
        problems.append("reset's last message is the assistant's; end with what it is to answer")
    names = [tool.name for tool in start.tools]
    if len(set(names)) != len(names):
        problems.append(f"two tools share a name: {', '.join(names)}")
    problems += [
        f'the schema of tool {tool.name!r} is not a JSON schema with "type": "object"'
        for tool in start.tools
        if tool.schema.get("type") != "object" or not _is_json(tool.schema)
    ]
    return problems


def _episode_problems(episode: _Episode) -> list[str]:
    problems = []
    for key, _, step in episode.turns:
        if not isinstance(key, str):
            problems.append(f"state_key gives {type(key).__name__}, not a string")
        if any(message.role == "assistant" for message in step.messages):
            problems.append("step answers with a message of the assistant's; use the roles tool and user")
        if not _is_json(step.signals):
            problems.append(f"step's signals are not JSON: {step.signals!r}")
        if step.submitted and not step.terminated:
            problems.append("step says submitted but not terminated")
        for term, reward in step.rewards.items():
            if not isinstance(reward, int | float) or not math.isfinite(reward):
                problems.append(f"step reward {term!r} is {reward!r}, not a finite number")
    if not _is_json(episode.signals):
        problems.append(f"measure's signals are not JSON: {episode.signals!r}")
    return problems


def _key_problems(episodes: Sequence[_Episode]) -> list[str]:
    """Return a problem if an action was answered in two ways in states with the same key. Empty keys are ignored."""
    seen: dict[tuple[str, str], Step] = {}
    for episode in episodes:
        for key, action, step in episode.turns:
            known = seen.setdefault((key, repr(action)), step)
            if key and known != step:
                return [f"state key {key!r} stands for two states: the same action was answered in two ways"]
    return []


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
