"""Would the tests catch a mistake? Small bugs drawn by a seed over all rooms, and what the tests say of each.

Each mutant is one wrong token in a copy of the last commit. The tests of its room run first, and all others if those
pass; what survives `make test` is given to the slow tests of its room too. A test that fails without the mutant as
well, like one that counts on where packages are installed, is left out. Results are appended to the output as they
come, so the same command goes on where it was stopped; it begins anew if the commit is another one.

    python -m benchmarks.research.mutants --count 60 --seed 0        # 1.5 hours on two cores
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from turnstile.swe.bugs.mutate import Mutant, mutants
from turnstile.swe.edits import apply_all

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 900
"""A test run that takes longer hangs, which the mutant is caught by."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "mutants.jsonl")
    options = parser.parse_args()
    commit = _git(ROOT, "rev-parse", "HEAD")
    known = {}
    if options.out.exists():
        lines = [json.loads(line) for line in options.out.read_text(encoding="utf-8").splitlines()]
        known = {line["number"]: line for line in lines if (line["commit"], line["seed"]) == (commit, options.seed)}
    results = list(known.values())
    broken: set[str] = set()
    with tempfile.TemporaryDirectory() as scratch:
        clone = Path(scratch, "clone")
        _git(ROOT, "clone", "-q", "--shared", str(ROOT), str(clone))
        for number, (file, mutant) in enumerate(_drawn(clone, options.count, options.seed)):
            if number in known:
                continue
            result = {"commit": commit, "seed": options.seed, "number": number, **_tried(clone, file, mutant, broken)}
            results.append(result)
            options.out.write_text("".join(f"{json.dumps(line)}\n" for line in results), encoding="utf-8")
            print(f"{number + 1}/{options.count} {result['place']}: {result['killed_by'] or 'SURVIVED'}", flush=True)
    caught = [result for result in results if result["killed_by"]]
    quickly = sum(result["by"] != "slow" for result in caught)
    print(f"{len(caught)} of {len(results)} mutants are caught, {quickly} of them by make test")
    return 0


def _drawn(clone: Path, count: int, seed: int) -> list[tuple[Path, Mutant]]:
    """Return mutants of as many rooms as there are, one room after the other."""
    rng = random.Random(seed)
    source = clone / "src" / "turnstile"
    rooms: dict[str, list[Path]] = {}
    for file in sorted(source.rglob("*.py")):
        rooms.setdefault(file.relative_to(source).parts[0], []).append(file)
    found = {
        room: [(file, mutant) for file in files for mutant in mutants(file.read_text(encoding="utf-8"))]
        for room, files in rooms.items()
    }
    order = sorted(room for room, all_of_it in found.items() if all_of_it)
    rng.shuffle(order)
    return [rng.choice(found[order[place % len(order)]]) for place in range(count)]


def _tried(clone: Path, file: Path, mutant: Mutant, broken: set[str]) -> dict[str, Any]:
    """Return what the tests say of a mutant: which of them caught it, and in which round.

    Tests that fail without it too are added to `broken`, and left out from then on.
    """
    text = file.read_text(encoding="utf-8")
    caught = by = ""
    for name, arguments in _rounds(clone, file):
        while not caught:
            file.write_text(apply_all(text, mutant.edits), encoding="utf-8")
            failing = _failing(clone, arguments, broken)
            file.write_text(text, encoding="utf-8")
            if not failing:
                break
            if "::" in failing and _failing(clone, [failing], set()):
                broken.add(failing)
            else:
                caught, by = failing, name
    return {
        "place": f"{file.relative_to(clone)}:{mutant.line}",
        "line": text.splitlines()[mutant.line - 1].strip(),
        "kind": mutant.kind,
        "old": mutant.old,
        "new": mutant.new,
        "killed_by": caught,
        "by": by,
    }


def _rounds(clone: Path, file: Path) -> Iterator[tuple[str, Sequence[str]]]:
    """The tests of the file's room, all of `make test`, and the slow ones of the room."""
    room = file.relative_to(clone / "src" / "turnstile").parts[0].removesuffix(".py")
    own = [path for path in (f"tests/{room}", f"tests/test_{room}.py") if (clone / path).exists()]
    if own:
        yield "room", ["-m", "not slow", *own]
    yield "all", ["-m", "not slow", "-n", "2", "--dist", "loadfile"]
    if own:
        yield "slow", ["-m", "slow", *own]


def _failing(clone: Path, arguments: Sequence[str], broken: set[str]) -> str:
    """Return the first failing test of those that `arguments` select, without those in `broken`; "" if none fails."""
    left_out = [f"--deselect={test}" for test in sorted(broken)]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        *left_out,
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": str(clone / "src")}
    try:
        done = subprocess.run(
            command, cwd=clone, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end within {SECONDS} s"
    if done.returncode in (0, 5):  # 5: no test was selected
        return ""
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0].split(" - ")[0].split(" ", 1)[1] if lines else f"pytest ended with {done.returncode}"


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
