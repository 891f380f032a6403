from __future__ import annotations

import ast
import errno
import inspect
import os
import signal
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile.sandboxes.containers.program import MODULES
from turnstile.sandboxes.containers.runner import start
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
    for begin in range(0, len(data), piece):
        made.feed(data[begin : begin + piece])
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


@pytest.mark.parametrize("spawned", [True, False])
def test_a_command_is_started_alike_by_every_python(
    spawned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "can_spawn", spawned)  # Python 3.7 cannot
    monkeypatch.chdir(tmp_path)  # and back, as the runner goes where its commands do
    (tmp_path / "mine").write_text("#!/bin/sh\necho $A in $PWD; cat; echo said >&2; kill -PIPE $$; echo lives on\n")
    (tmp_path / "mine").chmod(0o755)
    (tmp_path / "plain").write_text("")

    def run(*argv: str, **env: str) -> tuple[int, bytes, bytes]:
        ends = os.pipe(), os.pipe()
        try:
            pid = start.launch(
                list(argv), str(tmp_path), {"PATH": f"{tmp_path}:/usr/bin:/bin", **env}, *(w for _, w in ends)
            )
            status = os.waitpid(pid, 0)[1]
        finally:
            for _, theirs in ends:
                os.close(theirs)
            said = [os.read(ours, 1000) for ours, _ in ends]
            for ours, _ in ends:
                os.close(ours)
        return status, said[0], said[1]

    assert run("mine", A="caf\udce9") == (signal.SIGPIPE, b"caf\xe9 in %s\n" % os.fsencode(tmp_path), b"said\n")
    assert run("./mine")[0] == signal.SIGPIPE
    for argv, reason in (("none", errno.ENOENT), ("plain", errno.EACCES), ("./plain", errno.EACCES)):
        with pytest.raises(OSError) as caught:
            run(argv)
        assert caught.value.errno == reason
    with pytest.raises(ValueError, match="null"):
        run("mi\0ne")
