"""The page of measurements says what is kept, and what it is computed from holds."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from benchmarks import page
from benchmarks.peers import vs_trl
from benchmarks.peers.game import HIGH, LOW, Game, Shape, at_once
from benchmarks.speed import attention, compiled, decode, forest, goals, gpu_speed, latency, load, turns
from turnstile.envs.check import check_env
from turnstile.envs.guess import guess_tasks
from turnstile.tasks.demonstration import call
from turnstile.types import Completion, Message, Sampling, Stop, Trajectory, Turn

(TASK,) = guess_tasks(1)
BENCHMARKS = (vs_trl, latency, turns, forest, attention, decode, compiled, load, gpu_speed)


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda module: module.__name__)
def test_the_page_says_what_is_kept(benchmark) -> None:
    name = benchmark.__name__.rpartition(".")[2]
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.written(text, name, benchmark.parts(page.Kept(name).results)) == text


def test_goals_are_held_against_what_is_kept() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.written(text, "goals", goals.parts()) == text  # if not: python -m benchmarks.speed.goals


def test_a_goal_is_reached_by_the_median() -> None:
    few = goals.Goal(what="x", goal=2, values=[1.0, 2.5, 3.0], digits=1, of="pairs")
    assert few.row() == ["x", "2", "2.5 (1.0 to 3.0): reached, 2 of 3 pairs"]
    most = goals.Goal(what="x", goal=0.03, values=[0.05], most=True, digits=0, style="%", of="steps")
    assert most.row() == ["x", "at most 3%", "5%: **not reached**, 1 step"]
    cases = goals.Goal(what="x", goal=2, values=[1.0, 2.5, 3.0], digits=1, of="cases")
    assert cases.row()[2] == "2.5 (1.0 to 3.0): **not in all**, 2 of 3 cases"
    assert goals.Goal(what="x", goal=2, values=[], of="pairs").row()[2] == "not measured"


def test_goals_of_what_one_side_alone_has_done_are_not_measured(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(page, "KEPT", tmp_path)
    page.Kept("vs_trl").put("8x4 all theirs 0", run(1.0))
    assert {goal.row()[2] for goal in goals.goals()} == {"not measured"}


def test_a_page_without_the_marks_is_told(capsys) -> None:
    with pytest.raises(SystemExit, match="lacks the lines"):
        page.written("no marks", "turns", ["x"])


def run(seconds: float, **more: float) -> page.Body:
    phases = dict.fromkeys(vs_trl.PHASES, seconds)
    return {"seconds": phases, **dict.fromkeys(vs_trl.COUNTS, 100), **more}


def test_ratios_are_theirs_by_ours_and_the_ceiling_follows_from_bare_rates() -> None:
    rates = {"decode": 10.0, "prefill": 100.0, "train": 50.0, "optimizer seconds": 1.0}
    ours = [run(20.0, **{"computed tokens": 200}), run(30.0, **{"computed tokens": 200})]
    sides = {"ours": ours, "theirs": [run(40.0), run(90.0)], "bare": [{"rates": rates}]}
    assert vs_trl.ratios(("8x4", "all"), sides)[1] == "2.50 (2.00 to 3.00)"
    # 100 / 10 decoded, 100 / 100 prefilled, 100 / 50 trained, and the optimiser's second, of a median of 25 s
    assert vs_trl.ceiling(sides)[:3] == ["25.0", "14.0", "56%"]


def test_the_game_of_both_sides() -> None:
    assert asyncio.run(check_env(lambda: Game(rounds=3), TASK, actions=[call("guess", number=LOW)] * 4)) == []
    worths = set()
    for number in (LOW, LOW + 1, HIGH):
        game = Game(rounds=1)
        at_once(game.reset(TASK))
        steps = [at_once(game.step(call("guess", number=guess))) for guess in (number, 500_000)]
        assert [step.truncated for step in steps] == [False, True]
        worths.add(game.worth)
    assert len(worths) == 3
    assert (Shape(episodes=32, rounds=4).groups, Shape(episodes=32, rounds=4).turns) == (4, 160)


def test_the_tree_counts_each_history_once() -> None:
    def episode(*turns_: tuple[list[int], list[int]]) -> Trajectory:
        made = tuple(
            Turn(context_ids=np.array(context, np.int32), completion=sampled(ids), message=Message(role="assistant"))
            for context, ids in turns_
        )
        return Trajectory(task_id="t", group="g", attempt=0, turns=made, stop=Stop.TURNS)

    def sampled(ids: list[int]) -> Completion:
        zeros = np.zeros(len(ids), np.float32)
        return Completion(
            token_ids=np.array(ids, np.int32), logprobs=zeros, versions=zeros.astype(np.int32), sampling=Sampling(),
            finish="length", seconds=0.0,
        )  # fmt: skip

    # 1 2 | 3 4 | 5 | 6 and 1 2 | 3 9 | 5 | 7: the last tokens are never computed, 1 2 3 is common
    assert turns.tree([episode(([1, 2], [3, 4]), ([5], [6])), episode(([1, 2], [3, 9]), ([5], [7]))]) == 7
