"""A recipe's sandboxes: the provider that it names, with what a run or a grader needs of the kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnstile.config import Kind
from turnstile.sandboxes.base import Sandboxes
from turnstile.wiring.kinds import bind, takes


def make_sandboxes(kind: Kind, *, run: str = "", grading: bool = False, pull: Sequence[str] | None = None) -> Sandboxes:
    """The provider. Where it takes them, it is given the name of the run; for `grading`, what the verifier imports and
    the folder of all packages' dependencies, to show each task its own; and the images that it may pull when asked for
    them (None: any). The knobs of `kind` go before these."""
    make = bind("sandbox", kind)
    offers: dict[str, Any] = {"run": run, "pull": pull}
    if grading:
        from turnstile.swe.grading.testrun import PRELOAD  # what repository tasks need is loaded for them alone
        from turnstile.swe.packages.source import deps_home

        deps_home().mkdir(parents=True, exist_ok=True)
        offers |= {"preload": PRELOAD, "carry": ("turnstile",), "shelf": deps_home()}
    given = {name: value for name, value in offers.items() if takes(make, name) and name not in kind.knobs}
    sandboxes: Sandboxes = make(**given)
    return sandboxes
