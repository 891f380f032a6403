"""Small pieces of HTML that the report is made of. Every text that goes in is escaped here."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import isnan

from turnstile.evaluation.metrics import Interval
from turnstile.evaluation.table import number

# Control characters, surrogates, and the marks that turn the direction of text around: a model may write them all.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
FEW = 10
"""With fewer tasks than this a bootstrap interval is too short to lean on."""
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def text(content: object, limit: int = 0) -> str:
    """The content as escaped text; what cannot be seen becomes a replacement character.

    With a limit, more characters than that are cut in the middle with a line that says how many.
    """
    raw = str(content)
    if limit and len(raw) > limit:
        head, tail = raw[: limit * 2 // 3], raw[len(raw) - limit // 3 :]
        raw = f"{head}\n[... {len(raw) - len(head) - len(tail):,} characters left out ...]\n{tail}"
    return escape(_UNSEEN.sub(_UNKNOWN, raw.replace("\r\n", "\n")))


def section(title: str, *parts: str) -> str:
    """A section with a heading that can be linked to; empty when no part has anything to show."""
    body = "\n".join(part for part in parts if part)
    return f"<section id='{anchor(title)}'>\n<h2>{text(title)}</h2>\n{body}\n</section>" if body else ""


def anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def paragraph(content: str, css: str = "") -> str:
    """A paragraph of plain text."""
    return f"<p{f' class={css}' if css else ''}>{text(content)}</p>" if content else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], css: str = "") -> str:
    """A table; the head is text, the rows' cells are HTML, the first of each is its heading."""
    top = "".join(f"<th scope='col'>{text(name)}</th>" for name in head)
    body = "\n".join(
        f"<tr><th scope='row'>{row[0]}</th>" + "".join(f"<td>{cell}</td>" for cell in row[1:]) + "</tr>" for row in rows
    )
    return wide(f"<table class='{css}'><thead><tr>{top}</tr></thead>\n<tbody>\n{body}\n</tbody></table>")


def wide(content: str) -> str:
    """Content that scrolls by itself where the page is narrow."""
    return f"<div class='wide'>{content}</div>"


def picture(light: bytes, dark: bytes, alt: str) -> str:
    """A PNG in the page itself, in two versions; a printer gets the light one."""
    sources = [f"data:image/png;base64,{b64encode(image).decode()}" for image in (light, dark)]
    return (
        f"<picture><source media='screen and (prefers-color-scheme: dark)' srcset='{sources[1]}'>"
        f"<img src='{sources[0]}' alt='{text(alt)}'></picture>"
    )


def chip(content: str, css: str = "", title: str = "") -> str:
    """A small rounded label."""
    return (
        f"<span class='chip {css}'{f' title={chr(34)}{text(title)}{chr(34)}' if title else ''}>{text(content)}</span>"
    )


def tone(interval: Interval) -> str:
    """The CSS class of a difference: up, down, or unclear where its interval holds zero or rests on few tasks."""
    clear = interval.excludes_zero and interval.n_tasks >= FEW
    return "unclear" if not clear else "up" if interval.mean > 0 else "down"


def whisker(interval: Interval, reach: float) -> str:
    """A drawing of a difference with its interval around zero, from -reach to +reach."""
    if isnan(interval.mean):
        return ""
    low, mean, high = (100 + 96 * max(-1.0, min(1.0, end / reach)) for end in _ends(interval))
    label = f"{number(interval.mean, signed=True)} from {number(interval.low)} to {number(interval.high)}"
    return (
        f"<svg class='whisker {tone(interval)}' viewBox='0 0 200 16' role='img' aria-label='{label}'>"
        f"<path class='zero' d='M100 0V16'/><path d='M{low:.1f} 8H{high:.1f}M{low:.1f} 4V12M{high:.1f} 4V12'/>"
        f"<circle cx='{mean:.1f}' cy='8' r='4'/></svg>"
    )


def bars(amounts: Mapping[str, float], shown: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(name, bar, value) for each amount, the longest bar being the largest amount."""
    most = max(amounts.values(), default=0.0) or 1.0
    return [
        (text(name), f"<span class='bar' style='width:{100 * amount / most:.1f}%'></span>", text(shown[name]))
        for name, amount in amounts.items()
    ]


def duration(seconds: float) -> str:
    """A length of time a person reads at once: 4.2 s, 5 min 15 s, 2 h 03 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _ends(interval: Interval) -> tuple[float, float, float]:
    return interval.low, interval.mean, interval.high
