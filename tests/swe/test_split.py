from __future__ import annotations

import pytest

from turnstile.errors import TaskError
from turnstile.swe.bug import Bug
from turnstile.swe.formats.instance import Instance, as_task
from turnstile.swe.split import by_function, by_package, shuffle_tasks
from turnstile.types import Task


def task(package: str, function: str, number: int) -> Task:
    bug = Bug(
        source=f"pypi:{package}==1", package=package, version="1", licence="MIT", requires=(), digest="0" * 16,
        file="m.py", function=function, kind="int", line=1, col=0, old="1", new="2", buggy="2", fixed="1", unique=True,
        shown=(1, 2), hidden=(), f2p=("t::a",), p2p=(), message="", difficulty=1,
    )  # fmt: skip
    return Task(id=f"{package}-1/m.{function}/l{number}", env="swe", data=bug.data())


TASKS = [task(package, f"f{name}", number) for package in "abcdefgh" for name in range(25) for number in range(2)]


def test_instances_are_split_by_themselves_or_by_repository() -> None:
    made = [as_task(Instance(id=f"{repo}-{number}", problem="", repo=repo)) for repo in "abcd" for number in range(20)]
    train, held_out = by_function(made, 0.5)
    assert {item.id[0] for item in train} == {item.id[0] for item in held_out} == set("abcd")
    train, held_out = by_package(made, ["b"])
    assert {item.id[0] for item in held_out} == {"b"}
    assert {item.id[0] for item in train} == set("acd")


def functions(tasks: list[Task]) -> set[tuple[str, str]]:
    return {(Bug.of(item).package, Bug.of(item).function) for item in tasks}


def test_functions_are_never_on_both_sides() -> None:
    train, held_out = by_function(TASKS, 0.25, seed=1)
    assert sorted(map(id, train + held_out)) == sorted(map(id, TASKS))
    assert not functions(train) & functions(held_out)
    assert 0.15 < len(held_out) / len(TASKS) < 0.35
    assert by_function(TASKS, 0.25, seed=1) == (train, held_out)
    assert by_function(TASKS, 0.25, seed=2) != (train, held_out)


def test_a_growing_file_moves_no_task() -> None:
    train, _ = by_function(TASKS, 0.5)
    some, _ = by_function(TASKS[::3], 0.5)
    assert set(functions(some)) <= set(functions(train))
    order = [item.id for item in shuffle_tasks(TASKS)]
    assert [item.id for item in shuffle_tasks(TASKS[::3])] == [
        i for i in order if i in {item.id for item in TASKS[::3]}
    ]


def test_the_share_may_be_zero_or_one() -> None:
    assert by_function(TASKS, 0.0) == (TASKS, [])
    assert by_function(TASKS, 1.0) == ([], TASKS)
    for share in (-0.1, 1.5):
        with pytest.raises(TaskError, match="between 0 and 1"):
            by_function(TASKS, share)
        with pytest.raises(TaskError, match="between 0 and 1"):
            by_package(TASKS, share)


def test_packages_are_held_out_by_name_or_share() -> None:
    train, held_out = by_package(TASKS, ["b", "h"])
    assert {Bug.of(item).package for item in held_out} == {"b", "h"}
    assert {Bug.of(item).package for item in train} == set("acdefg")
    train, held_out = by_package(TASKS, 0.4, seed=3)
    assert not {Bug.of(item).package for item in train} & {Bug.of(item).package for item in held_out}
    with pytest.raises(TaskError, match="no task is of package z"):
        by_package(TASKS, ["a", "z"])


def test_mixed_is_a_fair_sample_from_the_start() -> None:
    order = shuffle_tasks(TASKS, seed=4)
    assert sorted(map(id, order)) == sorted(map(id, TASKS))
    assert len({Bug.of(item).package for item in order[:40]}) == 8
    assert shuffle_tasks(TASKS[::-1], seed=4) == order
    assert shuffle_tasks(TASKS, seed=5) != order


def test_a_task_of_another_kind_is_refused() -> None:
    with pytest.raises(TaskError, match="env is 'guess'"):
        by_function([Task(id="x", env="guess")], 0.5)
    with pytest.raises(TaskError, match="data lacks source, package"):
        Bug.of(Task(id="x", env="swe"))
