"""The task files of the demo: which packages they are made of, and the command that makes them.

    python -m turnstile.tasks.swe.demo data/demo

Training and held-out tasks share no package. Killed and started again, it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnstile.errors import TurnstileError
from turnstile.tasks.base import write_tasks
from turnstile.tasks.swe.make import DEMO_FILTER, Progress, make
from turnstile.tasks.swe.source import cache_root
from turnstile.tasks.swe.split import mixed
from turnstile.types import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Ingredient:
    """One package of the demo, how many tasks are wanted of it, and what its tests need beyond its metadata."""

    source: str
    n: int
    extra: tuple[str, ...] = ()


TRAIN = (
    Ingredient(source="pypi:boltons==26.2.0", n=400),
    Ingredient(source="pypi:pydash==8.1.0", n=400),
    Ingredient(source="pypi:sqlparse==0.6.1", n=150),
)
HELD_OUT = (
    Ingredient(source="pypi:toolz==1.2.0", n=110),
    Ingredient(source="pypi:humanize==4.17.0", n=60),
    Ingredient(source="pypi:python-slugify==9.2.0", n=60),
    Ingredient(source="pypi:inflection==0.5.1", n=60),
    Ingredient(source="pypi:cachetools==8.0.0", n=60),
    Ingredient(source="pypi:semver==3.1.1", n=60),
    Ingredient(source="pypi:isodate==0.7.2", n=60),
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
    """Writes `train.jsonl` and `heldout.jsonl` into `folder`; gives how many tasks each holds.

    The tasks of each package are kept in the cache until then. Raises TaskError as `make` does.
    """
    counts = []
    for name, ingredients in (("train", train), ("heldout", held_out)):
        tasks: list[Task] = []
        for item in ingredients:
            file = item.source.partition(":")[2].replace("==", "-")
            out = cache_root() / "demo" / f"seed-{seed}" / f"{file}.jsonl"
            made = await make(
                item.source,
                out,
                item.n,
                seed,
                wanted=DEMO_FILTER,
                workers=workers,
                extra=item.extra,
                progress=progress,
            )
            tasks += made.tasks
        counts.append(write_tasks(folder / f"{name}.jsonl", mixed(tasks, seed)))
    return counts[0], counts[1]


def main() -> None:
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
