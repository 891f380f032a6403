"""The table of metrics, against what is logged."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import turnstile
from turnstile.lookup import KINDS, resolve
from turnstile.losses.check import DECLARED, LOSS_MULTIPLIERS, sample_batch
from turnstile.tracking.metrics import METRICS, meaning_of

SOURCE = Path(turnstile.__file__).parent
TITLES = {name.partition("/")[0] for table in METRICS.values() for name in table if "/" in name}


def named() -> set[str]:
    """Return the strings in the code that look like a metric."""
    found = set()
    for path in (*SOURCE.glob("trainer/*.py"), *SOURCE.glob("rewards/*.py"), *SOURCE.glob("rollout/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                title, slash, rest = node.value.partition("/")
                if slash and title in TITLES and rest and rest.replace("_", "").replace("/", "").isalpha():
                    found.add(node.value)
    return found


def test_every_metric_that_the_code_names_has_a_meaning() -> None:
    found = named()
    assert len(found) > 30
    assert {name for name in found if meaning_of(name) is None} == set()


def own_meaning(name: str) -> bool:
    return any(name in table for table in METRICS.values())


@pytest.mark.parametrize("kind", sorted(set(KINDS["loss"]) - {"value"}))
def test_every_metric_of_a_loss_has_a_meaning_of_its_own(kind: str) -> None:
    """The meaning of `loss/*` is for losses of one's own."""
    declared = next(declared for declared in DECLARED if declared.kind == kind)
    logprobs, batch = sample_batch()[1], sample_batch()[0]
    _, found = resolve("loss", kind)(logprobs, batch, **dict(declared.knobs))
    assert [name for name in found if not own_meaning(f"loss/{name}")] == []


@pytest.mark.parametrize("kind", sorted(KINDS["loss_multiplier"]))
def test_every_metric_of_a_loss_multiplier_has_one(kind: str) -> None:
    declared = next(declared for declared in LOSS_MULTIPLIERS if declared.kind == kind)
    _, found = resolve("loss_multiplier", kind)(sample_batch()[0], **dict(declared.knobs))
    assert [name for name in found if not own_meaning(f"loss/{name}")] == []


def test_patterns_come_after_names() -> None:
    assert meaning_of("rate/resolution") == meaning_of("rate/solved")
    assert meaning_of("loss/mine") == ("-", "a metric of a loss of your own")
    assert meaning_of("nonsense") is None
