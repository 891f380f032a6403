"""`turnstile audit`: the audit of a run's ledger against its recipe, and the comparison of two runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from turnstile.records.audit import Audit, Expected, audit
from turnstile.records.run_diff import RecordDifference, first_difference
from turnstile.runs.run_folder import changed_keys, read_recipe, read_resolved
from turnstile.tracking.jsonl import read_metrics
from turnstile.trainer import checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Audited:
    """The audit of a run's ledger, the number of steps in its recipe, and the staleness of each logged step.

    Staleness is how many versions a step's tokens were behind, as (mean, maximum).
    """

    audit: Audit
    steps: int
    staleness: Mapping[int, tuple[float, float]]


def audit_run(run: Path, *, record: bool = False) -> Audited:
    """Audit the ledger of a run. With `record`, also compare it with the record.

    Raises ConfigError for a folder that is not a run, and LedgerError if its ledger is missing or damaged.
    """
    recipe = read_recipe(run)
    train, rollout = recipe.train, recipe.rollout
    again = recipe.replay_buffer.uses if recipe.replay_buffer.size else 0
    declared = Expected(attempts=rollout.tasks_per_step * rollout.group_size, passes=train.epochs * (1 + again))
    return Audited(
        audit=audit(run, declared, record=record),
        steps=train.steps,
        staleness={
            step["step"]: (step["staleness/mean"], step["staleness/max"])
            for step in read_metrics(run)
            if "staleness/mean" in step
        },
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The differences between two runs: keys of the recipe, versions, and the first difference between their records.

    If the records are equal, `weights` is the first step whose weights differ, or None if there is none.
    """

    recipe: list[str]
    versions: list[str]
    record: RecordDifference | None
    equal_until: int  # the last step up to which the records are equal
    weights: int | None

    @property
    def same(self) -> bool:
        """Whether the parts of the records and checkpoints that both runs have are equal."""
        return self.record is None and self.weights is None


def compare_runs(one: Path, other: Path) -> Difference:
    """Return the differences between two runs.

    Raises ConfigError for a folder that is not a run, and TurnstileError for a run without a record.
    """
    ours, theirs = read_resolved(one), read_resolved(other)
    recipe, another = (read_recipe(run).model_dump(mode="json") for run in (one, other))
    found = first_difference(one, other)
    weights = None
    if isinstance(found, int):
        sums = [checkpoint.weights_digests(run / "checkpoints") for run in (one, other)]
        weights = min(
            (step for step in sums[0].keys() & sums[1].keys() if sums[0][step] != sums[1][step]), default=None
        )
    return Difference(
        recipe=changed_keys(recipe, another) + changed_keys(ours.get("given", {}), theirs.get("given", {})),
        versions=changed_keys(ours["versions"], theirs["versions"]) + changed_keys(ours["git"], theirs["git"], "git."),
        record=found if isinstance(found, RecordDifference) else None,
        equal_until=found if isinstance(found, int) else found.step - 1,
        weights=weights,
    )
