from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile.sandboxes.containers.program import MODULES
from turnstile.sandboxes.containers.runner.cut import Cut
from turnstile.sandboxes.containers.runner.kernel import Kills, own_group


@pytest.mark.parametrize("module", MODULES)
def test_an_old_python_can_read_it(module: ModuleType) -> None:
    ast.parse(inspect.getsource(module), feature_version=(3, 7))


@pytest.mark.parametrize(
    ("told", "group"),
    [
        ("0::/\n", ""),  # version 2, with a view of our own
        ("0::/system.slice/docker-1.scope\n", "/system.slice/docker-1.scope"),  # version 2, with the machine's
        ("4:memory:/docker/1\n", ""),
    ],
)
def test_out_of_memory_kills_are_counted_in_either_version(told: str, group: str, tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text(told)
    assert own_group(str(tmp_path / "cgroup")) == group
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 4\noom_kill 3\noom_group_kill 0\n")
    kills = Kills([str(tmp_path / "none"), str(events)])
    assert (kills.known, kills.more()) == (3, False)
    events.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    assert (kills.more(), kills.more(), kills.known) == (True, False, 5)
    assert Kills([str(tmp_path / "none")]).known == 0


def cut(data: bytes, limit: int, piece: int) -> str:
    made = Cut(limit)
    for start in range(0, len(data), piece):
        made.feed(data[start : start + piece])
    return made.text()


@given(st.text(max_size=60), st.integers(2, 40), st.integers(1, 30))
def test_head_and_tail_are_kept_and_the_rest_is_counted(text: str, limit: int, piece: int) -> None:
    found = cut(text.encode(errors="replace"), limit, piece)
    text = text.encode(errors="replace").decode()
    if len(text) <= limit:
        assert found == text
    else:
        tail = limit - limit // 2
        assert found == f"{text[: limit // 2]}\n[... {len(text) - limit} characters left out ...]\n{text[-tail:]}"


@pytest.mark.parametrize("piece", [1, 2, 100])
def test_what_is_no_text_is_shown_as_such(piece: int) -> None:
    assert cut(b"a\xff\xc3\xa9\xe2\x82", 100, piece) == "a\ufffdé\ufffd"
