"""Read and write Harbor task folders.

    task.toml            time limits, resources, metadata
    instruction.md       what the agent is asked
    environment/         Dockerfile of the agent's container
    solution/solve.sh    the repair
    tests/test.sh        run in the container when the agent is done; writes /logs/verifier/reward.txt

The tests are named only in files of tests/, which is not in the agent's container while the agent works.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from turnstile.errors import TaskError
from turnstile.swe.formats.history import cut_history
from turnstile.swe.formats.instance import Instance

_OWN = "tests/instance.json"
_HERE = Path(__file__).parent
_SHIPPED = {"tests/grade.py": "harbor_grade.py", "tests/logs.py": "logs.py"}

_TEST = """#!/bin/bash
# Puts the tests back as the task has them, runs them and writes the reward.
cd {workdir} || exit 1
{restore}python3 /tests/grade.py
"""
_SOLVE = """#!/bin/bash
set -e
cd {workdir}
git apply --whitespace=nowarn /solution/repair.patch
"""
_BEGIN = "refs/turnstile/begin"  # the commit that the agent starts from, wherever it moves HEAD
_HISTORY = """#!/bin/bash
# Leaves one commit of the repository, whose owner may be another user: none that came before or after it.
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
{cut}git update-ref {begin} HEAD
"""
_CUT = """COPY history.sh /tmp/history.sh
RUN test ! -e .git || test "$(bash /tmp/history.sh)" = "1 1"; code=$?; rm /tmp/history.sh; exit $code
"""
_TOML = """version = "1.0"

[metadata]
name = {name}
repo = {repo}
base_commit = {base_commit}
tags = ["repair"]

[verifier]
timeout_sec = {seconds:.1f}

[agent]
timeout_sec = {agent_seconds:.1f}

[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 2048
storage_mb = 10240
allow_internet = false
"""


def write_folder(
    instance: Instance, folder: str | Path, *, seconds: float = 600.0, agent_seconds: float = 1800.0
) -> Path:
    """Write an instance as a Harbor task folder, and return the folder.

    The image must hold the repository at `workdir`, git and python3. Raises TaskError for an instance without an image
    or without named tests that must pass, and for a log parser other than pytest and unittest, as no other is shipped.
    """
    folder = Path(folder)
    if not instance.image:
        raise TaskError(f"instance {instance.id}: a Harbor folder needs an image; set Instance.image")
    if instance.log_parser not in ("pytest", "unittest"):
        raise TaskError(f"instance {instance.id}: only the parsers pytest and unittest go into a Harbor folder")
    if not instance.fail_to_pass and not instance.expected:
        raise TaskError(f"instance {instance.id}: it names no test that must pass")
    workdir = shlex.quote(instance.workdir)
    dockerfile = f"FROM {instance.image}\nWORKDIR {instance.workdir}\n"
    files = {
        "task.toml": _TOML.format(
            name=json.dumps(instance.id),
            repo=json.dumps(instance.repo),
            base_commit=json.dumps(instance.base_commit),
            seconds=seconds,
            agent_seconds=agent_seconds,
        ),
        "instruction.md": instance.problem.rstrip("\n") + "\n",
        "tests/test.sh": _TEST.format(workdir=workdir, restore=_restore(instance)),
        _OWN: json.dumps({**instance.to_json(), "test_command": test_command(instance)}, indent=1) + "\n",
    }
    if instance.bug_patch:
        files["environment/bug.patch"] = instance.bug_patch
        dockerfile += "COPY bug.patch /tmp/bug.patch\n"
        dockerfile += "RUN git apply --whitespace=nowarn /tmp/bug.patch && rm /tmp/bug.patch\n"
    files["environment/history.sh"] = _HISTORY.format(cut=cut_history(instance.workdir), begin=_BEGIN)
    dockerfile += _CUT
    if instance.test_patch:
        files["tests/tests.patch"] = instance.test_patch
    if instance.patch:
        files |= {"solution/repair.patch": instance.patch, "solution/solve.sh": _SOLVE.format(workdir=workdir)}
    files["environment/Dockerfile"] = dockerfile
    for path, shipped in _SHIPPED.items():
        files[path] = (_HERE / shipped).read_text(encoding="utf-8")
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8", newline="\n")
        (folder / path).chmod(0o755 if path.endswith(".sh") else 0o644)
    return folder


def test_command(instance: Instance) -> str:
    """Return the instance's own test command.

    If it has none, return one that runs its test files with pytest, or its test modules with unittest.
    """
    if instance.test_command:
        return instance.test_command
    names = dict.fromkeys((*instance.fail_to_pass, *instance.pass_to_pass, *instance.expected))
    if instance.log_parser == "unittest":
        modules = dict.fromkeys(match[1] for name in names if (match := re.search(r"\(([\w.]+)\)", name)))
        return f"python3 -m unittest -v {shlex.join(modules)}"
    files = dict.fromkeys(name.partition("::")[0] for name in names)
    return f"python3 -m pytest -rA --tb=no -p no:cacheprovider {shlex.join(files)}"


def _restore(instance: Instance) -> str:
    """Return the shell commands that restore the test files touched by the tests' patch, and apply that patch."""
    if not instance.test_patch:
        return ""
    touched = re.findall(r"^diff --git a/(\S+) b/", instance.test_patch, re.MULTILINE)
    names = map(shlex.quote, touched)
    lines = [f"base=$(git rev-parse -q --verify {_BEGIN} || echo HEAD)\n"]
    lines += [f"git checkout -q $base -- {name} 2>/dev/null || rm -f {name}\n" for name in names]
    return "".join(lines) + "git apply --whitespace=nowarn /tests/tests.patch || exit 1\n"


def task_folders(path: Path) -> list[Path]:
    """Return the path itself if it is a task folder, else the task folders directly in it."""
    if (path / "task.toml").is_file():
        return [path]
    return sorted(one.parent for one in path.glob("*/task.toml"))


def read_folder(folder: str | Path) -> Instance:
    """Return the instance in a Harbor task folder.

    A folder from `write_folder` is read back completely. Any other names no tests; its instance has a `test_command`
    that runs test.sh, which writes its verdict as a number to /logs/verifier/reward.txt, and its settings and path in
    `extra`. Raises TaskError for a folder that is not a Harbor task.
    """
    folder = Path(folder)
    try:
        settings: dict[str, Any] = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        problem = (folder / "instruction.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TaskError(f"{folder}: no Harbor task can be read there ({error})") from error
    own = folder / _OWN
    if own.is_file():
        try:
            instance = Instance.from_json(json.loads(own.read_text(encoding="utf-8")))
            return replace(instance, problem=problem.rstrip("\n"))
        except (json.JSONDecodeError, TypeError) as error:
            raise TaskError(f"{own}: it cannot be read ({error})") from error
    if not (folder / "tests" / "test.sh").is_file():
        raise TaskError(f"{folder}: a Harbor task has tests/test.sh, this one has not")
    dockerfile = folder / "environment" / "Dockerfile"
    built = dockerfile.read_text(encoding="utf-8") if dockerfile.is_file() else ""
    named = re.findall(r"^FROM\s+(?:--\S+\s+)?(\S+)", built, re.MULTILINE | re.IGNORECASE)
    places = re.findall(r"^WORKDIR\s+(\S+)", built, re.MULTILINE | re.IGNORECASE)
    task = settings.get("task", {})
    return Instance(
        id=str(task.get("name") or folder.resolve().name),
        problem=problem.rstrip("\n"),
        image=str(settings.get("environment", {}).get("docker_image") or (named[-1] if named else "")),
        workdir=places[-1] if places else "/app",
        test_command="bash /tests/test.sh",
        log_parser="",
        extra={"folder": str(folder.resolve()), "settings": settings},
    )
