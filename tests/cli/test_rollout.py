from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnstile.cli.episodes import Filter, entries, episodes, select
from turnstile.cli.show import token_lines
from turnstile.errors import TurnstileError
from turnstile.evaluation.rescore import Rescored, collapses

Cli = Callable[..., Any]


def test_list_has_a_line_an_episode(cli: Cli, finished: Path) -> None:
    lines = cli("rollout", "list", "demo").out.splitlines()
    assert lines[0].split() == ["step", "phase", "task", "attempt", "stop", "turns", "outcome", "total"]
    assert [line.split() for line in lines[1:4]] == [
        ["1", "train", "toolz/first", "0", "submitted", "2", "+1.00", "+1.200"],
        ["1", "train", "toolz/first", "1", "turns", "1", "-0.50", "-0.500"],
        ["1", "train", "toolz/first", "2", "error", "0", "-", "-"],
    ]
    assert lines[-1].split() == ["2", "eval", "oracle", "slugify/x", "0", "submitted", "1", "+0.00", "+0.000"]
    assert len(lines) == 1 + 3 + 3 + 1


@pytest.mark.parametrize(
    ("arguments", "tasks"),
    [
        (["--step", "1"], {"toolz/first"}),
        (["--task", "second"], {"toolz/second"}),
        (["--phase", "eval"], {"slugify/x"}),
        (["--label", "oracle"], {"slugify/x"}),
    ],
)
def test_list_takes_what_is_asked_for(cli: Cli, finished: Path, arguments: list[str], tasks: set[str]) -> None:
    out = cli("rollout", "list", "demo", *arguments).out
    assert set(re.findall(r"\w+/\w+", out)) == tasks


def test_best_is_shown_turn_by_turn(cli: Cli, finished: Path) -> None:
    out = cli("rollout", "show", "demo", "--best").out
    text = re.sub(r"\s+", " ", out)
    assert "step 2, train: toolz/second" in text  # the later of two equals
    assert "stop: submitted after 2 turns" in text
    assert "reward: total +1.200 = outcome agent 1 + turns +0.200" in text
    assert "gates: outcome open" in text
    assert "Repair it. view seen after view" in text
    assert "fix seen after fix" in text
    assert text.count("rewards: command +0.100 granted; r_t +0.100") == 2
    assert text.count("advantage: +1.0000") == 2
    assert "0 < submitted 2 +1.00 +1.200 +0.000 +1.0000" in text  # its own line in the group
    assert "2 error 0 - - +0.000 -" in text


def test_worst_shows_what_its_gate_withheld(cli: Cli, finished: Path) -> None:
    text = re.sub(r"\s+", " ", cli("rollout", "show", "demo", "--worst", "--step", "1").out)
    assert "step 1, train: toolz/first" in text
    assert "gates: outcome closed" in text
    assert "rewards: command +0.100 withheld by outcome; r_t +0.000" in text


def test_an_episode_that_infrastructure_ended(cli: Cli, finished: Path) -> None:
    text = re.sub(r"\s+", " ", cli("rollout", "show", "demo", "--task", "first", "--attempt", "2").out)
    assert "stop: error after 0 turns error: SandboxError: it died reward: none: infrastructure failed" in text
    assert "left out of: baseline and gradient" in text


def test_tokens_shows_exactly_what_is_trained(cli: Cli, finished: Path) -> None:
    out = cli("rollout", "show", "demo", "--best", "--tokens").out
    rows = [line.split() for line in out.splitlines()]
    header = next(i for i, row in enumerate(rows) if row[:2] == ["i", "row"])
    assert rows[header][4:] == ["id", "old", "logp", "new", "logp", "weight", "advantage", "token"]
    tokens = rows[header + 1 : -1]
    assert len(tokens) == len("Repair it.\n") + len("view") + len("ok\n") + len("fix")
    assert tokens[0][:4] == ["0", "0", "0", str(tokens[0][3])]  # a prompt token: no turn, mask 0, its id
    first = tokens[len("Repair it.\n")]
    assert first[:4] == ["11", "0", "1", "1"]
    assert first[5:] == ["-0.5000", "-0.6250", "0.25", "+1.0000", "'v'"]
    assert out.splitlines()[-1] == "21 tokens, 7 sampled, 7 in the loss mask; mean |new - old| 0.12"


def test_tokens_of_a_group_that_was_not_trained_on(cli: Cli, finished: Path) -> None:
    out = cli("rollout", "show", "demo", "--worst", "--tokens").out
    assert "every weight is 0" in out
    assert "new logp" in out
    assert "-0.6250" not in out


def test_an_evaluations_tokens_are_in_no_loss(cli: Cli, finished: Path) -> None:
    out = cli("rollout", "show", "demo", "--phase", "eval", "--tokens").out
    assert out.splitlines()[-1] == "17 tokens, 6 sampled, 0 in the loss mask"


def test_without_the_model_tokens_are_numbers(cli: Cli, finished: Path) -> None:
    (finished.parents[1] / "model" / "config.json").unlink()
    done = cli("rollout", "show", "demo", "--best")
    assert done.code == 0
    assert "tokens are shown as numbers" in done.out
    assert "view" in done.out  # the message is recorded as text too


def test_what_does_not_fit_is_said(cli: Cli, finished: Path) -> None:
    assert "there is no run 'dem'; did you mean 'demo'?" in cli("rollout", "show", "dem").error
    assert "no recorded episode fits" in cli("rollout", "show", "demo", "--step", "9").error
    unknown = cli("rollout", "show", "demo", "--task", "toolz/frist")
    assert (unknown.code, "did you mean 'toolz/first'?" in unknown.error) == (2, True)


def test_a_folder_that_is_no_run(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "has no record of episodes" in cli("rollout", "list", "empty").error


def test_select_takes_the_latest_of_equals_and_no_lost_episode(finished: Path) -> None:
    found = list(episodes(entries(finished, Filter(phase="train"))))
    assert [(select(found, which).entry.step, select(found, which).place) for which in ("best", "worst", None)] == [
        (2, 0),
        (2, 1),
        (2, 2),
    ]
    with pytest.raises(TurnstileError, match="no recorded episode fits"):
        select([found[2]], "best")


def test_a_rewritten_context_begins_a_new_row(finished: Path) -> None:
    episode = next(episodes(entries(finished, Filter(step=1))))
    group = episode.entry.group
    first, second = group.trajectories[0].turns
    changed = replace(group.trajectories[0], turns=(first, replace(second, fresh=True, trainable=False)))
    entry = replace(episode.entry, group=replace(group, trajectories=(changed, *group.trajectories[1:])))
    lines = list(token_lines(replace(episode, entry=entry)))
    assert [line.row for line in lines] == [0] * 15 + [1] * 6
    assert sum(line.trained for line in lines) == len("view")


RECIPE = """
[model]
id = "none"

[[rewards.terms]]
name = "outcome"
kind = "signal"
signal = "resolved"
level = 1
gate = { value = 1.0 }

[[rewards.terms]]
name = "command"
kind = "turn_signal"
signal = "ok"
weight = 0.25
"""


def test_rescore_judges_what_was_recorded(cli: Cli, finished: Path, tmp_path: Path) -> None:
    # outcome 1 of 5 episodes with a verdict; before (1 - .5) * 2 + 0; the gate wants more than 1
    recipe = tmp_path / "other.toml"
    recipe.write_text(RECIPE)
    out = cli("rollout", "rescore", "demo", "--recipe", str(recipe), "--write", "scores.jsonl").out
    rows = {cells[0]: cells[1:] for line in out.splitlines() if (cells := line.split())}
    assert rows["reward/outcome"] == ["0.2000", "1.0000", "+0.8000"]
    assert rows["reward/step_withheld"] == ["0.0400", "0.3500", "+0.3100"]
    assert rows["gate/outcome"] == ["0.5000", "0.0000", "-0.5000"]
    assert rows["reward/withheld_by/outcome"] == ["0.0400", "0.3500", "+0.3100"]
    assert "2 groups of two attempts or more: equal rewards in 0 recorded, 2 now; another attempt is best in 0" in out
    lines = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [line["total"] for line in lines] == [1.0, 1.0, None, 1.0, 1.0, None, 1.0]
    assert lines[0]["withheld"] == {"command": [0.25, 0.25]}
    assert lines[0]["withheld_by"] == {"command": ["outcome"]}
    assert next(iter(entries(finished, Filter()))).scores[0].total == 1.2  # the record stays as it is


def test_rescore_takes_overrides(cli: Cli, finished: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "other.toml"
    recipe.write_text(RECIPE)
    out = cli("rollout", "rescore", "demo", "rewards.compose=direct", "--recipe", str(recipe), "--step", "1").out
    rows = {cells[0]: cells[1:] for line in out.splitlines() if (cells := line.split())}
    assert rows["reward/total"] == ["0.3500", "1.3750", "+1.0250"]
    assert "1 groups of two attempts or more: equal rewards in 0 recorded, 0 now" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "rewards.terms.1.signal=okay", "--recipe", "other.toml"], "needs the signal 'okay', which a turn"),
        (["demo", "--task", "zzz"], "no episode of a task like 'zzz'"),
        (["demo", "--step", "9"], "no recorded episode fits"),
        (["demo", "--recipe", "missing.toml"], "recipe 'missing.toml' does not exist"),
        (["demo", "--recipe", "other.toml", "--write", "no/such/file"], "--write 'no/such/file' cannot be written"),
    ],
)
def test_rescore_says_what_is_wrong(
    cli: Cli, finished: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "other.toml").write_text(RECIPE)
    output = cli("rollout", "rescore", *arguments)
    assert output.code != 0
    assert message in output.error


def test_rescore_of_a_run_whose_reward_came_from_python(cli: Cli, finished: Path) -> None:
    body = json.loads((finished / "resolved.json").read_text())
    (finished / "resolved.json").write_text(json.dumps({**body, "given": {"reward": "mine.brevity"}}))
    said = cli("rollout", "rescore", "demo").error
    assert "reward is a function that Python gave it; name rewards with --recipe" in said


def test_rescore_tells_of_a_collapse(finished: Path) -> None:
    # the outcome falls by .01 a step, the commands' reward rises by .02
    group = next(iter(entries(finished, Filter()))).group
    entry = next(iter(entries(finished, Filter())))
    steps = [
        Rescored(
            replace(entry, step=step, scores=tuple(entry.scores)),
            tuple(
                replace(
                    score,
                    outcome={"agent": 0.5 - 0.01 * step},
                    granted={"command": np.array([0.02 * step], np.float32)},
                    total=0.5 + 0.01 * step,
                )
                for score in entry.scores[:1] * len(group.trajectories)
            ),
        )
        for step in range(1, 25)
    ]
    (line,) = collapses(steps)
    assert "collapse: over steps 1-20" in line
    assert "'command'" in line
