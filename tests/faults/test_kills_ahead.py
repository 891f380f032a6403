"""SIGKILL at random moments of a real `turnstile train` whose episodes are played ahead, to the process that trains or
to the one that plays; each run goes on to its end, its books balance, and its record gives the same weights again.

TURNSTILE_KILLS says how many of the fifty kills of `make faults` there are, and two fifths as many here;
TURNSTILE_SEED which.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

import guess_run
import killed
from ends import said
from turnstile.cli.main import run as command
from turnstile.records.record import read_record
from turnstile.rollout.workers import MODULE

KILLS = max(2, int(os.environ.get("TURNSTILE_KILLS", "50")) * 2 // 5)
SEED = os.environ.get("TURNSTILE_SEED", "0")
POINTS = tuple(point for point in killed.POINTS if point != "rollout")  # that is in the other process
MOST = {**killed.POINTS, "moment": 3000}
"""How often a run comes by a point between two draws of a step's tasks, more or less; of a moment, the milliseconds."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return guess_run.recipe_file(tmp_path_factory.mktemp("inputs"), sections={"rollout": {"max_staleness": 1}})


def kill(rng: random.Random, whom: str, recipe: Path, run: Path) -> str:
    """Kills one of the two at some place, sooner than it was to be if it did not come there; says where that was."""
    point = rng.choice(POINTS) if rng.random() < 0.5 else "moment"
    first = 2 if point in ("turn written", "moment") else 3  # whose tasks are drawn before step 1 is written down
    step, nth = rng.randint(first, 4), rng.randint(1, MOST[point])
    dies = {"kill": -signal.SIGKILL, "kill worker": 0}[whom]
    while True:
        done = killed.start(whom, point, step, nth, recipe, run)
        if done.returncode == dies and (whom == "kill" or any("SIGKILL" in line for line in said(run))):
            return f"{nth} ms" if point == "moment" else f"{point} {nth}"
        assert done.returncode in (dies, 0), done.stderr
        assert nth > 1, f"{point} is nowhere after the draw of step {step}"
        nth = (nth + 1) // 2
        shutil.rmtree(run)


def players(folder: Path) -> list[int]:
    """The processes that play for a run that was started in that folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if MODULE.encode() in (entry / "cmdline").read_bytes() and (entry / "cwd").resolve() == folder:
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize("number", range(KILLS))
def test_killed_at_random(number: int, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every third time the process that plays, which another then replaces without the run ending."""
    rng = random.Random(f"ahead/{SEED}/{number}")
    run, whom = tmp_path / "run", "kill worker" if number % 3 == 2 else "kill"
    where = kill(rng, whom, recipe, run)
    while players(tmp_path):  # it ends by itself, and nothing of it stays
        time.sleep(0.05)
    assert command(["audit", str(run)]) == 0
    if whom == "kill":
        assert command(["train", str(recipe), "--out", str(run)]) == 0
    assert command(["audit", str(run), "--record"]) == 0
    for step in range(1, 5):
        groups = [entry.group for entry in read_record(run, phase="train", step=step)]
        assert [len(group.trajectories) for group in groups] == [guess_run.ATTEMPTS] * guess_run.GROUPS
    assert command(["train", "--replay", str(run), "--out", str(tmp_path / "again")]) == 0
    shutil.rmtree(run)
    shutil.rmtree(tmp_path / "again")
    who = "the process that plays" if whom == "kill worker" else "training"
    with capsys.disabled():
        print(f"\n{number + 1} of {KILLS}: survived SIGKILL to {who} at {where}", flush=True)
