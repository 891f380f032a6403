"""Estimators by name, many in one study, its lines kept and shown."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from turnstile.credit.check import DECLARED
from turnstile.errors import ConfigError, TrainingError
from turnstile.lab.figures import draw_study, draw_sweeps, to_png
from turnstile.lab.measure import Subject
from turnstile.lab.processes import make
from turnstile.lab.study import Line, Setting, line_of, study, sweeps
from turnstile.lab.subjects import declared_subjects, everyone, subject
from turnstile.lab.table import details, direction, directions, progress, to_markdown
from turnstile.lookup import KINDS, resolve

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def lines() -> list[Line]:
    subjects = [subject("rloo"), subject("rloo", {"of": "outcome"}), subject("grpo"), Subject(name="no", estimator=_no)]
    settings = [Setting(process=make(name), size=4, groups=128) for name in ("stopping", "misaligned")]
    return study(subjects, settings)


def _no(groups, scores):  # type: ignore[no-untyped-def]
    raise TrainingError("it wants a critic's values")


def test_every_kind_of_the_table_is_measured_by_itself() -> None:
    found = everyone()
    assert {each.name for each in found} == set(KINDS["credit"])
    assert len(found) >= len(DECLARED)
    assert all(set(each.broken) == set(d.exempt) for d in DECLARED for each in found if matches(each, d.kind, d.knobs))


def matches(each: Subject, kind: str, knobs: object) -> bool:
    return each.name == kind and each.knobs == knobs


def test_a_function_of_ones_own_is_held_against_the_same(lines: list[Line]) -> None:
    (mine,) = declared_subjects("turnstile.credit.rloo:rloo")
    assert (mine.label, mine.broken) == ("turnstile.credit.rloo:rloo", {})
    (line,) = study([mine], [Setting(process=make("stopping"), size=4, groups=128)])
    assert line.figures == lines[0].figures
    with pytest.raises(ConfigError, match="cannot be measured"):
        subject("turnstile.credit.stats:flat")
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        subject("grop")


def test_what_cannot_be_measured_says_why(lines: list[Line]) -> None:
    refused = [line for line in lines if line.kind == "no"]
    assert [line.refused for line in refused] == ["it wants a critic's values"] * 2
    assert all(line.figures is None for line in refused)


def test_lines_survive_json(lines: list[Line]) -> None:
    again = [line_of(json.loads(json.dumps(line.to_json()))) for line in lines]
    assert again == lines
    assert lines[0].figures is not None
    none = replace(lines[0], figures=replace(lines[0].figures, cosine=math.nan, episodes=math.inf))
    found = line_of(json.loads(json.dumps(none.to_json(), allow_nan=False))).figures
    assert found is not None
    assert math.isnan(found.cosine)
    assert math.isinf(found.episodes)


def test_tables_say_what_is_biased_and_what_follows_the_outcome(lines: list[Line]) -> None:
    grid = directions(lines)
    assert grid.columns == ("estimator", "stopping", "misaligned", "breaks")
    cells = {row[0]: row[1:] for row in grid.rows}
    assert cells["rloo"] == ("1.000", "1.000", "-")
    assert all(cell.endswith("o") for cell in cells["rloo (of=outcome)"][:2])
    assert cells["grpo"][0].endswith("!")
    assert cells["no"] == ("-", "-", "-")
    assert float(progress(lines).rows[0][1]) > 0.5
    assert details(lines, "stopping").rows[0][1] == "1.000"
    assert to_markdown(grid).splitlines()[1] == "|---|---:|---:|---:|"
    assert lines[0].figures is not None
    silent = replace(lines[0].figures, cosine=math.nan)
    assert direction([silent]) == "none"
    assert direction([silent, lines[0].figures]) == "1.000"


def test_plots(lines: list[Line]) -> None:
    assert to_png(draw_study(lines), dpi=40).startswith(PNG)
    settings = {knob: [replace(each, groups=32) for each in found[:2]] for knob, found in sweeps().items()}
    found = {knob: study([subject("rloo")], each) for knob, each in settings.items()}
    figure = draw_sweeps(found)
    assert len(figure.axes) == 6
    assert figure.axes[1].get_lines()[0].get_xdata().tolist() == [2, 3]
    assert resolve("credit", "rloo") is subject("rloo").estimator
