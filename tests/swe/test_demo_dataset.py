"""The task files that ship with the project are what the demo's documents say of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from turnstile.swe.bug import Bug
from turnstile.swe.bugs.candidates import DEMO_FILTER
from turnstile.swe.bugs.mutate import TOKEN_KINDS
from turnstile.swe.demo_dataset import HELD_OUT, TRAIN, Ingredient
from turnstile.swe.split import shuffle_tasks
from turnstile.tasks.base import load_tasks

DATA = Path(__file__).parents[2] / "data" / "demo"
FILES = {"train.jsonl": (TRAIN, 600), "heldout.jsonl": (HELD_OUT, 200)}


@pytest.mark.parametrize("name", FILES)
def test_every_task_is_a_small_bug_of_a_named_package(name: str) -> None:
    ingredients, least = FILES[name]
    tasks = load_tasks(DATA / name)
    bugs = [Bug.of(task) for task in tasks]
    assert len(bugs) >= least
    assert {bug.source for bug in bugs} == {item.source for item in ingredients}
    for bug in bugs:
        assert bug.kind in TOKEN_KINDS
        assert bug.unique
        assert bug.f2p
        assert bug.message
        assert not set(bug.f2p) & set(bug.p2p)
        assert len(bug.f2p) + len(bug.p2p) <= 30
        assert len(bug.shown_lines()) <= DEMO_FILTER.max_shown
        assert bug.line in bug.shown_lines()
        assert bug.old in bug.fixed
        assert bug.new in bug.buggy
        assert len(bug.buggy) - len(bug.fixed) == len(bug.new) - len(bug.old)
        assert "\n" not in bug.buggy + bug.fixed + bug.message
    assert tasks == shuffle_tasks(tasks)
    assert (DATA / name).stat().st_size < 2_000_000


def test_training_and_held_out_share_no_package() -> None:
    packages = [{Bug.of(task).package for task in load_tasks(DATA / name)} for name in FILES]
    assert not packages[0] & packages[1]


def test_held_out_tasks_are_spread() -> None:
    bugs = [Bug.of(task) for task in load_tasks(DATA / "heldout.jsonl")]
    (_, most), *_ = Counter(bug.package for bug in bugs).most_common(1)
    assert most <= 0.4 * len(bugs)
    functions = Counter((bug.package, bug.file, bug.function, bug.shown) for bug in bugs)
    assert max(functions.values()) <= 4
    assert set(Counter(bug.kind for bug in bugs)) >= set(TOKEN_KINDS) - {"minmax", "anyall"}


def test_the_notice_names_every_package() -> None:
    notice = (DATA / "NOTICE.md").read_text(encoding="utf-8")
    wanted: tuple[Ingredient, ...] = (*TRAIN, *HELD_OUT)
    for item in wanted:
        assert "| " + item.source.removeprefix("pypi:").replace("==", " | ") + " |" in notice
