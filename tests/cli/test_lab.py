"""`turnstile lab`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]


def test_the_lab_measures_prints_and_keeps(cli: Command, tmp_path: Path) -> None:
    done = cli(
        "lab", "grpo", "scale=none", "rloo", "--process", "stopping", "--groups", "64", "--out", str(tmp_path / "lab")
    )
    assert done.code == 0, done.err
    assert "grpo (scale=none)" in done.out
    assert "rloo (of=outcome)" in done.out  # without knobs, all that are declared
    body = json.loads((tmp_path / "lab" / "lab.json").read_text(encoding="utf-8"))
    assert [line["estimator"] for line in body["lines"]] == ["grpo (scale=none)", "rloo", "rloo (of=outcome)"]
    assert abs(body["lines"][0]["figures"]["length"] - 7 / 8) < 1e-6
    assert (tmp_path / "lab" / "lab.png").stat().st_size > 1000


def test_another_frameworks_function_is_held_against_the_same(
    cli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)  # as the command does with the folder it is started in
    (tmp_path / "theirs.py").write_text(
        "from turnstile.credit.base import to_tokens\n"
        "def their_rloo(groups, scores, *, sign=1.0):\n"
        "    out = []\n"
        "    for group, found in zip(groups, scores):\n"
        "        totals = [s.total for s in found]\n"
        "        out += to_tokens(group, [sign * t for t in totals])\n"
        "    return out\n",
        encoding="utf-8",
    )
    done = cli("lab", "theirs:their_rloo", "sign=-1.0", "--process", "stopping", "--groups", "64")
    assert done.code == 0, done.err
    assert "-1.000" in done.out  # straight the wrong way
    assert "breaks invariant 4" in done.out  # and failures get a share


def test_what_cannot_be_read_is_one_line(cli: Command) -> None:
    assert "did you mean 'rloo'" in cli("lab", "rlo").error
    assert "has no knob 'scal'; did you mean 'scale'" in cli("lab", "grpo", "scal=none").error
    assert "a knob without an estimator" in cli("lab", "scale=none").error
    assert "did you mean 'walk'" in cli("lab", "rloo", "--process", "wall").error


def test_losses(cli: Command) -> None:
    done = cli("lab", "--losses", "ppo", "clip_low=0.1", "kl", "--process", "stopping", "--groups", "64")
    assert done.code == 0, done.err
    assert "ppo (clip_low=0.1)" in done.out
    assert "stopping +0.1" in done.out
    assert "kl (estimator=k1)" in done.out  # held against the divergence that it regularises
    assert "not measured" not in done.out
    assert "did you mean 'ppo'" in cli("lab", "--losses", "pppo").error


def test_loss_multipliers(cli: Command) -> None:
    done = cli("lab", "--multipliers", "tis", "cap=1.5", "icepop", "--process", "stopping", "--groups", "64")
    assert done.code == 0, done.err
    for name in ("no factor", "tis (cap=1.5)", "icepop (low=0.9, high=1.2)", "stopping +0.3"):
        assert name in done.out
    assert "did you mean 'tis'" in cli("lab", "--multipliers", "tiss").error
    assert "has no knob 'cab'; did you mean 'cap'" in cli("lab", "--multipliers", "tis", "cab=2").error


def test_curves(cli: Command, tmp_path: Path) -> None:
    done = cli("lab", "--curves", "rloo", "of=total", "--process", "stopping", "--out", str(tmp_path / "lab"))
    assert done.code == 0, done.err
    (found,) = json.loads((tmp_path / "lab" / "curves.json").read_text(encoding="utf-8"))["races"]
    assert (found["estimator"], len(found["areas"])) == ("rloo (of=total)", 5)
    assert "give one of them" in cli("lab", "--losses", "--curves").error
    assert "give one of them" in cli("lab", "--losses", "--multipliers").error


def test_branched_groups(cli: Command) -> None:
    done = cli("lab", "rloo", "of=total", "--branched", "--process", "delayed", "--groups", "64")
    assert done.code == 0, done.err
    assert "delayed branched" in done.out
