"""Keep the verdicts on a package's bugs, in the task file and in a file of rejected bugs beside it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from turnstile.swe.bugs.candidates import Candidate
from turnstile.swe.packages.source import Package
from turnstile.tasks import jsonl_log
from turnstile.tasks.base import dump_task, load_tasks
from turnstile.types import Task


@dataclass(slots=True)
class Ledger:
    """The task file and the file of rejected bugs beside it.

    Earlier verdicts are read from both files, and new ones are appended.
    """

    out: Path
    package: Package
    tasks: dict[str, Task] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    undecided: set[str] = field(default_factory=set)  # candidates of this call; not saved

    @property
    def side(self) -> Path:
        return self.out.with_name(f"{self.out.name}.rejected.jsonl")

    def open(self) -> None:
        """Read both files, after cutting off a line that a killed run left half-written."""
        for path in (self.out, self.side):
            jsonl_log.repair(path)
        if self.out.exists() and self.out.stat().st_size:
            prefix = f"{self.package.label}/"
            self.tasks = {task.id: task for task in load_tasks(self.out) if task.id.startswith(prefix)}
        self.rejected = {record["id"]: record["why"] for record in jsonl_log.read(self.side)}

    def verdict_on(self, candidate: Candidate) -> Task | str | None:
        return self.tasks.get(candidate.id) or self.rejected.get(candidate.id)

    def add(self, candidate: Candidate, verdict: Task | str | None) -> None:
        if verdict is None:
            self.undecided.add(candidate.id)
            return
        if isinstance(verdict, Task):
            self.tasks[candidate.id] = verdict
            jsonl_log.append(self.out, dump_task(verdict))
        else:
            self.rejected[candidate.id] = verdict
            jsonl_log.append(self.side, json.dumps({"id": candidate.id, "why": verdict}))

    def kept(self, row: Sequence[Candidate]) -> int:
        """Return how many of the candidates became tasks."""
        return sum(candidate.id in self.tasks for candidate in row)

    def reasons(self, rows: Sequence[Sequence[Candidate]]) -> Counter[str]:
        """Count the rejected candidates by reason."""
        names = (candidate.id for row in rows for candidate in row)
        return Counter(self.rejected[name] for name in names if name in self.rejected)
