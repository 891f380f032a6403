"""`turnstile conform`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]

MINE = """
import torch
from turnstile.credit.base import to_tokens
from turnstile.credit.invariants import at, declare
from turnstile.credit.rloo import rloo

def counts_failures(token_level_rewards, response_mask, index, scale=1.0):
    scores = token_level_rewards.double().sum(1)
    means = torch.stack([scores[torch.from_numpy(index == one)].mean() for one in index])
    return (scale * (scores - means))[:, None] * response_mask

@declare(at({4: "rows that failed are left out before"}))
def with_excuse(token_level_rewards, response_mask, index):
    return counts_failures(token_level_rewards, response_mask, index)

def mine(groups, scores, *, sign=1.0):
    return rloo(groups, scores)

def their_names(r, m, g, sign=1.0):
    return sign * counts_failures(r, m, g)

def renamed(function):
    def padded(token_level_rewards, response_mask, index):
        return function(r=token_level_rewards, m=response_mask, g=index)
    return padded

def no_adapter(function):
    return 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_functions.py").write_text(MINE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)  # as the command does with the folder it is started in


def test_all_of_ours_keep_what_they_do_not_declare(cli: Command) -> None:
    done = cli("conform")
    assert done.code == 0, done.out
    assert "0 invariants broken that should hold" in done.out
    assert any(line.split() == ["credit:grpo", *"+++++++"] for line in done.out.splitlines())
    assert any(line.split() == ["loss:kl", "estimator=k3", *"++++--d"] for line in done.out.splitlines())


def test_one_of_ours(cli: Command) -> None:
    done = cli("conform", "credit:grpo", "scale=batch_std")
    assert done.code == 0, done.err
    assert "3  declared" in done.out
    assert "statistics of the whole step" in done.out
    assert done.out.splitlines()[-1] == "credit:grpo: 6 hold, 1 declared"


@pytest.mark.usefixtures("here")
def test_a_function_on_padded_arrays(cli: Command) -> None:
    done = cli("conform", "my_functions:counts_failures", "scale=2.0")
    assert done.code == 1
    assert "4  BROKEN" in done.out
    assert "beside a fifth attempt that failed, the advantage of turn 0 of attempt 0 of g0 goes from" in done.out
    assert cli("conform", "my_functions:counts_failures", "--exempt", "4").code == 0
    excused = cli("conform", "my_functions:with_excuse")
    assert excused.code == 0
    assert "rows that failed are left out before" in excused.out


@pytest.mark.usefixtures("here")
def test_an_estimator_and_an_adapter_of_ones_own(cli: Command) -> None:
    assert cli("conform", "my_functions:mine", "sign=-1.0").code == 0
    adapted = cli("conform", "my_functions:their_names", "sign=-1.0", "--as", "my_functions:renamed")
    assert adapted.code == 1
    assert [line.split()[1] for line in adapted.out.splitlines() if line[:1].isdigit()].count("BROKEN") == 2  # 4 and 5


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["grpo"], "'grpo' names no function; did you mean credit:grpo?"),
        (["reinforce"], "did you mean credit:reinforce or loss:reinforce?"),
        (["credit:gropo"], "unknown credit kind 'gropo'; did you mean 'grpo'?"),
        (["credit:grpo", "--as", "padded"], "credit:grpo is one of ours, whose form is known; leave --as padded out"),
        (["credit:grpo", "scal=none"], "credit:grpo has no knob 'scal'; did you mean 'scale'?"),
        (["no_such:f"], "the function 'no_such:f': there is no module 'no_such' on the import path"),
        (["my_functions:counts"], "my_functions has no 'counts'; did you mean 'counts_failures'?"),
        (["my_functions:counts_failures", "scal=1"], "has no knob 'scal'; did you mean 'scale'?"),
        (["my_functions:MINE"], "my_functions has no 'MINE'"),
        (["my_functions:torch"], "my_functions:torch is module, not something that can be called"),
        (["my_functions:their_names"], "my_functions:their_names takes g, m, r, sign: that is no form known here"),
        (["my_functions:their_names", "--as", "padded"], "wants 'r', which is no padded array"),
        (["my_functions:their_names", "--as", "pad"], "--as 'pad' is no form; did you mean 'padded'?"),
        (["my_functions:their_names", "--as", "my_functions:no_adapter"], "my_functions:no_adapter gives int"),
        (["my_functions:mine", "--as", "loss"], "my_functions:mine raised AttributeError"),
        (["--exempt", "3"], "name it first"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_line(cli: Command, words: list[str], error: str) -> None:
    done = cli("conform", *words)
    assert error in done.error
    assert done.code == 2
