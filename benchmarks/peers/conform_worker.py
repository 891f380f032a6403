"""Every function of `functions.py` against the seven invariants, and beside ours: a process of its own, started by
`conform.py` with the Python of `.peers/conform`.

    PYTHONPATH=src:. .peers/conform/bin/python -m benchmarks.peers.conform_worker OUT
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers.agree import gap
from benchmarks.peers.functions import PEERS, UNDER, Case
from turnstile.conform.verdicts import Subject, conform
from turnstile.errors import ConfigError


def main() -> None:
    warnings.simplefilter("ignore")  # of what frameworks say of themselves when they are loaded
    found: dict[str, Any] = {}
    for peer, (module, cases) in PEERS.items():
        found[peer] = {"module": module}
        try:
            found[peer] |= {"version": version(peer.lower()), "functions": [look(case) for case in cases()]}
        except (ImportError, AttributeError) as error:  # another version of it
            found[peer]["error"] = f"{type(error).__name__}: {error}"
    Path(sys.argv[1]).write_text(one_a_line(found), encoding="utf-8")


def one_a_line(found: dict[str, Any]) -> str:
    """As JSON, one function a line, so that a change of one is a change of one line."""
    peers = []
    for peer, body in found.items():
        functions = ",\n  ".join(map(json.dumps, body.get("functions", ())))
        rest = json.dumps({name: value for name, value in body.items() if name != "functions"})[:-1]
        peers.append(f'{json.dumps(peer)}: {rest}, "functions": [\n  {functions}\n]}}')
    return "{\n" + ",\n".join(peers) + "\n}\n"


def look(case: Case) -> dict[str, Any]:
    """What the page says of one function."""
    body: dict[str, Any] = {"name": case.name, "ours": case.ours, "knobs": dict(case.knobs), "differs": case.differs}
    try:
        subject = Subject(name=case.name, form="padded", function=case.function, exempt=case.exempt)
        body["verdicts"] = [asdict(verdict) for verdict in conform(subject)]
        if case.ours:
            body["gap"] = gap(case)
        if case.under:
            body |= {
                "under": " and ".join(UNDER[each] for each in case.under),
                "gap under": gap(case, under=case.under),
            }
    except ConfigError as error:
        body["error"] = str(error)
    return body


if __name__ == "__main__":
    main()
