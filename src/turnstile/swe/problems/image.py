"""Prepare an instance's image by adding its bug, cutting its history to one commit, and hiding its tests.

The image that the agent starts from need not be the one in which its change is graded. Neither holds a commit other
than the state in which the task begins, so that nothing later, least of all the repair, can be read from the
repository.
"""

from __future__ import annotations

import asyncio
import shlex
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from turnstile.errors import ConfigError, TaskError
from turnstile.sandboxes.base import ExecResult, Image, Limits, Sandbox, Sandboxes
from turnstile.swe.formats.history import cut_history
from turnstile.swe.formats.instance import Instance
from turnstile.swe.problems.copy import GIT_ENV, check_ended

LIMITS = Limits(seconds=600.0, cpu_seconds=600.0, memory_mb=1 << 20, file_mb=4096)
TOP = "/"
TESTS = "its tests' patch"
_PATCH = ".turnstile.patch"
_CARRIED = ".turnstile-carried"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """The images that copies start from, `agent` in the repository's folder and `graded` in `/`.

    `git` tells whether the folder is a git repository.
    """

    agent: Image
    graded: Image
    git: bool


async def prepare_image(instance: Instance, sandboxes: Sandboxes) -> Prepared:
    """Prepare an instance's image; the images made from it last as long as `sandboxes`.

    Raises TaskError if the image lacks something that is needed or its history cannot be cut, and SandboxError.
    """
    source = Image(name=instance.image, root=TOP)
    try:
        sandbox = await sandboxes.start(source)
    except ConfigError as error:  # only this image is affected; others may be available
        raise TaskError(f"instance {instance.id}: {error}") from None
    try:
        git = await _check(instance, sandbox)
        await apply_patch(instance, sandbox, instance.bug_patch, "its bug")
        await apply_patch(instance, sandbox, instance.test_patch, TESTS, dry=True)
        if git:
            await _cut_history(instance, sandbox)
        graded = await _image(sandbox) if git or instance.bug_patch else source
        agent = graded
        if instance.hidden:
            await run(instance, sandbox, f"rm -rf -- {shlex.join(instance.hidden)}", "its tests cannot be hidden")
            agent = await _image(sandbox)
        return Prepared(agent=replace(agent, root=instance.workdir), graded=graded, git=git)
    finally:
        await sandbox.close()


async def _image(sandbox: Sandbox) -> Image:
    made = await sandbox.snapshot()
    if not isinstance(made, Image):
        raise TaskError("an instance needs sandboxes that start from images: sandbox kind 'container'")
    return made


_CHECK = """
cd {workdir} 2>/dev/null || {{ echo "there is no folder {workdir} in it" >&2; exit 1; }}
command -v python3 >/dev/null || {{ echo "there is no python3 in it" >&2; exit 1; }}
test -w . || {{ echo "user $(id -u) cannot write in {workdir}; set sandbox.isolation.user = \\"0:0\\"" >&2; exit 1; }}
test -e .git || exit 0
test -d .git || {{ echo ".git is no folder, so its history cannot be cut" >&2; exit 1; }}
command -v git >/dev/null && echo git || rm -rf .git
"""


async def _check(instance: Instance, sandbox: Sandbox) -> bool:
    """Return whether the image holds a git repository and the program git.

    Without the program, the repository's history is deleted. Raises TaskError if the image cannot be used.
    """
    done = await run(instance, sandbox, _CHECK.format(workdir=shlex.quote(instance.workdir)), "it cannot be used")
    return done.stdout.strip() == "git"


async def _cut_history(instance: Instance, sandbox: Sandbox) -> None:
    done = await run(instance, sandbox, cut_history(instance.workdir), "its history cannot be cut")
    if done.stdout.split() != ["1", "1"]:
        raise TaskError(
            f"instance {instance.id}: commits are left in {instance.image} after its history was cut "
            f"({done.stdout.strip() or 'nothing was counted'}); it must not be trained on"
        )


async def apply_patch(instance: Instance, sandbox: Sandbox, patch: str, what: str, *, dry: bool = False) -> None:
    """Apply a unified diff in the repository, unless it is empty; if `dry`, only test whether it applies.

    Raises TaskError naming `what` if it does not.
    """
    if not patch:
        return
    try_git, try_patch = ("--check", "--dry-run") if dry else ("", "")
    await sandbox.write(_PATCH, patch.encode("utf-8", "surrogateescape"))
    command = (
        f"file=$PWD/{_PATCH}; cd {shlex.quote(instance.workdir)} && {{ git apply --whitespace=nowarn {try_git} $file"
        f" 2>/dev/null || patch -p1 --batch --forward --no-backup-if-mismatch {try_patch} -i $file; }}; code=$?;"
        " rm -f $file; exit $code"
    )
    await run(instance, sandbox, command, f"{what} does not apply")


async def carry(instance: Instance, sandbox: Sandbox, folder: Path, place: str) -> None:
    """Copy a folder from this machine to an absolute path in the sandbox.

    Raises TaskError if the folder cannot be read or does not exist.
    """
    try:
        files = await asyncio.to_thread(_contents, folder)
    except OSError as error:
        raise TaskError(f"instance {instance.id}: {folder} cannot be read ({error.strerror})") from error
    if not files:
        raise TaskError(f"instance {instance.id}: there is no folder {folder}; import the task again")
    for path, data in files.items():
        await sandbox.write(f"{_CARRIED}/{path}", data)
    await run(instance, sandbox, f"rm -rf {place} && mv {_CARRIED} {place}", f"{place} cannot be made")


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


async def run(instance: Instance, sandbox: Sandbox, script: str, what: str) -> ExecResult:
    """Run a script with bash, and return the result.

    Raises TaskError naming `what` if it fails, and SandboxError if a time limit or a kill ended it.
    """
    done = await sandbox.exec(["bash", "-c", script], limits=LIMITS, env=GIT_ENV)
    check_ended(done, f"instance {instance.id}, image {instance.image}: a command ({what})")
    if done.exit_code != 0:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        reason = last[0] if last else f"exit code {done.exit_code}"
        raise TaskError(f"instance {instance.id}, image {instance.image}: {what}: {reason}")
    return done


def inner(instance: Instance, path: str) -> str:
    """Convert a path in the repository to one relative to `/`."""
    return str(PurePosixPath(instance.workdir.lstrip("/")) / path)
