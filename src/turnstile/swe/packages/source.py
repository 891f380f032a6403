"""Fetch packages as unpacked source trees with their dependencies, and cache them.

The cache has one folder per package, made beside its final place and renamed into it, so a folder that exists is
complete. The dependencies are in a separate folder, because a sandbox is shown only those of its own task's package.
That folder holds nothing of the package itself, which would be without the fault, even if a dependency needs it:

    CACHE/swe/NAME-VERSION/tree/             the source distribution without build products: the pristine template
    CACHE/swe/NAME-VERSION/package.json      the `Package` record with a digest of the tree
    CACHE/swe-deps/NAME-VERSION/             runtime and test dependencies, for the import path only
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from packaging.utils import canonicalize_name

from turnstile.cache import cache_dir, file_lock
from turnstile.errors import TaskError
from turnstile.lookup import nearest
from turnstile.swe.packages import layout, pip
from turnstile.swe.packages.checkout import parse_git, parse_path
from turnstile.swe.packages.metadata import entry_points, read_metadata
from turnstile.swe.tree import tree_digest

Progress = Callable[[str], None]
_RECORD = "package.json"


def deps_home(cache: Path | None = None) -> Path:
    """Return the folder with the dependencies of all packages; a sandbox needs only those of its own task."""
    return (cache or cache_dir()) / "swe-deps"


class Source(Protocol):
    """A source of a package; `kind` is one of "pypi", "path" and "git"."""

    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def spec(self) -> str: ...

    def unpack(self, into: Path) -> None:
        """Unpack the pristine tree into the empty folder `into`. Raises TaskError if that fails."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PypiSource:
    """A source distribution from the package index that pip is configured to use."""

    name: str
    version: str
    kind: str = "pypi"

    @property
    def spec(self) -> str:
        return f"pypi:{self.name}=={self.version}"

    def unpack(self, into: Path) -> None:
        with tempfile.TemporaryDirectory(dir=into.parent, prefix=".sdist-") as folder:
            archive = pip.download_sdist(self.name, self.version, Path(folder))
            layout.unpack_archive(archive, into)


def _parse_pypi(rest: str, spec: str) -> Source:
    match = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9._+!-]*)", rest)
    if match is None:
        raise TaskError(f"source {spec!r}: write it as pypi:NAME==VERSION with one exact version")
    return PypiSource(name=canonicalize_name(match[1]), version=match[2])


_KINDS: dict[str, Callable[[str, str], Source]] = {
    "pypi": _parse_pypi,
    "path": lambda rest, spec: parse_path(spec),
    "git": lambda rest, spec: parse_git(spec),
}


def parse_source(spec: str) -> Source:
    """Return the source that a spec names.

    A spec is `pypi:toolz==1.2.0`, a folder (`./toolz` or `path:./toolz`), or a commit of a repository
    (`git+file:///work/toolz@v1.2.0`). Raises TaskError for anything else.
    """
    kind, colon, rest = spec.partition(":")
    if spec.startswith(("./", "../", "/", "~")) or spec in (".", ".."):
        kind, colon, spec = "path", ":", f"path:{spec}"
    elif spec.startswith("git+"):
        kind, colon = "git", ":"
    if not colon:
        raise TaskError(f"source {spec!r}: write it as pypi:NAME==VERSION, ./FOLDER or git+URL@REVISION")
    if kind not in _KINDS:
        raise TaskError(f"source {spec!r}: unknown kind {kind!r}; {nearest(kind, _KINDS)}")
    return _KINDS[kind](rest, spec)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """One unpacked package. Paths inside the tree are relative and use forward slashes.

    `tree` is the pristine template, which is copied and never changed. Tests run with the copy as working folder and
    the variables of `environment`. `requires` are exact pins of what `deps` holds.
    """

    spec: str
    name: str
    version: str
    tree: Path
    deps: Path
    import_root: str  # the folder on the import path, such as "." or "src"
    modules: tuple[str, ...]  # the package's own source files, where bugs can be put
    tests: tuple[str, ...]  # test files
    licence: str
    licence_file: str | None
    requires: tuple[str, ...]
    digest: str  # of every file in the tree

    @property
    def label(self) -> str:
        return f"{self.name}-{self.version}"

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that tests in a copy of the tree need; relative paths start at the copy."""
        return {"PYTHONPATH": os.pathsep.join(dict.fromkeys((self.import_root, ".", str(self.deps))))}


def fetch(
    source: Source | str,
    *,
    extra: Sequence[str] = (),
    requires: Sequence[str] | None = None,
    cache: Path | None = None,
    progress: Progress = lambda message: None,
) -> Package:
    """Return the package of a source, from the cache or fetched into it.

    `extra` adds requirements that the package's metadata does not name; `requires` replaces all requirements of the
    metadata with exact pins, as recorded in a task file. Several processes may call this at the same time.

    Raises TaskError if the package cannot be fetched, a dependency cannot be installed, or the package has no tests.
    """
    source = parse_source(source) if isinstance(source, str) else source
    requires = None if requires is None else [pin for pin in requires if not _names_package(pin, source.name)]
    home = (cache or cache_dir()) / "swe" / f"{source.name}-{source.version}"
    cached = _load(home, cache)
    if cached is not None and _serves(cached, extra, requires):
        return cached
    with file_lock(home):
        cached = _load(home, cache)  # another process may have been quicker
        if cached is not None and _serves(cached, extra, requires):
            return cached
        with tempfile.TemporaryDirectory(
            dir=home.parent, prefix=f".{home.name}-", ignore_cleanup_errors=True
        ) as folder:
            staged = Path(folder) / "package"
            _build(source, staged, extra, requires, progress)
            deps_home(cache).mkdir(parents=True, exist_ok=True)
            _put(staged / "deps", deps_home(cache) / home.name)
            _put(staged, home)
    package = _load(home, cache)
    if package is None:
        raise TaskError(f"{source.spec}: the cache folder {home} was damaged while it was made; try again")
    return package


def _build(
    source: Source, staged: Path, extra: Sequence[str], requires: Sequence[str] | None, progress: Progress
) -> None:
    tree, deps = staged / "tree", staged / "deps"
    tree.mkdir(parents=True)
    progress(f"fetching {source.spec}")
    source.unpack(tree)
    metadata, offered = read_metadata(tree), entry_points(tree)
    layout.remove_build_products(tree)
    tests = layout.find_tests(tree)
    if not tests:
        raise TaskError(
            f"{source.spec}: {'its source distribution' if source.kind == 'pypi' else 'it'} holds no tests "
            "(no test_*.py, *_test.py or tests.py); choose another package"
        )
    import_root = layout.find_import_root(tree, source.name)
    wanted = list(requires) if requires is not None else [*layout.requirements(tree, metadata), *extra]
    if wanted:
        progress(f"installing {len(wanted)} dependencies of {source.spec}")
    deps.mkdir()
    pip.install_target(wanted, deps, source.spec, no_deps=requires is not None)
    layout.remove_distribution(deps, source.name)
    pins = layout.pins(deps)
    # the package's own metadata, as some packages look up their version or plugins in importlib.metadata
    own = deps / f"{source.name.replace('-', '_')}-{source.version}.dist-info"
    own.mkdir(exist_ok=True)
    (own / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {source.name}\nVersion: {source.version}\n")
    if offered:
        (own / "entry_points.txt").write_text(offered, encoding="utf-8")
    licence, licence_file = layout.find_licence(tree, metadata)
    record = {
        "spec": source.spec,
        "name": source.name,
        "version": source.version,
        "import_root": import_root,
        "modules": layout.find_modules(tree, import_root),
        "tests": tests,
        "licence": licence,
        "licence_file": licence_file,
        "requires": pins,
        "extra": sorted(extra),
        "digest": tree_digest(tree),
    }
    (staged / _RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")


def _put(staged: Path, home: Path) -> None:
    """Rename the staged folder into place, after moving an older one away and deleting it."""
    if home.exists():
        old = staged.with_name(f"old-{staged.name}")
        home.rename(old)
        shutil.rmtree(old, ignore_errors=True)
    staged.rename(home)


def _load(home: Path, cache: Path | None) -> Package | None:
    """Return the package in the cache; None if it is missing, incomplete or changed since it was unpacked."""
    try:
        record = json.loads((home / _RECORD).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    tree, deps = home / "tree", deps_home(cache) / home.name
    if not deps.is_dir() or not tree.is_dir() or tree_digest(tree) != record.get("digest"):
        return None
    record.pop("extra", None)
    for key in ("modules", "tests", "requires"):
        record[key] = tuple(record[key])
    return Package(tree=tree, deps=deps, **record)


def _serves(package: Package, extra: Sequence[str], requires: Sequence[str] | None) -> bool:
    if requires is not None:
        return set(requires) <= set(package.requires)
    return all(any(_names_package(name, pin.split("==")[0]) for pin in package.requires) for name in extra)


def _names_package(requirement: str, name: str) -> bool:
    """Return whether a requirement is for the package called `name`."""
    return canonicalize_name(re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]) == canonicalize_name(name)
