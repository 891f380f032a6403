from __future__ import annotations

import math

import pytest

from turnstile.evaluation.markup import anchor, chip, duration, picture, section, text, tone, whisker
from turnstile.evaluation.metrics import Interval


def interval(mean: float, low: float, high: float, n_tasks: int = 30) -> Interval:
    return Interval(mean=mean, low=low, high=high, n_tasks=n_tasks, n_episodes=3)


def test_text_is_escaped_and_shows_what_cannot_be_seen() -> None:
    assert text("<b>&'\"") == "&lt;b&gt;&amp;&#x27;&quot;"
    assert text("a\x1b[31m\u202eb\ud800c\x00") == "a�[31m�b�c�"
    assert text("tab\tline\r\nnext") == "tab\tline\nnext"


def test_long_text_is_cut_in_the_middle() -> None:
    cut = text("a" * 500 + "b" * 700, limit=300)
    assert cut == "a" * 200 + "\n[... 900 characters left out ...]\n" + "b" * 100
    assert text("a" * 300, limit=300) == "a" * 300


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


def test_tone_is_unclear_where_the_interval_holds_zero() -> None:
    assert tone(interval(0.1, 0.01, 0.2)) == "up"
    assert tone(interval(-0.1, -0.2, -0.01)) == "down"
    assert tone(interval(0.1, 0.0, 0.2)) == "unclear"
    assert tone(interval(0.4, 0.2, 0.6, n_tasks=9)) == "unclear"


def test_whisker_places_zero_in_the_middle_and_stays_inside() -> None:
    drawn = whisker(interval(0.5, -0.5, 2.0), reach=1.0)
    assert "M52.0 8H196.0" in drawn  # 100 - 96 / 2, and the end that lies outside at the edge
    assert "cx='148.0'" in drawn
    assert whisker(interval(math.nan, math.nan, math.nan), 1.0) == ""


def test_pieces() -> None:
    assert section("Nothing here", "", "") == ""
    assert section("Time & more!", "<p>x</p>").startswith("<section id='time-more'>\n<h2>Time &amp; more!</h2>")
    assert anchor("Where the gain is") == "where-the-gain-is"
    assert chip("<x>", "up", 'a"b') == "<span class='chip up' title=\"a&quot;b\">&lt;x&gt;</span>"
    assert "srcset='data:image/png;base64,ZA=='" in picture(b"l", b"d", "alt")
