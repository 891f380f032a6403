"""The agent's working copy of a repository, with its content at the beginning and what has changed since."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from turnstile.errors import SandboxError, TaskError
from turnstile.sandboxes.base import ExecResult, Limits, Sandbox
from turnstile.swe.grading.bench import Files
from turnstile.swe.grading.testrun import KILLED
from turnstile.swe.in_sandbox import manifest as beside

Manifest = Mapping[str, str]
"""path -> kind (f, x, l), size and digest, as `in_sandbox.manifest` lists them."""

_SCRIPT = inspect.getsource(beside)
_LIMITS = Limits(seconds=120.0, cpu_seconds=120.0, output_chars=64_000_000)
MOST_FILES = 2000
MOST_BYTES = 64 << 20
_TOO_LARGE = f"the changed files are larger than {MOST_BYTES >> 20} MiB together"
_STAT = "import os, stat, sys; found = os.stat(sys.argv[1]); stat.S_ISREG(found.st_mode) and print(found.st_size)"
_BATCH = 500  # paths on one command line
_IGNORED = """printf '%s\\0' "$@" | git check-ignore -z --stdin"""


class ChangeError(Exception):
    """A change that cannot be graded; the message says why.

    The agent caused it, so it is not an infrastructure error.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """The changes since the beginning: `files` to grade, and those of them that are `executable`.

    `lost` are changed paths that cannot be carried over, such as links and unreadable files.
    """

    files: Files = field(default_factory=dict)
    executable: frozenset[str] = frozenset()
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A private copy of a problem's repository.

    `base` is its manifest at the beginning. Its commands need `env` and the shell lines of `setup`; `place` is the
    absolute path of its root, if that means something to the agent; `git` tells whether it is a git repository.
    """

    sandbox: Sandbox
    base: Manifest
    env: Mapping[str, str] = field(default_factory=dict)
    setup: str = ""
    place: str = ""
    git: bool = False

    async def shell(self, command: str, *, limits: Limits) -> tuple[int, str, bool]:
        """Run a command with bash in the root.

        Returns its exit code, both outputs as one, and whether it timed out.
        """
        script = f"exec 2>&1\n{self.setup}\n{command}"
        done = await self.sandbox.exec(["bash", "-c", script], limits=limits, env=self.env)
        output = done.stdout or (done.stderr if done.exit_code else "")  # from bash itself, before the script began
        return done.exit_code, output, done.timed_out

    async def manifest(self) -> Manifest:
        """Return the present manifest. Raises ChangeError if the files cannot be listed, and SandboxError."""
        return await take_manifest(self.sandbox)

    async def change(self) -> Change:
        """Return what has changed since the beginning, without new files that the repository's git ignores.

        Raises ChangeError if the change cannot be read or is too large, and SandboxError.
        """
        now = await self.manifest()
        changed = sorted(path for path, entry in now.items() if self.base.get(path) != entry)
        new = [path for path in changed if path not in self.base]
        ignored = await self._find_ignored(new)
        changed = [path for path in changed if path not in ignored]
        removed = [path for path in self.base if path not in now]
        if len(changed) + len(removed) > MOST_FILES:
            raise ChangeError(f"{len(changed) + len(removed)} files were changed; at most {MOST_FILES} are taken up")
        files: dict[str, bytes | None] = {path: None for path in removed if self.base[path][0] in "fx"}
        lost = [path for path in removed if path not in files]
        if sum(_size(now[path]) for path in changed) > MOST_BYTES:  # before any is read
            raise ChangeError(_TOO_LARGE)
        size = 0
        for path in changed:
            if now[path][0] not in "fx" or not _is_below_root(path):
                lost.append(path)
                continue
            try:
                data = await self.sandbox.read(path)
            except (OSError, ValueError):
                lost.append(path)
                continue
            size += len(data)
            if size > MOST_BYTES:  # the sizes came from the agent's Python, which may have forged them
                raise ChangeError(_TOO_LARGE)
            files[path] = data
        executable = frozenset(path for path in files if path in now and now[path][0] == "x")
        return Change(files=files, executable=executable, lost=tuple(sorted(lost)))

    async def size(self, path: str) -> int | None:
        """Return the present size of a file in bytes; None if there is no such file."""
        try:
            os.fsencode(path)
        except UnicodeEncodeError:
            return None
        if not _is_below_root(path):
            return None
        done = await self.sandbox.exec(["python3", "-I", "-S", "-c", _STAT, path], limits=_LIMITS)
        text = done.stdout.strip()
        return int(text) if done.exit_code == 0 and _is_size(text) else None

    async def _find_ignored(self, paths: list[str]) -> set[str]:
        """Return the paths that git would not add, such as caches and builds; none if there is no git repository."""
        if not self.git:
            return set()
        found: set[str] = set()
        for first in range(0, len(paths), _BATCH):
            batch = [path for path in paths[first : first + _BATCH] if _is_below_root(path)]
            done = await self.sandbox.exec(["bash", "-c", _IGNORED, "bash", *batch], limits=_LIMITS, env=GIT_ENV)
            check_ended(done, "git check-ignore")
            if done.exit_code == 0:
                found.update(done.stdout.split("\0"))
        return found

    async def close(self) -> None:
        await self.sandbox.close()


GIT_ENV: Mapping[str, str] = {
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
    "GIT_CONFIG_NOSYSTEM": "1",
}
"""Environment variables for git in a repository that belongs to another user."""


async def take_manifest(sandbox: Sandbox) -> Manifest:
    """Return the manifest of a sandbox's root. Raises ChangeError if the files cannot be listed, and SandboxError."""
    done = await sandbox.exec(["python3", "-I", "-S", "-c", _SCRIPT], limits=_LIMITS)
    check_ended(done, "the listing of a sandbox's files")
    try:
        found = json.loads(done.stdout)
    except ValueError:
        found = None
    if done.exit_code != 0 or not isinstance(found, dict):
        last = done.stderr.strip().splitlines()[-1:]
        raise ChangeError(f"the files cannot be listed: python3 said {last[0] if last else done.exit_code}")
    return {str(path): str(entry) or "?" for path, entry in found.items()}


def check_ended(done: ExecResult, what: str) -> None:
    """Raise SandboxError if a time limit or a kill ended the command, as a busy machine alone can cause that."""
    if done.timed_out:
        raise SandboxError(f"{what} did not end within {done.seconds:.0f} s; is the machine busy?")
    if done.exit_code == KILLED:
        raise SandboxError(f"{what} was killed (exit code {KILLED}), as when memory runs out")


async def begin(
    sandbox: Sandbox,
    name: str,
    *,
    env: Mapping[str, str] | None = None,
    setup: str = "",
    place: str = "",
    git: bool = False,
) -> Copy:
    """Return a copy that begins with what the sandbox holds now; if that fails, the sandbox is closed.

    Raises TaskError if the files cannot be listed with the image's Python, and SandboxError.
    """
    try:
        base = await take_manifest(sandbox)
    except ChangeError as error:
        await sandbox.close()
        raise TaskError(f"{name}: {error}; its image needs python3 (3.7 or newer)") from None
    except BaseException:
        await sandbox.close()
        raise
    return Copy(sandbox=sandbox, base=base, env=env or {}, setup=setup, place=place, git=git)


def _size(entry: str) -> int:
    """Return the size in a manifest's entry; 0 if it has none."""
    size = entry[1:].partition(" ")[0]
    return int(size) if entry[0] in "fx" and _is_size(size) else 0


def _is_size(text: str) -> bool:
    return len(text) < 20 and text.isascii() and text.isdecimal()


def _is_below_root(path: str) -> bool:
    """Return whether a path of the manifest is below the root, since the agent may have forged it."""
    return bool(path) and not path.startswith("/") and "\0" not in path and ".." not in path.split("/")
