from __future__ import annotations

import math
import re
from io import StringIO

import pytest
from rich.console import Console

from turnstile.evaluation.markup import render
from turnstile.evaluation.metrics import EpisodeResult
from turnstile.evaluation.table import make_table, number, to_markdown, to_rich


def policy(solved: list[list[int]], *, turns: int = 4, broken: int = 0) -> list[EpisodeResult]:
    """One task per list, one sample per entry; `broken` further episodes failed in the infrastructure."""
    results = [
        EpisodeResult(
            task_id=f"t{task}",
            sample=sample,
            rates={"completion": True, "modification": bool(s), "resolution": bool(s)},
            turns=turns,
            outcome=float(s),
            total=float(s),
        )
        for task, samples in enumerate(solved)
        for sample, s in enumerate(samples)
    ]
    lost = [EpisodeResult(task_id="t0", sample=9 + i) for i in range(broken)]
    return results + lost


STAGES = {
    "untouched": policy([[0], [0], [0], [0]], turns=8, broken=1),
    "warm start": policy([[0, 0], [1, 0], [0, 0], [1, 1]], turns=6),
    "after RL": policy([[1, 1], [1, 1], [1, 0], [1, 1]]),
}


@pytest.mark.parametrize(
    ("value", "signed", "digits", "text"),
    [
        (0.1875, False, 3, ".188"),
        (1.0, False, 3, "1.000"),
        (0.0, False, 3, ".000"),
        (0.104, True, 3, "+.104"),
        (-0.012, True, 3, "-.012"),
        (10.04, False, 3, "10.040"),
        (0.9996, False, 3, "1.000"),
        (-1.8, True, 1, "-1.8"),
        (0.5, False, 1, "0.5"),
        (math.nan, True, 3, "-"),
    ],
)
def test_number(value: float, signed: bool, digits: int, text: str) -> None:
    assert number(value, signed=signed, digits=digits) == text


def test_columns_and_rows() -> None:
    table = make_table(STAGES, [("warm start", "after RL")])
    assert table.columns == ("completion", "modification", "resolution", "pass@2", "turns", "episodes")
    assert [row.name for row in table.rows] == ["untouched", "warm start", "after RL", "after RL vs warm start"]
    assert [row.difference for row in table.rows] == [False, False, False, True]
    untouched, warm, after, gain = (row.cells for row in table.rows)
    assert [cell.text for cell in untouched] == ["1.000", ".000", ".000", "-", "8.0", "4"]
    assert untouched[-1].detail == "(4 tasks)"
    assert "lost to infrastructure, counted nowhere: untouched: 1." in table.note
    assert [cell.text for cell in warm] == ["1.000", ".375", ".375", ".500", "6.0", "8"]
    assert [cell.text for cell in after] == ["1.000", ".875", ".875", "1.000", "4.0", "8"]
    assert [cell.text for cell in gain] == ["+.000", "+.500", "+.500", "", "-2.0", "16"]
    assert [cell.strong for cell in gain] == [False, True, True, False, True, False]


def test_pass_at_k_columns_follow_the_samples() -> None:
    assert "pass@1" not in make_table({"a": policy([[1], [0]])}).columns
    assert make_table({"a": policy([[1, 0, 0, 1]])}, ks=(2, 3)).columns[3:5] == ("pass@2", "pass@3")


def test_a_stage_without_episodes_shows_dashes() -> None:
    row = make_table({"nothing yet": []}).rows[0]
    assert [cell.text for cell in row.cells] == ["-", "-", "0"]
    assert all(not cell.detail for cell in row.cells)


def test_the_columns_are_the_rates_that_the_environment_names() -> None:
    won = [EpisodeResult(task_id="t", sample=i, rates={"solved": bool(i)}, outcome=1.0, total=1.0) for i in range(2)]
    assert make_table({"a": won}).columns == ("solved", "pass@2", "turns", "episodes")
    bare = [EpisodeResult(task_id="t", sample=i, outcome=0.5, total=0.5) for i in range(2)]
    table = make_table({"a": bare})
    assert table.columns == ("outcome", "turns", "episodes")
    assert table.rows[0].cells[0].text == ".500"


def test_a_pair_must_name_stages() -> None:
    with pytest.raises(KeyError):
        make_table(STAGES, [("warm start", "never ran")])


def test_markdown() -> None:
    lines = to_markdown(make_table(STAGES, [("warm start", "after RL")])).splitlines()
    assert lines[0] == "| policy | completion | modification | resolution | pass@2 | turns | episodes |"
    assert lines[1] == "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    assert lines[3].startswith("| warm start | 1.000 [")
    assert re.match(r"\| after RL vs warm start \| \+\.000 \[.*\*\*\+\.500\*\* \[\.125, \.875\]", lines[5])
    assert len({line.count("|") for line in lines[:6]}) == 1
    assert "a\\|b" in to_markdown(make_table({"a|b": []}))


@pytest.mark.parametrize("width", [80, 120])
def test_terminal(width: int) -> None:
    out = StringIO()
    Console(file=out, width=width, color_system=None).print(to_rich(make_table(STAGES, [("warm start", "after RL")])))
    text = out.getvalue()
    assert max(len(line) for line in text.splitlines()) <= width
    for word in ("policy", "untouched", ".875", "+.500", "[-.602,.602]", "[.125,.875]", "episodes"):
        assert word in text


def test_markup_in_names_is_text() -> None:
    out = StringIO()
    Console(file=out, width=100).print(to_rich(make_table({"[red]x[/red]": []})))
    assert "[red]x[/red]" in out.getvalue()
    html = render("rates.html", table=make_table({"<script>": STAGES["after RL"]}))
    assert "<script>" not in html
    assert "&lt;script&gt;" in html


def test_html_has_a_cell_for_each_column() -> None:
    html = render("rates.html", table=make_table(STAGES, [("warm start", "after RL")]))
    rows = re.findall(r"<tr.*?</tr>", html, flags=re.DOTALL)
    assert [row.count("<th") + row.count("<td") for row in rows] == [7] * 5
    assert "<strong>+.500</strong>" in html


def test_a_table_without_stages_is_empty() -> None:
    assert to_rich(make_table({})).row_count == 0
