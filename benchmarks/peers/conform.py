"""The advantage and loss functions of verl, TRL, OpenRLHF and SkyRL against the seven invariants, and beside ours.

    make conform-peers                            the four, in an environment of their own (.peers/conform)
    python -m benchmarks.peers.conform            looks, prints, and writes the tables of docs/results/conform.md
    python -m benchmarks.peers.conform --tables   only writes the tables of what is kept

What is found is kept in docs/results/conform/peers.json. Some seconds on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

from benchmarks.page import ROOT, Body, table, written

PEERS = ROOT / ".peers/conform"
PAGE = ROOT / "docs/results/conform.md"
KEPT = ROOT / "docs/results/conform/peers.json"
MARKS = {"holds": "+", "broken": "**no**", "declared": "d", "does not apply": "-"}
AGREES = 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="only write the tables of what is kept")
    if not parser.parse_args().tables:
        look()
    found = json.loads(KEPT.read_text(encoding="utf-8"))
    tables = parts(found)
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), "conform", tables), encoding="utf-8")
    print("\n\n".join(tables))
    print(f"\nwrote {PAGE.relative_to(ROOT)}")


def look() -> None:
    """Has the peers looked at, in their own environment."""
    interpreter = PEERS / "bin/python"
    if not interpreter.exists():
        sys.exit(f"error: there is no {PEERS.relative_to(ROOT)}; make it with: make conform-peers")
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    ended = subprocess.run(
        [interpreter, "-m", "benchmarks.peers.conform_worker", KEPT], cwd=ROOT, env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if ended.returncode:
        sys.exit(f"{ended.stdout}\nerror: conform_worker ended with {ended.returncode}; what it said stands above")


def parts(found: Mapping[str, Body]) -> list[str]:
    """The page's tables: one a peer with its counterexamples, then where values are others, and why."""
    made = []
    for peer, body in found.items():
        made.append(f"## {peer} {body.get('version', '')}".rstrip())
        if "error" in body:
            made.append(f"Not looked at: {body['error']}.")
            continue
        made.append(f"From `{body['module']}`:")
        head = ("function", *"1234567", "ours", "largest difference")
        made.append(table(head, [row(one) for one in body["functions"]]))
        made.append("\n".join(f"- {line}" for one in body["functions"] for line in broken(one)))
    made.append("## Functions with other values")
    rows = [line for peer, body in found.items() for line in others(peer, body)]
    made.append(table(("", "function", "ours", "difference", "reason", "equal under", "difference"), rows))
    return made


def row(one: Body) -> list[str]:
    """A function's row: its standing by each invariant, what is the same here, and how far values lie apart."""
    if "error" in one:
        return [f"`{one['name']}`", *["?"] * 7, one["error"], ""]
    marks = [MARKS[verdict["standing"]] for verdict in one["verdicts"]]
    return [f"`{one['name']}`", *marks, ours(one), number(one["gap"]) if one["ours"] else ""]


def ours(one: Body) -> str:
    """`ppo` (clip_low = 0.2)"""
    knobs = [f"{knob} = {value}" for knob, value in one["knobs"].items()]
    return f"`{one['ours']}`" + (f" ({', '.join(knobs)})" if one["knobs"] else "") if one["ours"] else ""


def broken(one: Body) -> Iterator[str]:
    """The counterexamples of a function."""
    for verdict in one.get("verdicts", ()):
        if verdict["standing"] == "broken":
            yield f"`{one['name']}`, {verdict['number']}: {verdict['note']}"


def others(peer: str, body: Body) -> Iterator[list[str]]:
    """The functions whose values are not ours to 1e-6, why, and where they are."""
    for one in body.get("functions", ()):
        if one.get("gap", 0.0) > AGREES:
            why = one["differs"] or "not explained"
            yield [
                peer, f"`{one['name']}`", f"`{one['ours']}`", number(one["gap"]), why, one.get("under", ""),
                number(one["gap under"]) if "gap under" in one else "",
            ]  # fmt: skip


def number(value: float) -> str:
    """0, or two digits."""
    return f"{value:.1e}" if value and value < 0.01 else f"{value:.2g}"


if __name__ == "__main__":
    main()
