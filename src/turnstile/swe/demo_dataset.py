"""Make the task files of the demo from a fixed list of packages.

    python -m turnstile.swe.demo_dataset data/demo

Training and held-out tasks share no package. If the command is killed, running it again resumes where it stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnstile.cache import cache_dir
from turnstile.errors import TurnstileError
from turnstile.swe.bug import Bug, package_of
from turnstile.swe.bugs.candidates import DEMO_FILTER
from turnstile.swe.bugs.make import Progress, make
from turnstile.swe.packages.source import Package
from turnstile.swe.split import shuffle_tasks
from turnstile.tasks.base import write_tasks
from turnstile.types import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Ingredient:
    """One package of the demo, the number of tasks wanted, and test requirements that its metadata leaves out."""

    source: str
    n: int
    extra: tuple[str, ...] = ()


TRAIN = (
    Ingredient(source="pypi:boltons==26.2.0", n=400),
    Ingredient(source="pypi:pydash==8.1.0", n=400),
    Ingredient(source="pypi:sqlparse==0.6.1", n=80),
)
HELD_OUT = (
    Ingredient(source="pypi:toolz==1.2.0", n=110),
    Ingredient(source="pypi:humanize==4.17.0", n=60),
    Ingredient(source="pypi:python-slugify==9.2.0", n=60),
    Ingredient(source="pypi:inflection==0.5.1", n=60),
    Ingredient(source="pypi:cachetools==8.0.0", n=60),
    Ingredient(source="pypi:semver==3.1.1", n=60),
    Ingredient(source="pypi:tabulate==0.10.0", n=60),
    Ingredient(source="pypi:webcolors==25.10.0", n=60),
    Ingredient(source="pypi:parse==1.22.4", n=60),
    Ingredient(source="pypi:xmltodict==1.0.4", n=60),
)


async def make_demo(
    folder: Path,
    *,
    seed: int = 0,
    workers: int = 2,
    train: Sequence[Ingredient] = TRAIN,
    held_out: Sequence[Ingredient] = HELD_OUT,
    progress: Callable[[Progress], None] = lambda report: None,
) -> tuple[int, int]:
    """Write `train.jsonl`, `heldout.jsonl` and `NOTICE.md` into `folder`; return the task counts of the two files.

    Until they are written, the tasks of each package are kept in the cache. Raises TaskError as `make` does.
    """
    found: dict[str, list[Task]] = {}
    for name, ingredients in (("train", train), ("heldout", held_out)):
        found[name] = []
        for item in ingredients:
            file = item.source.partition(":")[2].replace("==", "-")
            made = await make(
                item.source,
                cache_dir() / "demo" / f"seed-{seed}" / f"{file}.jsonl",
                item.n,
                seed,
                wanted=DEMO_FILTER,
                workers=workers,
                extra=item.extra,
                progress=progress,
            )
            found[name] += made.tasks
        write_tasks(folder / f"{name}.jsonl", shuffle_tasks(found[name], seed))
    (folder / "NOTICE.md").write_text(notice(found, seed), encoding="utf-8")
    return len(found["train"]), len(found["heldout"])


def notice(found: Mapping[str, Sequence[Task]], seed: int) -> str:
    """Return the text of NOTICE.md for the task files.

    It lists the packages that they use, with licences and copyright lines, and the command that made the files.
    """
    rows, rights = [], []
    for name, tasks in found.items():
        counts = Counter(Bug.of(task).label for task in tasks)
        for label, bug in {Bug.of(task).label: Bug.of(task) for task in tasks}.items():
            rows.append(f"| {name}.jsonl | {bug.package} | {bug.version} | {bug.licence} | {counts[label]} |")
            rights.append(f"- {bug.package}: {'; '.join(copyrights(package_of(bug))) or 'see its licence'}")
    return _NOTICE.format(rows="\n".join(rows), rights="\n".join(sorted(rights)), seed=f" --seed {seed}" * bool(seed))


_NOTICE = """# What these task files contain

Each line of `train.jsonl` and `heldout.jsonl` describes one bug: where in a released package one token is to be
replaced, fragments of that one source line before and after (at most 56 characters), the names of the package's
tests that notice, and the first line of what the first of them says. No file and no function of the packages is
contained; their source distributions are fetched from the package index when the tasks are used.

| file | package | version | licence | tasks |
|---|---|---|---|---|
{rows}

The packages belong to their authors:

{rights}

Made by `python -m turnstile.swe.demo_dataset data/demo{seed}`; each package alone by
`turnstile tasks make pypi:NAME==VERSION --small --out FILE -n N`. The training and held-out packages are
disjoint; lines are in an order drawn from the task's id, so the first N of a file are a fair sample.
"""


def copyrights(package: Package) -> list[str]:
    """Return the copyright lines in the package's licence file; none if it has no such file."""
    if package.licence_file is None:
        return []
    text = (package.tree / package.licence_file).read_text(encoding="utf-8", errors="replace")
    lines = (" ".join(line.split()).rstrip(".") for line in text.splitlines())
    return [line for line in lines if re.match(r"(copyright\b.*(\(c\)|©|\d{4})|(\(c\)|©) *\d{4})", line, re.IGNORECASE)]


def main() -> None:
    """Make the demo's task files in the folder named on the command line."""
    parser = argparse.ArgumentParser(description="Make the task files of the demo.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()

    def show(report: Progress) -> None:
        if report.stage != "validate" or report.judged % 20 == 0:
            print(f"{report.package}: {report.stage} {report.message} {report.valid} of {report.wanted}", flush=True)

    try:
        train, held_out = asyncio.run(
            make_demo(arguments.folder, seed=arguments.seed, workers=arguments.workers, progress=show)
        )
    except TurnstileError as error:
        sys.exit(str(error))
    print(f"{train} training tasks, {held_out} held-out tasks in {arguments.folder}")


if __name__ == "__main__":
    main()
