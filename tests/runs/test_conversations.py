"""From the files of others to a model that has learned from them: import, warm start, record, dry run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

import guess_run
import turnstile
from turnstile.cli.main import run as run_command
from turnstile.config import Recipe
from turnstile.envs.guess import GuessEnv, guess_tasks, oracle
from turnstile.errors import TaskError
from turnstile.records.record import read_record
from turnstile.runs.dry_run import dry_run
from turnstile.types import JSON, Message, Task


async def played(task: Task) -> list[Message]:
    """What the oracle and the game say to each other."""
    env, act = GuessEnv(), oracle(task)
    start = await env.reset(task)
    said = list(start.messages)
    new: Sequence[Message] = said
    while True:
        said.append(act(new))
        step = await env.step(said[-1])
        said += step.messages
        new = step.messages
        if step.terminated:
            return said


def as_chat(messages: Sequence[Message]) -> list[dict[str, JSON]]:
    rows: list[dict[str, JSON]] = []
    for message in messages:
        calls = [
            {"id": "call_a", "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
            for c in message.tool_calls
        ]
        rows.append({"role": message.role, "content": message.content, "tool_calls": calls or None})
    return rows


def as_sharegpt(messages: Sequence[Message]) -> list[dict[str, JSON]]:
    names = {"user": "human", "tool": "observation"}
    return [
        {"from": "function_call", "value": json.dumps({"name": call.name, "arguments": dict(call.arguments)})}
        if (call := next(iter(message.tool_calls), None))
        else {"from": names[message.role], "value": message.content}
        for message in messages
    ]


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The oracle's games of 24 tasks, half as chat messages and half as ShareGPT, imported into one file."""
    folder = tmp_path_factory.mktemp("talks")
    tasks = guess_tasks(24, seed=3)
    schema = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
    tools = [{"type": "function", "function": {"name": "guess", "description": "", "parameters": schema}}]
    said = [asyncio.run(played(task)) for task in tasks]
    chat = [{"id": f"c{n}", "messages": as_chat(one), "resolved": n != 0} for n, one in enumerate(said[:12])]
    sharegpt = [{"conversations": as_sharegpt(one), "resolved": True} for one in said[12:]]
    (folder / "in").mkdir()
    (folder / "in" / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat))
    (folder / "in" / "sharegpt.json").write_text(json.dumps(sharegpt))
    (folder / "tools.json").write_text(json.dumps(tools))
    command = ["conversations", "import", str(folder / "in"), "--out", str(folder / "talks.jsonl"), "--resolved"]
    assert run_command([*command, "--tools", str(folder / "tools.json")]) == 0
    return folder / "talks.jsonl"


@pytest.fixture
def recipe(talks: Path, tmp_path: Path) -> Recipe:
    made = guess_run.recipe(tmp_path / "inputs", steps=0)
    warm = made.sft.model_copy(update={"demos": 0, "conversations": str(talks), "epochs": 4})
    kept = made.eval.model_copy(update={"before": True, "every": 0})
    return made.model_copy(update={"sft": warm, "eval": kept})


def test_the_agent_learns_from_conversations(recipe: Recipe, tmp_path: Path) -> None:
    turnstile.train(recipe, run=tmp_path / "run")
    said = [json.loads(line)["message"] for line in (tmp_path / "run" / "messages.jsonl").read_text().splitlines()]
    losses = [float(text.rpartition(" ")[2]) for text in said if text.startswith("warm start")]
    assert losses[-1] < losses[0] / 2
    assert any(text.startswith("23 conversations, ") for text in said)  # one was not resolved
    entries = list(read_record(tmp_path / "run", phase="warmstart", label="conversations"))
    assert len(entries) == 23
    assert all(turn.message.tool_calls for entry in entries for turn in entry.group.trajectories[0].turns)
    assert (tmp_path / "run" / "evaluations" / "warmstart.jsonl").is_file()


def test_conversations_and_demonstrations_are_both_learned_from(recipe: Recipe, tmp_path: Path) -> None:
    both = recipe.model_copy(update={"sft": recipe.sft.model_copy(update={"demos": 4, "epochs": 1})})
    turnstile.train(both, run=tmp_path / "run")
    assert len(list(read_record(tmp_path / "run", phase="warmstart"))) == 27


def test_a_dry_run_counts_conversations(recipe: Recipe) -> None:
    assert dry_run(recipe)["conversations to learn from"].startswith("23 conversations, ")


def test_a_bad_file_is_refused_before_a_model_is_loaded(recipe: Recipe, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"messages": []}\n{"messages": [{"role": "usr"}]}\n')
    warm = recipe.sft.model_copy(update={"conversations": str(file)})
    nowhere = recipe.model.model_copy(update={"id": "nobody/none"})
    wrong = recipe.model_copy(update={"sft": warm, "model": nowhere})
    with pytest.raises(TaskError, match=r"bad.jsonl, row 2, message 1: the role 'usr' is unknown"):
        turnstile.train(wrong, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_conversations_that_cannot_be_learned_from_are_an_error(recipe: Recipe, tmp_path: Path) -> None:
    file = tmp_path / "prose.jsonl"
    said = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "Two\nlines."}]
    file.write_text(json.dumps({"messages": said}))
    wrong = recipe.model_copy(update={"sft": recipe.sft.model_copy(update={"conversations": str(file)})})
    with pytest.raises(TaskError, match=r"nothing of its 1 conversations can be learned .* renderer is 'lines'"):
        turnstile.train(wrong, run=tmp_path / "run")
