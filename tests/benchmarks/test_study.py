"""What is kept of a study is told from what another recipe or other weights came to."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.research import study
from benchmarks.research.results import Page
from benchmarks.research.study import Study, kept, settings, weights_of
from turnstile.config import load_recipe

WHOLE = Study(steps=32, tasks=0, samples=1)


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project's folder, with what is kept and the page elsewhere, which is what this gives."""
    monkeypatch.chdir(study.ROOT)
    monkeypatch.setattr("benchmarks.research.study.KEPT", tmp_path / "kept")
    monkeypatch.setattr("benchmarks.research.results.KEPT", tmp_path / "kept")
    monkeypatch.setattr("benchmarks.research.results.PAGE", tmp_path / "page.md")
    (tmp_path / "kept").mkdir()
    (tmp_path / "page.md").write_text("Written by hand.\n")
    return tmp_path


def episode(task: int, *, resolution: bool) -> dict[str, Any]:
    rates = {"completion": True, "modification": True, "resolution": resolution}
    return {"task_id": f"t{task}", "sample": 0, "kind": "not", "package": "toolz", "outcome": 0.0, **rates}


def keep(name: str, by: Study = WHOLE, **evaluations: list[dict[str, Any]]) -> None:
    recipe = settings(load_recipe(study.RECIPE, by.overrides(name)))
    metrics = [{"step": step, "rate/resolution": 0.5, "rate/completion": 1.0} for step in (1, 2)]
    body = {"recipe": recipe, "weights": "w", "metrics": metrics, "evaluations": evaluations}
    kept(name).write_bytes(gzip.compress(json.dumps(body).encode()))


def test_what_another_recipe_came_to_is_refused() -> None:
    keep("seed-0-warm", Study(steps=2, tasks=10, samples=1, threads=7))
    with pytest.raises(SystemExit, match=r"seed-0-warm\.json\.gz is of another recipe \(eval\.tasks is 0, was 10\)"):
        WHOLE.read("seed-0-warm")
    assert Study(steps=32, tasks=10, samples=1).read("seed-0-warm")["weights"] == "w"
    assert WHOLE.read("seed-1-warm") == {}


def test_a_key_that_came_later_had_its_default() -> None:
    keep("seed-0-warm")
    body = json.loads(gzip.decompress(kept("seed-0-warm").read_bytes()))
    for key in ("tasks.allow_failed", "sampling.temperature"):  # the first is as by default, the second is not
        assert WHOLE.read("seed-0-warm")
        del body["recipe"][key]
        kept("seed-0-warm").write_bytes(gzip.compress(json.dumps(body).encode()))
    with pytest.raises(SystemExit, match=r"another recipe \(sampling\.temperature is 0\.7, was 1\.0\)"):
        WHOLE.read("seed-0-warm")


def test_a_kept_run_is_known_wherever_the_project_lies() -> None:
    found = settings(load_recipe(study.RECIPE, WHOLE.overrides("seed-1-gated")))
    assert found["model.id"] == "runs/results/seed-1-warm/checkpoints/step-000000/model"
    assert found["tasks.heldout"] == "data/demo/heldout.jsonl"
    assert "model.threads" not in found


def test_other_weights_are_not_taken_for_those_evaluated(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.research.study.RUNS", project / "runs")
    weights_of(0).mkdir(parents=True)
    (weights_of(0) / "model.safetensors").write_bytes(b"others")
    keep("seed-0-warm", warmstart=[])
    with pytest.raises(SystemExit, match=r"is not the one whose evaluation is in .*seed-0-warm\.json\.gz"):
        WHOLE.reinforce(0, "gated")
    assert not kept("seed-0-gated").exists()


def test_tables_are_of_what_is_kept(project: Path) -> None:
    for seed in (0, 1):
        keep(f"seed-{seed}-warm", warmstart=[episode(task, resolution=False) for task in range(4)])
    keep("seed-1-gated", trained=[episode(task, resolution=task > 0) for task in range(4)])
    Page(WHOLE).write()
    Page(WHOLE).write()
    page = (project / "page.md").read_text()
    assert page.startswith("Written by hand.\n")
    assert page.count("## Rates on held-out bugs") == 1
    assert "| resolution | +.750 " in page
    assert "D-RA" not in page
    assert (project / "demo-curves.png").read_bytes().startswith(b"\x89PNG")
