"""An instance as a problem, which is a repository in an image and graded in a fresh container of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from turnstile.errors import ConfigError, SandboxError, TaskError
from turnstile.sandboxes.base import Image, Limits, Sandbox, Sandboxes
from turnstile.swe.formats.instance import Instance
from turnstile.swe.grading.bench import put
from turnstile.swe.grading.grader import Verdict
from turnstile.swe.grading.memo import Memo
from turnstile.swe.grading.suite import REWARD, RUNNERS, Outcome, run_suite
from turnstile.swe.problems.copy import Change, ChangeError, Copy, begin
from turnstile.swe.problems.diff import touched_files
from turnstile.swe.problems.image import TESTS, Prepared, apply_patch, carry, inner, prepare_image, run
from turnstile.swe.tree import can_change_tests, hides_a_library

SETTINGS = frozenset(
    {"pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml"}
)
"""Files in which pytest looks for its settings, which can choose what counts as a test."""


class InstanceProblem:
    """An `Instance`, tried in containers of its image (see `image.prepare_image`).

    The agent's changes are graded, except those to tests, to files beside them and to pytest's settings, and new
    modules in place of a library. A file that the repair itself changes is graded too, unless it holds such settings.
    """

    def __init__(
        self,
        instance: Instance,
        sandboxes: Sandboxes,
        *,
        images: Memo[Prepared],
        outcomes: Memo[Outcome],
        limits: Limits,
    ) -> None:
        if not instance.image:
            raise TaskError(f"instance {instance.id}: it names no image; set `image` in its data")
        if instance.log_parser and not instance.fail_to_pass and not instance.expected:
            raise TaskError(
                f"instance {instance.id}: it names no test that must pass; set `fail_to_pass` or `expected` in its data"
            )
        self.id = instance.id
        self.statement = instance.problem or "Some tests of this repository fail. Find the cause and repair it."
        self.fail_to_pass: Sequence[str] = instance.fail_to_pass or tuple(instance.expected)
        self.pass_to_pass: Sequence[str] = () if instance.expected else instance.pass_to_pass
        self.must_fail: Sequence[str] = instance.fail_to_pass if instance.log_parser and not instance.expected else ()
        self.import_root = "."
        self._restored = frozenset(touched_files(instance.test_patch))
        self._repaired = frozenset(touched_files(instance.patch)) - self._restored
        self.suspects = frozenset(path for path in self._repaired if not can_change_tests(path))
        self._instance, self._sandboxes, self._limits = instance, sandboxes, limits
        self._images, self._outcomes = images, outcomes
        self._known: dict[str, bytes | None] = {}  # contents at the beginning
        self._paths: frozenset[str] | None = None  # files and folders at the beginning
        self._folder = Path(str(instance.extra.get("folder", "")))  # of a Harbor task
        self._digest = hashlib.sha256(json.dumps(instance.to_json(), default=str).encode()).hexdigest()
        self._tests = frozenset(test.partition("::")[0] for test in (*self.fail_to_pass, *self.pass_to_pass))

    async def open(self) -> Copy:
        prepared = await self._prepare_image()
        copy = await begin(
            await self._start(prepared, prepared.agent),
            self.id,
            setup=f"unset PYTEST_DISABLE_PLUGIN_AUTOLOAD\n{self._instance.setup}",
            place=self._instance.workdir,
            git=prepared.git,
        )
        if self._paths is None:
            folders = (str(folder) for path in copy.base for folder in PurePosixPath(path).parents)
            self._paths = frozenset((*copy.base, *folders))
        return copy

    async def ignored(self, files: Iterable[str]) -> tuple[str, ...]:
        if self._paths is None:
            await (await self.open()).close()
        return tuple(sorted(path for path in files if self._is_ignored(path)))

    async def base(self, files: Iterable[str]) -> Mapping[str, bytes | None]:
        wanted = list(files)
        if not all(path in self._known for path in wanted):
            prepared = await self._prepare_image()
            sandbox = await self._start(prepared, prepared.graded)
            try:
                await self._remember_contents(sandbox, wanted)
            finally:
                await sandbox.close()
        return {path: self._known[path] for path in wanted}

    async def grade(self, change: Change, *, repeat: int = 0) -> Verdict:
        left_out = await self.ignored(change.files)
        code = {path: data for path, data in change.files.items() if path not in left_out}
        graded = Change(files=code, executable=change.executable & code.keys())
        outcome, from_memo = await self._outcomes.get(self._key(graded, repeat), lambda: self._run(graded))
        return self._verdict(outcome, (*left_out, *change.lost), from_memo)

    async def gold(self) -> Change | None:
        instance = self._instance
        solution = self._folder / "solution"
        scripted = not instance.patch and not instance.log_parser and (solution / "solve.sh").is_file()
        if not instance.patch and not scripted:
            return None
        prepared = await self._prepare_image()
        sandbox = await self._start(prepared, replace(prepared.graded, root=instance.workdir))
        copy = await begin(sandbox, self.id, git=prepared.git)
        try:
            if scripted:
                await carry(instance, sandbox, solution, "/solution")
                await run(instance, sandbox, "bash /solution/solve.sh", "its solve.sh failed")
            else:
                await apply_patch(instance, sandbox, instance.patch, "its repair")
            return await copy.change()
        except ChangeError as error:
            raise TaskError(f"instance {self.id}: its repair cannot be taken up: {error}") from None
        finally:
            await copy.close()

    async def _prepare_image(self) -> Prepared:
        """Return the prepared image, which the first request makes for all who try the instance."""
        prepared, _ = await self._images.get(self._digest, lambda: prepare_image(self._instance, self._sandboxes))
        return prepared

    async def _start(self, prepared: Prepared, image: Image) -> Sandbox:
        """Start a sandbox from a prepared image. Raises SandboxError if that fails.

        An image that cannot be started is forgotten, so that the next request makes it again. It may have been lost
        with the engine that kept it.
        """
        try:
            return await self._sandboxes.start(image)
        except (ConfigError, SandboxError) as error:
            self._images.forget(self._digest, prepared)
            raise SandboxError(f"instance {self.id}: its prepared image cannot be started from: {error}") from error

    def _is_ignored(self, path: str) -> bool:
        if path in self._repaired and PurePosixPath(path).name not in SETTINGS:
            return False
        paths = self._paths or frozenset()
        full = str(PurePosixPath(self._instance.workdir) / path)
        return (
            can_change_tests(path)
            or path in self._tests
            or path in self._restored
            or any(full == hidden or full.startswith(hidden + "/") for hidden in self._instance.hidden)
            or PurePosixPath(path).name in SETTINGS
            or (self._instance.log_parser in RUNNERS and hides_a_library(path, paths.__contains__, (".", "src")))
        )

    async def _remember_contents(self, sandbox: Sandbox, paths: Iterable[str]) -> None:
        for path in paths:
            try:
                self._known[path] = await sandbox.read(inner(self._instance, path))
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                self._known[path] = None

    async def _run(self, change: Change) -> Outcome:
        """Return the outcome of the tests in a fresh container with the change in it."""
        instance = self._instance
        prepared = await self._prepare_image()
        sandbox = await self._start(prepared, prepared.graded)
        try:
            await self._remember_contents(sandbox, change.files)
            try:
                await put(sandbox, change.files, below=inner(instance, ""))
            except OSError as error:
                return Outcome(problem=f"the change cannot be put in: {error}")
            if change.executable:
                await sandbox.exec(["chmod", "+x", "--", *(inner(instance, path) for path in change.executable)])
            try:
                await apply_patch(instance, sandbox, instance.test_patch, TESTS)
            except TaskError as error:  # the patch fits the image, so the change is in its way
                return Outcome(problem=f"the change is in the way of its tests: {error}")
            if not instance.log_parser:
                await carry(instance, sandbox, self._folder / "tests", "/tests")
                await run(instance, sandbox, "mkdir -p /logs/verifier", "no folder for its reward")
            before = {path: self._known[path] for path in change.files}
            return await run_suite(sandbox, instance, before=before, limits=self._limits)
        finally:
            await sandbox.close()

    def _key(self, change: Change, repeat: int) -> str:
        files = {path: data and hashlib.sha256(data).hexdigest() for path, data in change.files.items()}
        parts = (self._digest, sorted(files.items()), sorted(change.executable), repeat)
        return hashlib.sha256(json.dumps(parts, default=bytes.decode).encode()).hexdigest()

    def _verdict(self, outcome: Outcome, ignored: Sequence[str], from_memo: bool) -> Verdict:
        f2p, p2p = self.fail_to_pass, self.pass_to_pass
        if not self._instance.log_parser:
            f2p = (REWARD,)
            failed = [] if outcome.reward is not None and outcome.reward >= 1 else [REWARD]
        elif outcome.problem is not None:
            failed = [*f2p, *p2p]
        else:
            failed = self._instance.unmet(outcome.statuses)
        bad = frozenset(failed)
        return Verdict(
            resolved=bool(f2p) and not bad,
            fail_to_pass_passed=sum(test not in bad for test in f2p),
            fail_to_pass_total=len(f2p),
            pass_to_pass_passed=sum(test not in bad for test in p2p),
            pass_to_pass_total=len(p2p),
            failed=tuple(failed),
            ignored=tuple(ignored),
            messages=dict(zip(failed, _reasons(failed, outcome), strict=True)),
            timed_out=outcome.timed_out,
            waited_out=outcome.waited_out,
            problem=outcome.problem,
            silent=outcome.reward is None and self._instance.met_none(outcome.statuses),
            seconds=outcome.seconds,
            from_memo=from_memo,
        )


def _reasons(failed: Sequence[str], outcome: Outcome) -> Iterator[str]:
    """Yield why each of the tests failed, in one line; names cut at a blank, as in data sets, are found too."""
    messages, statuses = (
        {name.partition(" ")[0]: text for name, text in found.items()} | dict(found)
        for found in (outcome.messages, outcome.statuses)
    )
    for test in failed:
        of_file = messages.get(test.partition("::")[0], "")
        status = f"it came out as {statuses[test]}" if test in statuses else of_file or "it is missing"
        yield messages.get(test) or outcome.problem or status
