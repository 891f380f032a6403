"""What `turnstile conversations import` keeps, leaves out and says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turnstile.config import make_recipe
from turnstile.tasks.conversations.source import read_conversations

Cli = Callable[..., Any]
SAID = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "Gone."}]


def rows(path: Path, *found: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return str(path)


@pytest.fixture
def talks(tmp_path: Path) -> str:
    return rows(
        tmp_path / "talks.jsonl",
        {"messages": SAID, "id": "a", "resolved": True, "ended": "Submitted"},
        {"messages": SAID, "id": "b", "resolved": False, "ended": "Submitted"},
        {"messages": SAID, "id": "c"},
        {"messages": SAID[:1], "id": "d"},
    )


@pytest.mark.parametrize(
    ("options", "kept", "why"),
    [
        ([], "abc", ["1 left out: nothing to learn"]),
        (["--resolved"], "a", ["1 left out: not resolved", "1 left out: not known whether it was resolved"]),
        (["--ended", "Submitted"], "ab", ["1 left out: not known how it ended"]),
        (["--report", "report.json", "--resolved"], "bc", ["1 left out: not resolved"]),
    ],
)
def test_what_is_kept(cli: Cli, talks: str, tmp_path: Path, options: list[str], kept: str, why: list[str]) -> None:
    (tmp_path / "report.json").write_text(json.dumps({"total_instances": 3, "resolved_ids": ["b", "c"]}))
    done = cli("conversations", "import", talks, "--out", "new/out.jsonl", *options)
    assert done.code == 0
    assert [talk.id for talk in read_conversations("new/out.jsonl")] == list(kept)
    assert f"new/out.jsonl: conversations: {len(kept)}, messages to learn: {len(kept)}" in done.out
    for line in why:
        assert f"  {line}\n" in done.out


def test_tools_are_given_where_none_are_named(cli: Cli, talks: str, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(json.dumps([{"name": "bash", "description": "Run.", "parameters": {}}]))
    assert cli("conversations", "import", talks, "--out", "out.jsonl", "--tools", "tools.json").code == 0
    assert {tool.name for talk in read_conversations("out.jsonl") for tool in talk.tools} == {"bash"}


def test_a_bad_row_stops_it_or_is_counted(cli: Cli, talks: str, tmp_path: Path) -> None:
    Path("out.jsonl").write_text("as it was")
    bad = rows(tmp_path / "bad.jsonl", {"messages": SAID}, {"messages": ["x"]})
    done = cli("conversations", "import", bad, "--out", "out.jsonl")
    assert (done.code, "bad.jsonl, row 2, message 1: a message is an object" in done.error) == (1, True)
    assert Path("out.jsonl").read_text() == "as it was"
    assert [file.name for file in tmp_path.glob(".out*")] == []
    done = cli("conversations", "import", bad, "--out", "out.jsonl", "--skip-bad")
    assert "1 left out that cannot be read, the first: " in done.out
    assert len(read_conversations("out.jsonl")) == 1
    with open(bad, "ab") as file:
        file.write(b'{"messages": [torn\n"\xff"\n[1]\n' + json.dumps({"messages": SAID}).encode() + b"\n")
    assert (
        "4 left out that cannot be read" in cli("conversations", "import", bad, "--out", "out.jsonl", "--skip-bad").out
    )
    assert len(read_conversations("out.jsonl")) == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--ended", "Never"], "no conversation is left to write (2 left out: ended otherwise (Submitted); 1 left out"),
        (["--report", "none.json"], "none.json: it cannot be read"),
        (["--report", "list.json"], "list.json: not a report of SWE-bench's harness; it needs resolved_ids"),
        (["--tools", "list.json"], "list.json: a tool has no name"),
    ],
)
def test_what_cannot_be_done_is_said(cli: Cli, talks: str, tmp_path: Path, options: list[str], says: str) -> None:
    (tmp_path / "list.json").write_text("[1]")
    done = cli("conversations", "import", talks, "--out", "out.jsonl", *options)
    assert (done.code, says in done.error) == (1, True)
    assert not Path("out.jsonl").exists()


def test_a_recipes_conversations_lie_beside_it(tmp_path: Path) -> None:
    recipe = make_recipe({"sft": {"conversations": "talks.jsonl"}}, folder=tmp_path / "there")
    assert recipe.sft.conversations == str((tmp_path / "there" / "talks.jsonl").resolve())
    assert recipe.sft.wanted
