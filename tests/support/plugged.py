"""Runs of test runners with the plugin of `turnstile.swe.grading.suite` in them, without a container."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnstile.swe.grading.suite import plugin_environment, plugin_files
from turnstile.swe.grading.testrun import read_events

KEY, CANARY = "0" * 32, "test_0123456789abcdef"
PYTHON = os.environ.get("TURNSTILE_TESTS_PYTHON", sys.executable)
"""The interpreter with the runner in it: the plugins are for older ones too."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the plugin told."""

    events: Sequence[Mapping[str, Any]]
    exit_code: int
    log: str

    def named(self, event: str) -> list[Mapping[str, Any]]:
        return [each for each in self.events if each["event"] == event]

    @property
    def planted(self) -> list[str]:
        return [each["outcome"] for each in self.named("test") if CANARY in each["id"]]

    @property
    def outcomes(self) -> dict[str, str]:
        """Outcomes by the name of the test without its place."""
        tests = [each for each in self.named("test") if CANARY not in each["id"]]
        return {each["id"].split("::")[-1].partition(" ")[0]: each["outcome"] for each in tests}

    @property
    def messages(self) -> dict[str, str]:
        return {each["id"].split("::")[-1].partition(" ")[0]: each["message"] for each in self.named("test")}


def run(
    runner: str,
    folder: Path,
    files: Mapping[str, str],
    *arguments: str,
    before: Mapping[str, str | None] | None = None,
    repaired: Sequence[str] = (),
    installed: Mapping[str, str] | None = None,
    library: str = "library",
) -> Run:
    """Runs `python -m ARGUMENTS` in a repository of these files; `before` is what some of them were, `repaired` are
    those that the repair touches, and `installed` lies in the folder `library` from which modules are imported."""
    repository, plugin = folder / "repository", folder / "plugin"
    for place, texts in ((repository, files), (folder / library, installed or {})):
        for path, text in texts.items():
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_text(textwrap.dedent(text).lstrip("\n"))
    earlier = {path: text and textwrap.dedent(text).lstrip("\n") for path, text in (before or {}).items()}
    request = {"key": KEY, "canary": CANARY, "root": str(repository), "own": [], "before": earlier,
               "repaired": repaired}  # fmt: skip
    for path, data in plugin_files(runner, "report_x", request).items():
        (plugin / path).parent.mkdir(parents=True, exist_ok=True)
        (plugin / path).write_bytes(data)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON"))}
    environment |= plugin_environment(runner, "report_x", str(repository))
    environment["PYTHONPATH"] = f"{plugin}{os.pathsep}{folder / library}"
    done = subprocess.run(
        [PYTHON, "-m", *arguments], cwd=repository, env=environment, capture_output=True, text=True, check=False
    )
    log = done.stdout + done.stderr
    return Run(events=list(read_events(done.stdout, KEY)), exit_code=done.returncode, log=log)
