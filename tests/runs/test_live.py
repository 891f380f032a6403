"""A real run on a real terminal, interrupted, and gone on with into a pipe."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import guess_run
import stopped
from ends import metrics
from terminal import lines, on_terminal
from turnstile.cli.main import run as command

STEPS = 6


@pytest.mark.slow
def test_a_run_is_watched_interrupted_and_resumed(tmp_path: Path) -> None:
    sections = {
        "rollout": {"max_staleness": 1},
        "env": {"kind": "played_ahead:Slow"},
        "sft": {"demos": 0},
        "eval": {"before": False},
        "trackers": [{"kind": "jsonl"}, {"kind": "console"}],
    }
    recipe, run = guess_run.recipe_file(tmp_path, sections=sections, steps=STEPS), tmp_path / "run"
    train = [sys.executable, "-c", stopped.MAIN, "train", str(recipe), "--out", str(run)]
    frames: list[str] = []

    def interrupt(written: str, process: subprocess.Popen[bytes]) -> None:
        """Once, after step 3."""
        if "step   3 " in written and not any("step   3 " in frame for frame in frames):
            process.send_signal(signal.SIGINT)
        frames.append(written)

    done = on_terminal(train, when=interrupt, cwd=stopped.HERE)
    assert done.code == 128 + signal.SIGINT
    assert (done.restored, done.hides_the_cursor) == (True, False)
    assert "error: interrupted; finished work is kept, and the same command resumes from there" in done.seen
    steps = [int(line.split()[1]) for line in done.seen if line.startswith("step ")]
    assert steps == list(range(1, len(metrics(run)) + 1))
    assert not any(line.startswith(("╭", "│", "╰")) for line in done.seen)
    drawn = next(lines(written) for written in frames if re.search("staleness.*╰─.*╯", written, re.S))
    assert [line.split()[1] for line in drawn if line.startswith("│ ")][:6] == [
        "now", "episodes", "tokens/s", "failures", "time", "staleness"
    ]  # fmt: skip
    assert any(re.search(r"[1-9]\d* in a tool", written) for written in frames)  # of the other process
    assert any(f"step 2 of {STEPS} done" in written for written in frames)

    piped = subprocess.run(train, capture_output=True, text=True, check=True, cwd=stopped.HERE)
    assert "\x1b" not in piped.stdout + piped.stderr
    steps += [int(line.split()[1]) for line in piped.stdout.splitlines() if re.match(r"step +\d+ ", line)]
    assert steps == list(range(1, STEPS + 1))
    assert command(["audit", str(run), "--record"]) == 0
