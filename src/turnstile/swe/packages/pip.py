"""Call pip to download a source distribution, determine requirements, and install dependencies into a folder."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from turnstile.errors import TaskError

_SECONDS = 600


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check", "--no-input"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise TaskError(
            f"pip {arguments[0]} did not end within {_SECONDS} s; check the network, then try again"
        ) from None


def _reason(result: subprocess.CompletedProcess[str]) -> str:
    """Return pip's last error line, or how to install pip if it is missing."""
    if "No module named pip" in result.stderr:
        return "this Python has no pip; install it with: python -m ensurepip"
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip().startswith("ERROR")]
    return (lines or result.stderr.strip().splitlines() or ["no message"])[-1][:300]


def download_sdist(name: str, version: str, folder: Path) -> Path:
    """Download a source distribution into `folder`, and return the archive.

    Raises TaskError if the index has none or the download fails.
    """
    result = _pip("download", "--no-deps", "--no-binary", name, "--dest", str(folder), f"{name}=={version}")
    archives = sorted(path for path in folder.iterdir() if path.name.endswith((".tar.gz", ".zip", ".tar.bz2", ".tgz")))
    if result.returncode == 0 and archives:
        return archives[0]
    spec = f"pypi:{name}=={version}"
    missing = re.search(r"Could not find a version .*?\(from versions: ([^)]*)\)", result.stderr, re.DOTALL)
    if missing:
        known = [item for item in missing[1].split(", ") if item != "none"]
        hint = f"it has {', '.join(known[-5:])}" if known else "check the spelling, or that it publishes one"
        raise TaskError(f"{spec}: the package index has no such source distribution; {hint}")
    raise TaskError(f"{spec}: pip could not download it: {_reason(result)}")


def required_by(project: Path, spec: str) -> list[str]:
    """Return the requirements of the project in a folder, as its own build states them.

    Raises TaskError naming `spec` if the build fails.
    """
    result = _pip("install", "--dry-run", "--quiet", "--ignore-installed", "--no-deps", "--report", "-", str(project))
    if result.returncode != 0:
        raise TaskError(f"{spec}: its metadata cannot be built: {_reason(result)}")
    (found,) = json.loads(result.stdout)["install"]
    return list(found["metadata"].get("requires_dist", ()))


def install_target(requirements: Sequence[str], folder: Path, spec: str, *, no_deps: bool = False) -> None:
    """Install requirements into `folder` and nowhere else. Raises TaskError naming `spec` if that fails."""
    if not requirements:
        return
    flags = ["--no-deps"] if no_deps else []
    result = _pip("install", "--target", str(folder), "--quiet", *flags, *requirements)
    if result.returncode != 0:
        raise TaskError(f"{spec}: its dependencies ({', '.join(requirements)}) do not install: {_reason(result)}")
    shutil.rmtree(folder / "bin", ignore_errors=True)
