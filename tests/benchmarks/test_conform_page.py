from __future__ import annotations

import json
from pathlib import Path

from benchmarks.page import written
from benchmarks.peers.conform import others, parts

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results" / "conform.md").read_text(encoding="utf-8")
KEPT = json.loads((ROOT / "docs" / "results" / "conform" / "peers.json").read_text(encoding="utf-8"))


def test_the_page_says_what_is_kept() -> None:
    assert written(PAGE, "conform", parts(KEPT)) == PAGE


def test_every_function_was_called_and_every_difference_is_explained() -> None:
    assert set(KEPT) == {"verl", "TRL", "OpenRLHF", "SkyRL"}
    for peer, body in KEPT.items():
        assert [one["name"] for one in body["functions"] if "error" in one] == []
        for line in others(peer, body):
            assert line[4] != "not explained", line
            assert float(line[6]) <= 1e-6, line  # and where the explanation does not apply, values are the same


def test_what_could_not_be_looked_at_is_said() -> None:
    one = {"name": "f", "ours": "", "knobs": {}, "differs": "", "error": "it raised"}
    found = "\n".join(parts({"a": {"module": "a.b", "error": "no module"}, "b": {"module": "b", "functions": [one]}}))
    assert "Not looked at: no module." in found
    assert "| `f` | ? | ? | ? | ? | ? | ? | ? | it raised |  |" in found
