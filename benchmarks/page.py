"""The page docs/results/performance.md and what stands behind it: every benchmark keeps its results as JSON beside the
page and writes its own tables, between marks of its own, from what is kept."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/results/performance.md"
KEPT = ROOT / "docs/results/performance"
Body = dict[str, Any]


class Kept:
    """The results of one benchmark by name, in one JSON file; a result is on the disk when `put` returns."""

    def __init__(self, name: str) -> None:
        self.path = KEPT / f"{name}.json"
        self.results: dict[str, Body] = json.loads(self.path.read_text("utf-8")) if self.path.is_file() else {}

    def put(self, key: str, body: Body) -> None:
        self.results[key] = {**body, "commit": commit()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = (f"{json.dumps(key)}: {json.dumps(self.results[key])}" for key in sorted(self.results))
        whole = self.path.with_suffix(".tmp")  # killed in between, what was kept before is still there
        whole.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        whole.replace(self.path)


def commit() -> str:
    """The state of the project that is measured; `+` says that its code is not quite that commit's."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    return git("describe", "--always") + ("+" if git("status", "--porcelain", "--", "src", "benchmarks") else "")


def write(name: str, parts: Sequence[str]) -> None:
    """Replaces what stands on the page between the marks of `name`."""
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), name, parts), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}", flush=True)


def written(text: str, name: str, parts: Sequence[str]) -> str:
    """The page with `parts` between the marks of `name`. Ends the program where it lacks them."""
    begin, end = f"<!-- {name}: generated, do not edit -->", f"<!-- end of {name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        sys.exit(f"error: {PAGE} lacks the lines {begin!r} and {end!r}; put them where the tables belong")
    body = "\n\n".join(part for part in parts if part)
    return f"{before}{begin}\n\n{body}\n\n{end}{after}"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return ""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def spread(values: Sequence[float], digits: int = 1, style: Literal["f", "%"] = "f") -> str:
    """The median, and the range where there are several."""
    middle, least, most = (f"{each(values):.{digits}{style}}" for each in (statistics.median, min, max))
    return middle if len(values) < 2 else f"{middle} ({least} to {most})"
