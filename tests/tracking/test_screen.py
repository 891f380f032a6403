"""The screen on a real terminal: during a run, and after it ended in any way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

import drawn
from terminal import Ended, lines, on_terminal
from turnstile.tracking.screen import time_shares

COMMAND = [sys.executable, drawn.__file__]


def is_whole(written: str) -> bool:
    """Return whether the screen is drawn down to its lower edge."""
    return any(line.startswith("╰") for line in lines(written))


def said(step: int) -> list[str]:
    """Return the lines printed in a step, which must be there in the end."""
    return [f"printed in step {step}", f"an error of step {step}", f"a warning of step {step}, {'long ' * 40}".rstrip()]


def test_screen_shows_the_running_phases() -> None:
    frames: list[str] = []
    done = on_terminal(COMMAND, columns=80, when=lambda written, _: frames.append(written))
    (frame,) = [written for written in frames if "step 3, episodes" in written and is_whole(written)][:1]
    drawn = [line[2:-2].strip() for line in lines(frame) if line.startswith("│")]
    assert drawn[0].startswith("now         step 3, episodes 0/6  ━")
    assert drawn[1] == "episodes    3 waiting, 2 generating, 1 in a tool, 0 being graded, 0"
    assert drawn[2] == "finished, 0 failed"
    assert drawn[3].startswith("tokens/s    0 in the last")
    assert drawn[4:] == [
        "failures    SandboxError 3",
        "time        generate 45 %, environment 15 %, train 25 %, other 15 %",
        "staleness   0.50 versions in the mean, 1 at most",
        "gates open  outcome 75 %",
        "steps             1      2",
        "completion     0.50   0.50",
        "outcome        0.25   0.25",
    ]
    assert any("runs/demo, step 2 of 3 done" in line for line in lines(frame))
    assert done.code == 0
    assert_is_left_in_order(done)


def test_printed_lines_stay_and_the_screen_goes() -> None:
    done = on_terminal(COMMAND)
    rest = [line for line in done.seen if line]
    steps = [line for line in rest if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1", "2", "3"]
    assert [line for line in rest if line not in steps] == [*said(1), *said(2), *said(3), "begun,", "ended"]


def test_loses_no_line_between_redraws() -> None:
    done = on_terminal([*COMMAND, "crowd"])
    assert done.code == 0
    for kind in ("said", "printed", "step"):
        numbers = [int(line.split()[1]) for line in done.seen if line.startswith(f"{kind} ")]
        assert numbers == list(range(drawn.LINES)), kind


@pytest.mark.parametrize(
    ("happens", "code"), [("raise", 1), ("interrupt", -signal.SIGINT), ("kill", -signal.SIGKILL), ("plain", 0)]
)
@pytest.mark.parametrize(("columns", "rows"), [(100, 40), (40, 8)])
@pytest.mark.slow
def test_leaves_the_terminal_as_it_was(happens: str, code: int, columns: int, rows: int) -> None:
    done = on_terminal([*COMMAND, happens], columns=columns, rows=rows)
    assert done.code == code
    assert_is_left_in_order(done)
    assert [line for line in done.seen if line in (*said(1), *said(2))] == [*said(1), *said(2)]
    drawn = [line for line in done.seen if line.startswith(("╭", "│", "╰"))]
    assert bool(drawn) == (happens == "kill")
    if happens == "raise":
        assert "LookupError: no such thing" in done.seen


def assert_is_left_in_order(done: Ended) -> None:
    assert done.restored
    assert not done.hides_the_cursor
    assert done.written.endswith(("\n", "\x1b[?25h", "\x1b[2K"))  # whoever types next begins a line
    assert "\x1b[?1049h" not in done.written  # no second screen


@pytest.mark.slow
def test_pipe_gets_plain_lines_despite_force_color() -> None:
    done = subprocess.run(
        COMMAND, capture_output=True, text=True, check=True, env={**os.environ, "FORCE_COLOR": "", "TERM": "xterm"}
    )
    assert "\x1b" not in done.stdout
    assert "╭" not in done.stdout
    forced = subprocess.run(COMMAND, capture_output=True, text=True, check=True, env={**os.environ, "FORCE_COLOR": "1"})
    assert [line for line in forced.stdout.splitlines() if line.startswith(("╭", "│"))] == []
    steps = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1", "2", "3"]
    assert done.stdout.endswith("begun, ended\n")


def test_time_shares() -> None:
    step = {"seconds/step": 10.0, "seconds/rollout": 6.0, "seconds/generate": 4.0, "seconds/update": 3.0}
    ahead = {"seconds/step": 10.0, "seconds/rollout": 0.0, "seconds/generate": 9.0, "seconds/update": 9.0}
    assert time_shares([step]) == pytest.approx({"generate": 0.4, "environment": 0.2, "train": 0.3, "other": 0.1})
    assert time_shares([step, ahead])["generate"] == pytest.approx(0.65)
    assert time_shares([ahead])["environment"] == 0.0
