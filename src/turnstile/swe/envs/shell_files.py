"""The tools with which an agent views, creates and edits a repository's files."""

from __future__ import annotations

import asyncio
from pathlib import PurePosixPath

from turnstile.errors import DiskFullError
from turnstile.sandboxes.base import Limits
from turnstile.swe.envs.code import EditError
from turnstile.swe.envs.shell_text import decode, encode, number_lines, replace_once
from turnstile.swe.envs.turns import Done, done, failed
from turnstile.swe.problems.copy import Copy
from turnstile.types import JSON

MOST_BYTES = 8 << 20
"""Larger files are not read."""


class FileTools:
    """The tools `view`, `str_replace` and `create` in a working copy, for files of at most MOST_BYTES.

    An answer shows at most `chars` characters of a file, and viewing one of `suspects` is recorded in the signals.
    `open` names what was viewed last.
    """

    def __init__(self, copy: Copy, *, suspects: frozenset[str], limits: Limits, chars: int) -> None:
        self.open = ""
        self._copy, self._suspects, self._limits, self._chars = copy, suspects, limits, chars

    async def view(self, path: str, start: JSON, end: JSON) -> Done:
        if not all(line is None or (isinstance(line, int) and not isinstance(line, bool)) for line in (start, end)):
            return failed("view", "start and end are numbers of lines.", "bad arguments")
        first, last = start or 1, end or 1 << 30
        inner = self._relative_path(path)
        found = await self._read("view", inner)
        if isinstance(found, Done):
            return found
        self.open = f"{inner}:{first}-{last}"
        if b"\0" in found:
            return done("view", f"{inner} is a binary file of {len(found)} bytes.")
        text = decode(found)
        count = text.count("\n") + (not text.endswith("\n") and bool(text))
        if not 1 <= first <= max(count, 1) or last < first:
            what = f"lines {first} to {end or 'its end'}"
            return failed("view", f"{inner} has {count} lines; {what} are none of them.", "no such lines")
        shown = number_lines(text, first, last, self._chars)
        return done("view", shown or f"{inner} is empty.", looked_at_failing_code=inner in self._suspects)

    async def replace(self, path: str, old: str, new: str) -> Done:
        inner = self._relative_path(path)
        found = await self._read("str_replace", inner)
        if isinstance(found, Done):
            return found
        try:
            text, line = await asyncio.to_thread(
                replace_once, decode(found), old, new
            )  # it may search for similar lines
        except EditError as error:
            return failed("str_replace", str(error), str(error).partition(":")[0].partition(";")[0].partition(",")[0])
        around = number_lines(text, max(line - 2, 1), line + new.count("\n") + 2, self._chars)
        return await self._write("str_replace", inner, text, f"Replaced; it now reads:\n{around}")

    async def create(self, path: str, text: str) -> Done:
        inner = self._relative_path(path)
        try:
            if not await self._is_large(inner):
                await self._copy.sandbox.read(inner)
        except (OSError, ValueError) as error:
            if not isinstance(error, FileNotFoundError):
                return failed("create", f"{path}: {_error_text(error)}", "cannot be written")
        else:
            return failed("create", f"{inner} is there already; change it with str_replace.", "there already")
        return await self._write("create", inner, text, f"Wrote {inner}.")

    async def _is_large(self, path: str) -> bool:
        return (await self._copy.size(path) or 0) > MOST_BYTES

    async def _write(self, command: str, path: str, text: str, say: str) -> Done:
        try:
            await self._copy.sandbox.write(path, encode(text))
        except (OSError, ValueError, DiskFullError) as error:
            return failed(command, f"{path} cannot be written: {_error_text(error)}", "cannot be written")
        return done(command, say, modified=True)

    async def _read(self, command: str, path: str) -> bytes | Done:
        """Return a file's bytes, or the answer to the command if it is a folder or cannot be read."""
        if await self._is_large(path):
            say = f"{path} is larger than the {MOST_BYTES >> 20} MiB that {command} takes; use bash, with head or sed."
            return failed(command, say, "too large")
        try:
            return await self._copy.sandbox.read(path)
        except IsADirectoryError:
            if command != "view":
                return failed(command, f"{path} is a folder.", "is a folder")
            listed = await self._copy.sandbox.exec(["ls", "-1Ap", "--", path], limits=self._limits)
            self.open = path
            return done(command, listed.stdout.rstrip("\n") or f"{path} is empty.")
        except FileNotFoundError:
            near = [file for file in self._copy.base if PurePosixPath(file).name == PurePosixPath(path).name][:3]
            hint = f"; there is {' and '.join(near)}" if near else ""
            return failed(command, f"There is no file {path}{hint}.", "no such file")
        except (OSError, ValueError) as error:
            return failed(command, f"{path} cannot be read: {_error_text(error)}", "cannot be read")

    def _relative_path(self, path: str) -> str:
        """Convert a path that the agent gave to one relative to the root."""
        place = self._copy.place
        if place and (path == place or path.startswith(place + "/")):
            path = path[len(place) :].lstrip("/")
        return str(PurePosixPath(path or "."))


def _error_text(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
