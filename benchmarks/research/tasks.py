"""What the factory of repository tasks makes of packages that it was not tuned for, and what the gate says of it.

    python -m benchmarks.research.tasks            all sources; what is done is not done again
    python -m benchmarks.research.tasks --tables   only writes the page of what is kept

Tasks are made of each source and checked, killed and started again where it stopped. Task files lie in runs/tasks/;
what each source came to is kept in docs/results/tasks/, which is part of the project, and the tables below the mark in
docs/results/tasks.md are written from that.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from turnstile.errors import TaskError
from turnstile.runs.task_validation import check_tasks
from turnstile.swe.bug import Bug
from turnstile.swe.bugs.candidates import Filter, candidates
from turnstile.swe.bugs.make import Made, Progress, make
from turnstile.swe.bugs.mutate import KINDS, LARGER_KINDS, TOKEN_KINDS
from turnstile.swe.bugs.profile import profile
from turnstile.swe.grading.findings import CheckedTask
from turnstile.swe.grading.grader import local_grader
from turnstile.swe.packages.source import fetch
from turnstile.tasks import jsonl_log

ROOT = Path(__file__).resolve().parents[2]
RUNS, KEPT, PAGE = Path("runs/tasks"), Path("docs/results/tasks"), Path("docs/results/tasks.md")
MARK = "<!-- below: generated, do not edit -->"
SUITE_RUNS = 3  # the third in the reverse order
TESTS_PER_BUG = 30
Body = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A source of tasks. `via` puts the files of a package of the index in a folder or a git repository first."""

    source: str
    layout: str
    extra: tuple[str, ...] = ()
    via: str = "index"

    @property
    def name(self) -> str:
        bare = self.source.partition(":")[2].replace("==", "-")
        return bare if self.via == "index" else f"{bare}-{self.via}"

    def spec(self) -> str:
        """What `turnstile tasks make` is given."""
        if self.via == "index":
            return self.source
        folder = RUNS / self.via / self.name
        if not folder.exists():
            shutil.copytree(fetch(self.source, extra=self.extra).tree, folder)
        if self.via == "folder":
            return f"./{folder}"
        if not (folder / ".git").exists():
            git = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder))
            for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"], ["tag", "v1"]):
                subprocess.run([*git, *arguments], check=True)
        return f"git+file://{folder.resolve()}@v1"


SUBJECTS = (
    Subject(source="pypi:simpleeval==1.0.8", layout="one module, tests next to it"),
    Subject(source="pypi:pyflakes==4.1.0", layout="tests in the package"),
    Subject(source="pypi:isodate==0.7.2", layout="src, unittest and pytest"),
    Subject(source="pypi:voluptuous==0.16.0", layout="tests.py in the package"),
    Subject(source="pypi:schema==0.7.8", layout="one module, tests next to it"),
    Subject(source="pypi:markdown==3.11.3", layout="unittest, data files"),
    Subject(source="pypi:cssselect==1.6.0", layout="tests need an undeclared package", extra=("lxml",)),
    Subject(source="pypi:funcy==2.1", layout="package and tests"),
    Subject(source="pypi:natsort==8.4.0", layout="package and tests"),
    Subject(source="pypi:docopt==0.6.2", layout="one module"),
    Subject(source="pypi:jsonpointer==3.12", layout="one module, tests.py"),
    Subject(source="pypi:jmespath==1.1.0", layout="tests import a file that is not shipped"),
    Subject(source="pypi:sortedcontainers==2.4.0", layout="no tests in the archive"),
    Subject(source="pypi:anytree==2.13.0", layout="as a folder", via="folder"),
    Subject(source="pypi:unidiff==1.0.1", layout="as a commit", via="git"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=24, help="tasks of each source")
    parser.add_argument("--workers", type=int, default=2, help="test runs at once")
    parser.add_argument("--only", nargs="+", help="parts of the names of the sources")
    parser.add_argument("--tables", action="store_true", help="only write the page of what is kept")
    args = parser.parse_args()
    os.chdir(ROOT)
    for subject in () if args.tables else SUBJECTS:
        if args.only and not any(part in subject.name for part in args.only):
            continue
        if not (KEPT / f"{subject.name}.json").exists():
            keep(subject, study(subject, args.n, args.workers))
        write_page()
    write_page()


def study(subject: Subject, n: int, workers: int) -> Body:
    """Tasks made of one source, and checked; or why it is refused."""
    print(f"{subject.name}: making tasks", flush=True)
    out, times = RUNS / f"{subject.name}.jsonl", RUNS / f"{subject.name}.times.jsonl"
    try:
        spec = subject.spec()
        made = asyncio.run(
            make(
                spec, out, n, wanted=Filter(kinds=KINDS), runs=SUITE_RUNS, extra=subject.extra,
                tests_per_bug=TESTS_PER_BUG, workers=workers, progress=Watch(times),
            )
        )  # fmt: skip
    except TaskError as error:
        return {"refused": str(error).replace(str(ROOT) + os.sep, "")}
    print(f"{subject.name}: checking {len(made.tasks)} tasks", flush=True)
    began = time.monotonic()
    checked = check_tasks(made.tasks, workers=workers)
    return {
        "workers": workers,
        **asyncio.run(sites(spec, subject.extra)),
        "making": sum(jsonl_log.read(times)),
        "checking": 0.0 if any(one.remembered for one in checked) else time.monotonic() - began,
        **verdicts(made, out),
        "checked": [summary(one) for one in checked],
    }


class Watch:
    """Adds up the seconds between verdicts, where a killed study finds them again."""

    def __init__(self, times: Path) -> None:
        self._times, self._last = times, time.monotonic()

    def __call__(self, report: Progress) -> None:
        now = time.monotonic()
        if report.stage == "validate":
            jsonl_log.append(self._times, str(round(now - self._last, 3)))
        self._last = now


async def sites(spec: str, extra: Sequence[str]) -> Body:
    """What there is to try: the package's tests, and its places for a bug in functions that they call."""
    package = fetch(spec, extra=extra)
    async with local_grader() as grader:  # not used, as the profile is kept
        measured = await profile(package, grader.bench, runs=SUITE_RUNS)
    rows = candidates(package, measured, 0, Filter(kinds=KINDS), TESTS_PER_BUG)
    found = [candidate for row in rows for candidate in row]
    return {
        "licence": package.licence,
        "tests": measured.collected,
        "failing": len(measured.unstable) - len(measured.flaky),
        "flaky": len(measured.flaky),
        "functions": len(rows),
        "sites": len({(one.file, one.mutant.line, one.mutant.col) for one in found}),
        "candidates": Counter(one.mutant.kind for one in found),
    }


def verdicts(made: Made, out: Path) -> Body:
    """Tasks by kind, and rejections by kind and reason."""
    rejected: dict[str, Counter[str]] = {}
    for record in jsonl_log.read(out.with_name(f"{out.name}.rejected.jsonl")):
        rejected.setdefault(record["id"].rsplit("-", 2)[1], Counter())[record["why"]] += 1
    return {
        "tasks": Counter(Bug.of(task).kind for task in made.tasks),
        "rejected": rejected,
        "undecided": made.undecided,
    }


def summary(one: CheckedTask) -> Body:
    facts = {name: getattr(one, name) for name in ("gold", "empty", "flaky", "wins", "random", "killed", "why")}
    return {**facts, "kind": Bug.of(one.task).kind, "unknown": one.unknown, "tried": len(one.tried)}


def keep(subject: Subject, body: Body) -> None:
    KEPT.mkdir(parents=True, exist_ok=True)
    head = {"source": subject.source, "via": subject.via, "layout": subject.layout, "extra": subject.extra}
    (KEPT / f"{subject.name}.json").write_text(json.dumps({**head, **body}, indent=1) + "\n", encoding="utf-8")
    print(f"{subject.name}: {body.get('refused') or sum(body['tasks'].values())}", flush=True)


def write_page() -> None:
    """Replaces what stands below the mark of the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The page with the tables of what is kept."""
    files = [file for subject in SUBJECTS if (file := KEPT / f"{subject.name}.json").exists()]
    kept = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}
    done = {name: body for name, body in kept.items() if "refused" not in body}
    parts = [sources_table(done), refusals(kept), kinds_table(done), reasons_table(done), gate_tables(done)]
    text = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    return f"{text}{MARK}\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def sources_table(done: Mapping[str, Body]) -> str:
    rows = []
    for name, body in done.items():
        tasks, rejected = sum(body["tasks"].values()), sum(sum(by.values()) for by in body["rejected"].values())
        rows.append([
            name, body["layout"] + (f" (`--extra {' '.join(body['extra'])}`)" if body["extra"] else ""),
            body["tests"], body["failing"], body["flaky"], body["functions"], body["sites"],
            sum(body["candidates"].values()), tasks + rejected, tasks, share(tasks, tasks + rejected),
            f"{body['making'] / max(tasks, 1):.1f}", body["workers"],
        ])  # fmt: skip
    head = ("source", "layout", "tests", "never pass", "flaky", "functions", "sites", "candidates", "judged", "tasks",
            "valid", "seconds a task", "workers")  # fmt: skip
    return table("Sources", head, rows)


def refusals(kept: Mapping[str, Body]) -> str:
    return table("Refused", ("source", "error"),
                 [[name, f"`{body['refused']}`"] for name, body in kept.items() if "refused" in body])  # fmt: skip


def kinds_table(done: Mapping[str, Body]) -> str:
    """By kind of bug over all sources."""
    rows = []
    for kinds, title in ((TOKEN_KINDS, "of one token"), (LARGER_KINDS, "larger"), (KINDS, "all")):
        for kind in (*((kind,) for kind in kinds), kinds) if kinds != KINDS else (KINDS,):
            label = kind[0] if len(kind) == 1 else f"**{title}**"
            rows.append([label, *_counts(done, kind)])
    head = ("kind", "candidates", "judged", "tasks", "valid", "survive", "hang or crash", "break the import", "other")
    return table("By kind of bug", head, rows)


def _counts(done: Mapping[str, Body], kinds: Sequence[str]) -> list[Any]:
    bodies = list(done.values())
    found, tasks = (sum(body[key].get(kind, 0) for body in bodies for kind in kinds) for key in ("candidates", "tasks"))
    why: Counter[str] = Counter()
    for body in bodies:
        for kind in kinds:
            why.update(body["rejected"].get(kind, {}))
    told = [why["survives"], why["hangs or crashes"], why["breaks the import"]]
    judged = tasks + why.total()
    return [found, judged, tasks, share(tasks, judged), *told, why.total() - sum(told)]


def reasons_table(done: Mapping[str, Body]) -> str:
    reasons: dict[str, Counter[str]] = {
        name: sum(map(Counter, body["rejected"].values()), Counter()) for name, body in done.items()
    }
    columns = [reason for reason, _ in sum(reasons.values(), Counter()).most_common()]
    rows = [[name, *(why[column] for column in columns), done[name]["undecided"]] for name, why in reasons.items()]
    return table("Rejected, by reason", ("source", *columns, "no verdict"), rows)


def gate_tables(done: Mapping[str, Body]) -> str:
    """What `turnstile tasks check` found, by source and by kind."""
    found = [(name, one) for name, body in done.items() for one in body["checked"]]
    parts = []
    by: Callable[[tuple[str, Body]], str]
    for title, by, order in (
        ("Task validation, by source", lambda item: item[0], list(done)),
        ("Task validation, by kind of bug", lambda item: item[1]["kind"], list(KINDS)),
    ):
        rows = [gate_row(key, [one for item, one in found if by((item, one)) == key]) for key in order]
        rows.append(gate_row("**all**", [one for _, one in found]))
        head = ("", "tasks", "passed", "gold", "empty", "flaky", "killed", "random", "cheats", "won", "unknown")
        parts.append(table(title, head, [row for row in rows if row[1]]))
    failed = [f"- {name}: {one['why'] or one['unknown']}" for name, one in found if one["why"] or one["unknown"]]
    return "\n\n".join(parts) + ("\n\nWhat did not pass:\n\n" + "\n".join(failed) if failed else "")


def gate_row(label: str, checked: Sequence[Body]) -> list[Any]:
    passed = sum(not one["why"] and not one["unknown"] for one in checked)
    random = [one["random"] for one in checked if one["random"] is not None]
    return [
        label, len(checked), passed, mean(score for one in checked for score in one["gold"]),
        mean(score for one in checked for score in one["empty"]), sum(bool(one["flaky"]) for one in checked),
        sum(one["killed"] for one in checked), mean(random), sum(one["tried"] for one in checked),
        sum(len(one["wins"]) for one in checked), sum(bool(one["unknown"]) for one in checked),
    ]  # fmt: skip


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return ""
    lines = [f"## {title}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def mean(values: Iterable[float]) -> str:
    numbers = list(values)
    return f"{sum(numbers) / len(numbers):.2f}" if numbers else "-"


if __name__ == "__main__":
    main()
