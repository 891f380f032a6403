"""Packages from a folder, or from a git repository at one revision.

Such a source is identified by its content, since its version ends with a digest of the files or with the commit. A task
keeps the complete spec, so it never refers to code other than that it was made from:

    path:/work/tiny#tiny==1.0+f1d2d2f924e9
    git+file:///work/tiny@COMMIT#tiny==1.0+g1f3c5d7a9b02

Only files are taken, never history.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

from turnstile.cache import cache_dir
from turnstile.errors import TaskError
from turnstile.swe.packages.metadata import name_and_version, project_of, write_metadata

_SKIPPED = frozenset({".git", ".hg", ".svn", ".tox", ".nox", ".venv", "venv", "env", "node_modules", "__pycache__",
                   ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", "build", "dist"})  # fmt: skip
_SECONDS = 600
_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9._+!-]*)")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PathSource:
    """The files of a folder as they are now, without history, environments and caches."""

    folder: Path
    name: str
    version: str
    kind: str = "path"

    @property
    def spec(self) -> str:
        return f"path:{self.folder}#{self.name}=={self.version}"

    def unpack(self, into: Path) -> None:
        if self.version != _path_source(self.folder, "").version:
            raise TaskError(f"{self.spec}: the files of {self.folder} have changed since; make the tasks again")
        for path in _files(self.folder):
            target = into / path.relative_to(self.folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        write_metadata(into, self.name, self.version)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GitSource:
    """The files of one commit of a repository."""

    url: str
    commit: str
    name: str
    version: str
    kind: str = "git"

    @property
    def spec(self) -> str:
        return f"git+{self.url}@{self.commit}#{self.name}=={self.version}"

    def unpack(self, into: Path) -> None:
        _export(_mirror(self.url, self.commit), self.commit, into)
        write_metadata(into, self.name, self.version)


def parse_path(spec: str) -> PathSource:
    """Return the source for `path:FOLDER`, with or without the `#NAME==VERSION` that tasks add.

    Without it, the folder is read. Raises TaskError if it has to be read and does not exist.
    """
    rest, _, pin = spec.removeprefix("path:").partition("#")
    folder = Path(rest).expanduser().absolute()
    if match := _PIN.fullmatch(pin):
        return PathSource(folder=folder, name=match[1], version=match[2])
    return _path_source(folder, spec)


def _path_source(folder: Path, spec: str) -> PathSource:
    if not folder.is_dir():
        raise TaskError(f"source {spec or folder!s}: there is no folder {folder}")
    total = hashlib.sha256()
    for path in _files(folder):
        total.update(path.relative_to(folder).as_posix().encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    name, version = project_of(folder, folder.name)
    return PathSource(folder=folder, name=name, version=f"{version}+{total.hexdigest()[:12]}")


def parse_git(spec: str) -> GitSource:
    """Return the source for `git+URL@REVISION`, with or without the `#NAME==VERSION` that tasks add.

    Without it, the repository is fetched. Raises TaskError if that fails, the revision does not exist, or the spec is
    malformed.
    """
    rest, _, pin = spec.removeprefix("git+").partition("#")
    url, at, revision = rest.rpartition("@")
    if not at or not revision or revision.startswith("-") or "/" not in url.partition("://")[2]:
        raise TaskError(f"source {spec!r}: write it as git+URL@REVISION, for example git+file:///work/tiny@v1.0")
    if match := _PIN.fullmatch(pin):
        return GitSource(url=url, commit=revision, name=match[1], version=match[2])
    mirror = _mirror(url, revision)
    commit = _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", mirror=mirror).stdout.decode().strip()
    if not commit:
        raise TaskError(f"source {spec!r}: the repository has no revision {revision!r}")
    shown = {file: _git("show", f"{commit}:{file}", mirror=mirror) for file in ("pyproject.toml", "setup.cfg")}
    texts = {file: done.stdout.decode("utf-8", "replace") for file, done in shown.items() if done.returncode == 0}
    name, version = name_and_version(texts, re.sub(r"\.git$", "", url.rstrip("/").rpartition("/")[2]))
    return GitSource(url=url, commit=commit, name=name, version=f"{version}+g{commit[:12]}")


def _mirror(url: str, revision: str) -> Path:
    """Return a cached bare clone of the repository, updated unless `revision` is a full commit id that it has.

    Raises TaskError if the repository cannot be cloned, or fetched when the revision is unknown.
    """
    mirror = cache_dir() / "swe" / "git" / hashlib.sha256(url.encode()).hexdigest()[:16]
    if not mirror.is_dir():
        mirror.parent.mkdir(parents=True, exist_ok=True)
        staged = mirror.with_name(f".{mirror.name}.{os.getpid()}")
        done = _git("clone", "--bare", "--quiet", "--", url, str(staged))
        if done.returncode != 0:
            shutil.rmtree(staged, ignore_errors=True)
            raise TaskError(f"git+{url}: it cannot be cloned: {_error_line(done.stderr)}")
        if mirror.is_dir():  # another process was quicker
            shutil.rmtree(staged)
        else:
            staged.rename(mirror)
    known = _git("cat-file", "-e", f"{revision}^{{commit}}", mirror=mirror).returncode == 0
    if not known or not re.fullmatch(r"[0-9a-f]{40}", revision):  # a branch may have moved
        done = _git("fetch", "--quiet", "--force", "origin", "+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*",
                    mirror=mirror)  # fmt: skip
        if done.returncode != 0 and not known:
            raise TaskError(f"git+{url}: it cannot be fetched: {_error_line(done.stderr)}")
    return mirror


def _export(mirror: Path, commit: str, into: Path) -> None:
    done = _git("archive", "--format=tar", commit, mirror=mirror)
    if done.returncode != 0:
        raise TaskError(f"the commit {commit} cannot be read from {mirror}: {_error_line(done.stderr)}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as packed:
        packed.extractall(into, filter="data")


def _git(*arguments: str, mirror: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    where = [] if mirror is None else [f"--git-dir={mirror}"]
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        return subprocess.run(
            ["git", *where, *arguments],
            capture_output=True, stdin=subprocess.DEVNULL, timeout=_SECONDS, env=environment,
        )  # fmt: skip
    except FileNotFoundError:
        raise TaskError("a git source needs the program git; install it") from None
    except subprocess.TimeoutExpired:
        raise TaskError(f"git {arguments[0]} did not end within {_SECONDS} s; check the network") from None


def _error_line(stderr: bytes) -> str:
    lines = [line.strip() for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("fatal")), lines[-1] if lines else "no message")[:300]


def _files(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.endswith(".egg-info"))
        for name in sorted(names):
            path = Path(root, name)
            if path.is_file() and not name.endswith(".pyc"):
                yield path
