from __future__ import annotations

import math

import pytest

from turnstile.evaluation.gains import breakdown, paired_breakdown, prior_share, split
from turnstile.evaluation.metrics import EpisodeResult


def result(task: str, kind: str, solved: int, package: str = "p") -> EpisodeResult:
    return EpisodeResult(
        task_id=task,
        sample=0,
        rates={"completion": True, "modification": bool(solved), "resolution": bool(solved)},
        kind=kind,
        package=package,
        outcome=float(solved),
        total=float(solved),
    )


KINDS = {"a1": "compare", "a2": "compare", "a3": "compare", "a4": "compare", "b1": "int", "b2": "int", "c1": "bool"}


def policy(*solved: str) -> list[EpisodeResult]:
    return [result(task, kind, int(task in solved)) for task, kind in KINDS.items()]


def test_split_puts_the_largest_part_first() -> None:
    assert [(name, len(part)) for name, part in split(policy(), "kind").items()] == [
        ("compare", 4),
        ("int", 2),
        ("bool", 1),
    ]


def test_breakdown_by_kind_and_package() -> None:
    found = breakdown(policy("a1", "b1", "b2"), "kind")
    assert {kind: part.mean for kind, part in found.items()} == {"compare": 0.25, "int": 1.0, "bool": 0.0}
    mixed = [result("x", "k", 1, "toolz"), result("y", "k", 0, "toolz"), result("z", "k", 1, "humanize")]
    assert {name: (part.mean, part.n_tasks) for name, part in breakdown(mixed, "package").items()} == {
        "toolz": (0.5, 2),
        "humanize": (1.0, 1),
    }


def test_paired_breakdown_by_hand() -> None:
    found = paired_breakdown(policy("a1", "c1"), policy("a1", "a2", "a3", "b1"), "kind")
    assert {kind: part.mean for kind, part in found.items()} == {"compare": 0.5, "int": 0.5, "bool": -1.0}
    assert paired_breakdown([], policy(), "kind") == {}


def test_prior_share_by_hand() -> None:
    # Gains: compare 3/4, int 0, bool 1. Of 7 tasks that is (3 + 0 + 1) / 7.
    found = prior_share(policy(), policy("a1", "a2", "a3", "c1"), {"compare": 60, "int": 20, "bool": 20, "other": 900})

    assert found.gain.mean == pytest.approx(4 / 7)
    assert [(k.kind, k.train_share) for k in found.kinds] == [("compare", 0.6), ("int", 0.2), ("bool", 0.2)]
    assert [k.gain for k in found.kinds] == [0.75, 0.0, 1.0]
    assert [k.contribution for k in found.kinds] == pytest.approx([3 / 7, 0, 1 / 7])
    assert sum(k.contribution for k in found.kinds) == pytest.approx(found.gain.mean)
    assert found.train_weighted_gain == pytest.approx(0.6 * 0.75 + 0.2 * 0 + 0.2 * 1)
    assert found.even_gain == pytest.approx((0.75 + 0 + 1) / 3)
    assert found.top1.kinds == ("compare",)
    assert found.top1.task_share == pytest.approx(4 / 7)
    assert found.top1.contribution.mean == pytest.approx(3 / 7)
    assert found.top1.gain_share == pytest.approx(3 / 4)
    assert found.top3.gain_share == pytest.approx(1.0)
    assert found.top3.task_share == pytest.approx(1.0)


def test_prior_share_orders_kinds_by_training_not_by_gain() -> None:
    found = prior_share(policy(), policy("a1", "a2"), {"bool": 5, "int": 3, "compare": 1})
    assert [k.kind for k in found.kinds] == ["bool", "int", "compare"]
    assert found.top1.gain_share == 0.0


def test_prior_share_without_a_gain_or_without_training_kinds() -> None:
    found = prior_share(policy("a1"), policy(), {})
    assert found.gain.mean < 0
    assert math.isnan(found.top1.gain_share)
    assert math.isnan(found.train_weighted_gain)
    empty = prior_share([], [], {"compare": 1})
    assert empty.kinds == ()
    assert math.isnan(empty.even_gain)
