"""Conversations as the formats of the field have them, read, written and read again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from turnstile.errors import TaskError
from turnstile.tasks.conversations import chat
from turnstile.tasks.conversations.conversation import Conversation
from turnstile.tasks.conversations.mini import BASH
from turnstile.tasks.conversations.source import conversations, read_conversations
from turnstile.types import Message, ToolCall

DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && git diff"
SEARCH = {
    "type": "function",
    "function": {"name": "search", "description": "Look up.", "parameters": {"type": "object", "properties": {}}},
}


def called(name: str, arguments: str, id: str = "call_x1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def bash(command: str, id: str) -> dict[str, Any]:
    return called("bash", json.dumps({"command": command}), id)


def trajectory(version: str, messages: list[dict[str, Any]], **config: Any) -> dict[str, Any]:
    """Return what mini-swe-agent writes for a run that submitted, with its notes on each message."""
    info = {
        "model_stats": {"instance_cost": 0.1, "api_calls": 2},
        "config": {"model": {"model_name": "openai/some-model"}, **config},
        "mini_version": "2.4.6",
        "exit_status": "Submitted",
        "submission": "diff --git a/x b/x\n",
    }
    return {"info": info, "messages": messages, "trajectory_format": version, "instance_id": "org__repo-1"}


V1 = trajectory(
    "mini-swe-agent-1",
    [
        {"role": "system", "content": "You can use bash.", "timestamp": 1.0},
        {"role": "user", "content": "Solve it.", "timestamp": 1.1},
        {
            "role": "assistant",
            "content": "THOUGHT: look\n\n```bash\nls\n```",
            "timestamp": 1.2,
            "extra": {"response": {}},
        },
        {"role": "user", "content": "x.py", "timestamp": 1.3},
        {"role": "assistant", "content": "I forget the block.", "timestamp": 1.4},
        {"role": "user", "content": "Please provide EXACTLY ONE action.", "timestamp": 1.5},
        {"role": "assistant", "content": f"```bash\n{DONE}\n```", "timestamp": 1.6},
        {"role": "user", "content": "diff --git a/x b/x\n", "timestamp": 1.7},
    ],
    agent={"action_regex": r"```bash\s*\n(.*?)\n```"},
)
V2 = trajectory(
    "mini-swe-agent-1.1",
    [
        {"role": "system", "content": "You can use bash."},
        {"role": "user", "content": [{"type": "text", "text": "Solve it."}]},
        {
            "role": "assistant", "content": "Look.", "reasoning_content": "Where is it?", "function_call": None,
            "tool_calls": [bash("ls", "toolu_1"), bash("pwd", "toolu_2")], "extra": {"actions": []},
        },
        {"role": "tool", "tool_call_id": "toolu_2", "content": "/testbed", "extra": {"returncode": 0}},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "x.py", "extra": {"returncode": 0}},
        {"role": "user", "content": "No tool calls found.", "extra": {"interrupt_type": "FormatError"}},
        {"role": "assistant", "content": None, "tool_calls": [bash(DONE, "toolu_3")]},
        {"role": "exit", "content": "diff --git a/x b/x\n", "extra": {"exit_status": "Submitted"}},
    ],
)  # fmt: skip
RESPONSES = trajectory(
    "mini-swe-agent-1.1",
    [
        {"role": "user", "content": "Solve it."},
        {
            "object": "response",
            "output": [
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Where is it?"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Look."}]},
                {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": '{"command": "ls"}'},
            ],
        },
        {"type": "function_call_output", "call_id": "c1", "output": "x.py"},
        {
            "object": "response",
            "output": [{"type": "function_call", "call_id": "c2", "name": "bash", "arguments": '{"command": "pwd"}'}],
        },
        {"role": "exit", "content": "", "extra": {}},
    ],
)
SMITH = {
    "messages": json.dumps(
        [
            {"role": "system", "content": "You are an agent.", "agent": "main", "message_type": "system_prompt"},
            {"role": "user", "content": [{"type": "text", "text": "Shown."}], "is_demo": True},
            {"role": "assistant", "content": "A demonstration.", "is_demo": True},
            {"role": "user", "content": "Fix it.", "agent": "main"},
            {"role": "assistant", "content": "I look.", "thought": "I look.", "tool_calls": [bash("ls", "toolu_9")]},
            {"role": "tool", "content": [{"type": "text", "text": "x.py"}], "tool_call_ids": ["toolu_9"]},
            {"role": "assistant", "content": "Done.", "tool_calls": None},
        ]
    ),
    "instance_id": "org__repo.1fd52536.func__x",
    "resolved": True,
    "model": "claude-3-7-sonnet",
    "traj_id": "org__repo.1fd52536.func__x.abc",
    "patch": "diff",
}
CHAT = {
    "id": "one",
    "tools": [SEARCH],
    "resolved": False,
    "messages": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "What is 数?"},
        {"role": "assistant", "content": "<think>\nLook it up.\n</think>\n\nWait.", "weight": 0},
        {"role": "user", "content": "Yes?"},
        {"role": "assistant", "content": None, "tool_calls": [called("search", '{"word": "数"}')]},
        {"role": "tool", "content": "number", "tool_call_id": "call_x1"},
        {"role": "assistant", "content": "A number."},
        {"role": "user", "content": "Thanks."},
    ],
}
FACTORY = {
    "system": "Be brief.",
    "tools": json.dumps([SEARCH["function"]]),
    "conversations": [
        {"from": "human", "value": "What is 数?"},
        {"from": "function_call", "value": '{"name": "search", "arguments": {"word": "数"}}'},
        {"from": "observation", "value": "number"},
        {"from": "gpt", "value": "A number."},
    ],
}
HERMES_CALL = '<tool_call>\n{"name": "search", "arguments": {"word": "数"}}\n</tool_call>'
HERMES = {
    "conversations": [
        {"from": "system", "value": "You have <tools>[search]</tools>."},
        {"from": "human", "value": "What is 数?"},
        {"from": "gpt", "value": HERMES_CALL},
        {"from": "tool", "value": '<tool_response>\n{"found": 1}\n</tool_response>'},
        {"from": "gpt", "value": "A number.", "weight": 1},
    ],
    "tools": json.dumps([SEARCH]),
}
WORD = ToolCall(id="call00000", name="search", arguments={"word": "数"})
Rows = Callable[..., Path]


@pytest.fixture
def file(tmp_path: Path) -> Rows:
    """Return a function that writes rows to a file: JSON lines, or the format of its suffix."""

    def write(*rows: Any, name: str = "x.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            pq.write_table(pa.Table.from_pylist(list(rows)), path)
        else:
            path.write_text("\n".join(map(json.dumps, rows)) if name.endswith(".jsonl") else json.dumps(rows[0]))
        return path

    return write


def one(path: Path) -> Conversation:
    (found,) = read_conversations(path)
    return found


def roles(found: Conversation) -> str:
    """Return the first letter of each role, capital if the message is learned."""
    return "".join(
        message.role[0].upper() if flag else message.role[0]
        for message, flag in zip(found.messages, found.trainable, strict=True)
    )


def test_mini_swe_agent_1_has_its_actions_in_the_text(file: Rows) -> None:
    found = one(file(V1, name="runs/org__repo-1/org__repo-1.traj.json"))
    assert roles(found) == "suAuauA"  # a text without an action is shown, not taught; the diff at the end is nobody's
    assert found.messages[2].content == "THOUGHT: look\n\n```bash\nls\n```"
    assert (found.id, found.task_id, found.ended) == ("org__repo-1", "org__repo-1", "Submitted")
    assert (found.model, found.patch, found.resolved) == ("openai/some-model", "diff --git a/x b/x\n", None)
    assert found.tools == ()


def test_mini_swe_agent_2_calls_its_tool(file: Rows) -> None:
    found = one(file(V2, name="a.traj.json"))
    assert roles(found) == "suAttuA"
    assert found.tools == (BASH,)
    first = found.messages[2]
    assert (first.content, first.reasoning) == ("Look.", "Where is it?")
    assert [call.arguments for call in first.tool_calls] == [{"command": "ls"}, {"command": "pwd"}]
    assert [message.tool_call_id for message in found.messages[3:5]] == ["call00001", "call00000"]  # as they came
    assert found.messages[-1].tool_calls == (ToolCall(id="call00000", name="bash", arguments={"command": DONE}),)


def test_mini_swe_agent_over_the_responses_interface(file: Rows) -> None:
    found = one(file(RESPONSES, name="a.traj.json"))
    assert roles(found) == "uAtA"
    first = found.messages[1]
    assert (first.content, first.reasoning, len(first.tool_calls)) == ("Look.", "Where is it?", 1)
    assert found.messages[2] == Message(role="tool", content="x.py", tool_call_id="call00000")


def test_folder_of_trajectories_ignores_other_files(file: Rows, tmp_path: Path) -> None:
    file({"org__repo-1": {"model_patch": ""}}, name="runs/preds.json")
    failed = {**V2, "messages": V2["messages"][:2], "instance_id": None}
    for name, row in (("b", failed), ("a", V1)):
        file(row, name=f"runs/{name}/{name}.traj.json")
    found = read_conversations(tmp_path / "runs")
    assert [(talk.id, len(talk.messages)) for talk in found] == [("org__repo-1", 7), ("b", 0)]


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.parquet"])
def test_swe_smiths_trajectories(file: Rows, name: str) -> None:
    found = one(file(SMITH, name=name))
    assert roles(found) == "suauAtA"  # the demonstration in the prompt is not taught
    assert found.messages[5] == Message(role="tool", content="x.py", tool_call_id="call00000")
    assert (found.id, found.task_id) == (SMITH["traj_id"], SMITH["instance_id"])
    assert (found.resolved, found.model, found.patch) == (True, "claude-3-7-sonnet", "diff")


def test_chat_messages(file: Rows) -> None:
    found = one(file(CHAT))
    assert roles(found) == "suauAtA"
    assert (found.messages[2].reasoning, found.messages[2].content) == ("Look it up.", "Wait.")
    assert found.messages[4].tool_calls == (WORD,)
    assert [tool.name for tool in found.tools] == ["search"]
    assert (found.id, found.resolved) == ("one", False)


def test_sharegpt_with_calls(file: Rows) -> None:
    found = one(file(FACTORY))
    assert roles(found) == "suAtA"
    assert found.messages[2].tool_calls == (WORD,)
    assert found.messages[3].tool_call_id == "call00000"
    assert found.id == "x.jsonl:1"
    in_text = {**FACTORY, "conversations": [FACTORY["conversations"][0], {"from": "gpt", "value": HERMES_CALL}]}
    assert one(file(in_text)).messages[-1].tool_calls == (WORD,)


def test_tools_that_the_system_lists_are_not_offered_twice(file: Rows) -> None:
    found = one(file(HERMES))
    assert found.tools == ()
    assert found.messages[2].content == HERMES_CALL
    assert found.messages[3].content == '{"found": 1}'


def test_omits_leading_assistant_messages(file: Rows) -> None:
    says = {"from": "gpt", "value": "Hello!"}
    assert roles(one(file({"conversations": [says, {"from": "human", "value": "Hi."}, says]}))) == "uA"
    assert one(file({"conversations": [says]})).messages == ()


@pytest.mark.parametrize("row", [V1, V2, RESPONSES, SMITH, CHAT, FACTORY, HERMES])
def test_write_and_read_are_inverse(file: Rows, row: Mapping[str, Any]) -> None:
    found = one(file(row))
    assert one(file(chat.to_row(found), name="again.jsonl")) == found


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "x"}, "row 1: it has neither messages nor conversations; known formats: chat, sharegpt"),
        ({"messages": "[{"}, "row 1: messages is a text that is not JSON"),
        ({"messages": {"role": "user"}}, "row 1: messages is not a list"),
        ({"messages": ["x"]}, "row 1, message 1: a message is an object"),
        ({"messages": [{"role": "usr"}]}, "row 1, message 1: the role 'usr' is unknown"),
        ({"messages": [{"role": "user", "content": 3}]}, "a content is a text or a list of parts, this is int"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a part of type 'image_url'; only text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "a tool call has no function with a name"),
        ({"messages": [{"role": "assistant", "tool_calls": [called("a", "{")]}]}, "arguments of 'a' are not JSON"),
        ({"messages": [{"role": "assistant", "tool_calls": [called("a", "[]")]}]}, "of 'a' are not an object"),
        ({"messages": [{"role": "assistant", "weight": 0.5}]}, "weight is 0 or 1, or true or false, not 0.5"),
        ({"messages": [], "resolved": "yes"}, "resolved is true or false, not 'yes'"),
        ({"messages": [], "tools": [{}]}, "a tool has no name"),
        ({"conversations": [{"from": "alien", "value": ""}]}, "the speaker 'alien' is unknown"),
        ({"conversations": [{"from": "function_call", "value": "x"}]}, "the value of a function_call is not JSON"),
        ({**V1, "info": {"config": {"agent": {"action_regex": "("}}}}, "its action_regex is not a regular expression"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_read_is_named(file: Rows, row: Any, says: str) -> None:
    path = file(row)
    with pytest.raises(TaskError) as caught:
        read_conversations(path)
    assert str(caught.value).startswith(f"{path}, row 1")
    assert says in str(caught.value)


def test_bad_rows_can_be_left_out(file: Rows, tmp_path: Path) -> None:
    bad: list[TaskError] = []
    path = file({"messages": ["x"]}, CHAT)
    assert [talk.id for talk in conversations(path, on_error=bad.append)] == ["one"]
    assert len(bad) == 1
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(TaskError, match="it has no conversation"):
        read_conversations(tmp_path / "empty.jsonl")
    with pytest.raises(TaskError, match="did you mean 'sharegpt'"):
        list(conversations(path, "sharegp"))
