"""A recipe's sandboxes: the provider that it names, with what a run or a grader needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnstile.config import Kind
from turnstile.sandboxes.base import Sandboxes
from turnstile.wiring.kinds import bind, takes


def make_sandboxes(kind: Kind, *, run: str = "", grading: bool = False, pull: Sequence[str] | None = None) -> Sandboxes:
    """Return the provider of sandboxes.

    Where it has parameters for them, it is given the run's name, the images that it may pull on request (`pull`; None
    means any) and, with `grading`, the modules to preload, the packages to carry, and the folder with the dependencies
    of all packages. Knobs of `kind` take precedence.
    """
    make = bind("sandbox", kind)
    offers: dict[str, Any] = {"run": run, "pull": pull}
    if grading:
        from turnstile.swe.grading.testrun import PRELOAD  # loaded only for repository tasks
        from turnstile.swe.packages.source import deps_home

        deps_home().mkdir(parents=True, exist_ok=True)
        offers |= {"preload": PRELOAD, "carry": ("turnstile",), "shelf": deps_home()}
    given = {name: value for name, value in offers.items() if takes(make, name) and name not in kind.knobs}
    sandboxes: Sandboxes = make(**given)
    return sandboxes
