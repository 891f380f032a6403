"""Templates of the report, and their filters. Every value that a template prints is escaped."""

from __future__ import annotations

import re
from base64 import b64encode
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from turnstile.evaluation.metrics import Interval
from turnstile.evaluation.table import bounds, number

# Control characters, surrogates, and marks that change the direction of text, all of which a model may write.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
FEW = 10
"""With fewer tasks than this, a bootstrap interval is too narrow to be reliable."""


def render(template: str, **values: Any) -> Markup:
    """Render a template from `templates/` with these values."""
    return Markup(_ENVIRONMENT.get_template(template).render(values).strip())


def seen(value: object) -> object:
    """Return a value as text with invisible characters replaced by a visible one. Markup is returned unchanged."""
    is_markup = hasattr(value, "__html__")
    return value if is_markup else _UNSEEN.sub("\N{REPLACEMENT CHARACTER}", str(value).replace("\r\n", "\n"))


def cut(text: str, limit: int) -> str:
    """Return a text; if it is longer than `limit`, its middle is replaced by a line that says how much is left out."""
    if len(text) <= limit:
        return text
    head, tail = text[: limit * 2 // 3], text[len(text) - limit // 3 :]
    return f"{head}\n[... {len(text) - len(head) - len(tail):,} characters left out ...]\n{tail}"


def anchor(title: str) -> str:
    """Return the HTML id of the section with this title, for links."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def tone(interval: Interval) -> str:
    """Return the CSS class of a difference: up or down, or unclear if its interval includes zero or has few tasks."""
    clear = interval.excludes_zero and interval.n_tasks >= FEW
    return "unclear" if not clear else "up" if interval.mean > 0 else "down"


def across(end: float, reach: float) -> str:
    """Return the x coordinate, in a drawing 200 wide, of a number in [-reach, reach]. Other numbers are clamped."""
    return f"{100 + 96 * max(-1.0, min(1.0, end / reach)):.1f}"


def png(image: bytes) -> str:
    """Return a data URL that contains a PNG image."""
    return f"data:image/png;base64,{b64encode(image).decode()}"


def duration(seconds: float) -> str:
    """Return a duration in readable units: 4.2 s, 5 min 15 s, 2 h 03 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


_ENVIRONMENT = Environment(
    loader=PackageLoader("turnstile.evaluation"),
    autoescape=True,
    finalize=seen,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {
    filter.__name__: filter for filter in (cut, anchor, tone, across, png, duration, bounds, number)
}
