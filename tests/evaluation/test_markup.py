from __future__ import annotations

import math

import pytest
from markupsafe import Markup

from turnstile.evaluation.markup import across, anchor, cut, duration, png, render, tone
from turnstile.evaluation.metrics import Interval
from turnstile.evaluation.sections import Alert, Change
from turnstile.evaluation.table import make_table


def interval(mean: float, low: float, high: float, n_tasks: int = 30) -> Interval:
    return Interval(mean=mean, low=low, high=high, n_tasks=n_tasks, n_episodes=3)


def printed(content: str) -> str:
    """What a template makes of a text."""
    return render("missing.html", lines=[content]).removeprefix("<ul class='notes'><li>").removesuffix("</li></ul>")


def test_text_is_escaped_and_invisible_characters_are_shown() -> None:
    assert printed("<b>&'\"") == "&lt;b&gt;&amp;&#39;&#34;"
    assert printed("a\x1b[31m\u202eb\ud800c\x00") == "a�[31m�b�c�"
    assert printed("tab\tline\r\nnext") == "tab\tline\nnext"
    assert printed("{{ 7 * 7 }}{% include 'report.css' %}") == "{{ 7 * 7 }}{% include &#39;report.css&#39; %}"


def test_long_text_is_cut_in_the_middle() -> None:
    assert cut("a" * 500 + "b" * 700, 300) == "a" * 200 + "\n[... 900 characters left out ...]\n" + "b" * 100
    assert cut("a" * 300, 300) == "a" * 300


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (4.24, "4.2 s"),
        (59.9, "59.9 s"),
        (60, "1 min 00 s"),
        (315.4, "5 min 15 s"),
        (3599.6, "1 h 00 min"),
        (7380, "2 h 03 min"),
    ],
)
def test_duration(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_tone_is_unclear_if_the_interval_includes_zero() -> None:
    assert tone(interval(0.1, 0.01, 0.2)) == "up"
    assert tone(interval(-0.1, -0.2, -0.01)) == "down"
    assert tone(interval(0.1, 0.0, 0.2)) == "unclear"
    assert tone(interval(0.4, 0.2, 0.6, n_tasks=9)) == "unclear"


def whisker(shown: Interval) -> str:
    """The drawing of a rate's difference, which reaches as far as its interval."""
    change = Change(name="resolution", before=shown, after=shown, gain=shown)
    return render("results.html", changes=[change], pair=("a", "b"), table=make_table({}), lines=[])


def test_whisker_places_zero_in_the_middle_and_stays_inside() -> None:
    drawn = whisker(interval(0.5, -0.5, 2.0))
    assert "M76.0 8H196.0" in drawn  # 100 - 96 / 4, and the end that reaches furthest at the edge
    assert "cx='124.0'" in drawn
    assert (across(0.5, 1.0), across(2.0, 1.0), across(-2.0, 1.0)) == ("148.0", "196.0", "4.0")
    assert "<svg" not in whisker(interval(math.nan, math.nan, math.nan))


def test_anchors_sections_alerts_and_images_are_rendered() -> None:
    assert anchor("Where the gain is") == "where-the-gain-is"
    page = render("report.html", name="n", subtitle="", sections={"Time & more!": Markup("<p>x</p>")})
    assert "<section id='time-more'>\n<h2>Time &amp; more!</h2>\n<p>x</p>" in page
    shown = render("alerts.html", alerts=[Alert(level="a'b", line="<x>")], more="")
    assert "<li class='a&#39;b'><b>a&#39;b</b> &lt;x&gt;</li>" in shown
    assert png(b"d") == "data:image/png;base64,ZA=="
