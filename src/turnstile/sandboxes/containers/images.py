"""Container images: pulled from a registry, or built here once and named by the digest of their contents.

An image built here is named `localhost/turnstile/KIND:DIGEST`, where the digest covers everything that went into it, so
any process can reuse it. No process owns it: sweeps keep it, and `turnstile sandbox prune --images` removes it.
"""

from __future__ import annotations

import io
import json
import logging
import re
import shlex
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import docker
import docker.errors
import docker.utils

from turnstile.cache import cache_dir, file_lock
from turnstile.errors import ConfigError, DaemonError
from turnstile.sandboxes.base import Image
from turnstile.sandboxes.containers.contents import (
    context_digest,
    digest_of,
    file_digest,
    root_digest,
    tree_digest,
    write_root,
)
from turnstile.sandboxes.containers.daemon import Daemon, short, translate_errors
from turnstile.sandboxes.containers.repository import commit_once

_log = logging.getLogger(__name__)

DIGEST = "turnstile.image"
HOLDS = "turnstile.image.holds"
OURS = "localhost/turnstile/"  # no registry has it, so nothing of that name is ever pulled
DEPENDENCIES = "/opt/turnstile/deps"
WORKDIR = "/testbed"
UNREACHABLE = ("dial ", "lookup ", "timeout", "timed out", "connection", "eof", "no route",
               "toomanyrequests", "too many requests", "rate limit")  # fmt: skip
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageStep:
    """A progress report on an image; `done` of `total` bytes or steps, if known."""

    what: str
    done: int = 0
    total: int | None = None


Progress = Callable[[ImageStep], None]


def announce() -> Progress:
    """Return a progress callback that logs each step once, with a warning that it may take minutes."""
    announced: set[str] = set()

    def say(step: ImageStep) -> None:
        if step.what not in announced:
            announced.add(step.what)
            _log.warning("%s; this may take minutes", step.what)

    return say


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltImage:
    """An image that was built here: name, description of its contents, size in bytes, creation time (Unix seconds)."""

    name: str
    holds: str
    size: int
    created: int


class Images:
    """The images of one engine. Methods block, and may be called from several threads and processes at once.

    They raise ConfigError for an image that cannot be had or built, and DaemonError if engine or registry do not
    answer.
    """

    def __init__(self, daemon: Daemon, progress: Progress | None = None) -> None:
        self._daemon = daemon
        self._client = daemon.client
        self._progress = progress or announce()

    def base(self, *, image: str = "", dockerfile: Path | None = None, rootfs: Path | None = None) -> str:
        """Return the name of the image that one of the three options gives, after pulling or building it."""
        if [bool(image), dockerfile is not None, rootfs is not None].count(True) != 1:
            raise ConfigError(
                "an image is named in one of three ways: image = NAME, dockerfile = PATH or rootfs = FOLDER_OR_TAR"
            )
        if dockerfile is not None:
            return self.from_dockerfile(dockerfile)
        if rootfs is not None:
            return self.from_root(rootfs)
        self.pull(image)
        return image

    def present(self, name: str) -> bool:
        with translate_errors(f"the image {name}"):
            try:
                self._client.inspect_image(name)
            except docker.errors.ImageNotFound:
                return False
            return True

    def pull(self, name: str) -> None:
        """Pull an image by its registry name, unless it exists."""
        if self.present(name):
            return
        what = f"pulling the image {name}"
        self._progress(ImageStep(what=what))
        layers: dict[str, tuple[int, int]] = {}
        try:
            for event in self._client.pull(name, stream=True, decode=True):
                if "error" in event:
                    raise docker.errors.DockerException(event["error"])
                now = event.get("progressDetail") or {}
                if event.get("status") == "Downloading" and now.get("total"):
                    layers[event["id"]] = now["current"], now["total"]
                    done, total = map(sum, zip(*layers.values(), strict=True))
                    self._progress(ImageStep(what=what, done=done, total=total))
        except (docker.errors.DockerException, OSError) as error:
            raise pull_error(name, short(error)) from None
        if not self.present(name):
            raise pull_error(name, "the registry gave none")

    def from_dockerfile(self, dockerfile: Path, *, network: str | None = None) -> str:
        """Build the image of a Dockerfile from its folder, less what a .dockerignore beside it excludes.

        `network` is what its RUN steps may use (default: the engine's own choice).
        """
        if not dockerfile.is_file():
            raise ConfigError(f"there is no Dockerfile {dockerfile}")
        folder = dockerfile.resolve().parent
        digest = context_digest(folder, dockerfile.name)

        def make(name: str, labels: Mapping[str, str]) -> Iterator[dict[str, Any]]:
            found: Iterator[dict[str, Any]] = self._client.build(
                path=str(folder), dockerfile=dockerfile.name, tag=name, labels=dict(labels), network_mode=network,
                rm=True, forcerm=True, decode=True,
            )  # fmt: skip
            return found

        return self._once(folder.name, digest, f"what {dockerfile} makes", make)

    def from_root(self, rootfs: Path) -> str:
        """Build an image from a root file system: a folder, or a tar archive of one."""
        if rootfs.is_dir():
            digest = root_digest(rootfs)
        elif rootfs.is_file() and tarfile.is_tarfile(rootfs):
            digest = file_digest(rootfs)
        else:
            raise ConfigError(f"the root file system {rootfs} is neither a folder nor a tar archive")

        def make(name: str, labels: Mapping[str, str]) -> Iterable[dict[str, Any]]:
            repository, _, tag = name.rpartition(":")
            settings = [f"LABEL {key}={json.dumps(value)}" for key, value in labels.items()]
            settings.append(f"ENV PATH={PATH}")
            with tempfile.TemporaryDirectory() as folder:
                archive = rootfs
                if rootfs.is_dir():
                    archive = Path(folder) / "root.tar"
                    write_root(rootfs, archive)
                output = self._client.import_image(str(archive), repository=repository, tag=tag, changes=settings)
            return (json.loads(line) for line in output.splitlines() if line.strip())

        return self._once(rootfs.resolve().name.partition(".")[0], digest, f"the root file system {rootfs}", make)

    def with_packages(
        self, base: str, requirements: Sequence[str], *, python: str = "python3", network: str | None = None
    ) -> str:
        """Build `base` with packages installed by its own pip, from its configured index."""
        digest = digest_of("packages", self._identity(base), python, *requirements)
        words = shlex.join([python, "-m", "pip", "install", "--no-cache-dir", "--no-input", *requirements])
        recipe = f"FROM {self._identity(base)}\nUSER 0\nRUN PIP_BREAK_SYSTEM_PACKAGES=1 {words}\n"

        def make(name: str, labels: Mapping[str, str]) -> Iterator[dict[str, Any]]:
            return self._build(recipe, (), name, labels, network)

        return self._once("packages", digest, f"{base} with {', '.join(requirements)}", make)

    def with_repository(
        self,
        base: str,
        tree: Path,
        *,
        holds: str = "",
        deps: Path | None = None,
        workdir: str = WORKDIR,
        user: str = "1000:1000",
    ) -> Image:
        """Build `base` with a source tree in `workdir`, as a fresh git repository of `user` with a single commit.

        `deps` is a folder of installed packages that is copied beside it and added to the image's PYTHONPATH. `holds`
        describes the tree in words (default: its folder's name).
        """
        if not tree.is_dir():
            raise ConfigError(f"there is no source tree {tree}")
        holds = holds or tree.resolve().name
        identity = self._identity(base)
        parts = ("repository", identity, tree_digest(tree), workdir, user)
        digest = digest_of(*parts, *(() if deps is None else (tree_digest(deps),)))

        def make(name: str, labels: Mapping[str, str]) -> Iterator[dict[str, Any]]:
            with tempfile.TemporaryDirectory() as folder:
                made = Path(folder) / "repository"
                commit = commit_once(tree, made)
                recipe = [f"FROM {identity}"]
                folders = [(made, "repository")]
                if deps is not None:
                    recipe += [f"COPY deps/ {DEPENDENCIES}/", f"ENV PYTHONPATH={self._import_path(identity)}"]
                    folders.append((deps, "deps"))
                recipe += [f"COPY --chown={user} repository/ {workdir}/", f"LABEL turnstile.commit={commit}"]
                yield from self._build("\n".join(recipe) + "\n", folders, name, labels, None)

        return Image(name=self._once(holds, digest, f"{holds} in {workdir} on {base}", make), root=workdir)

    def kept(self) -> list[BuiltImage]:
        """Return the images that were built here, newest first."""
        with translate_errors("a list of images"):
            found = self._client.images(filters={"label": DIGEST})
        kept = [
            BuiltImage(name=name, holds=image["Labels"].get(HOLDS, ""), size=image["Size"], created=image["Created"])
            for image in found
            for name in image.get("RepoTags") or ()
            if name.startswith(OURS)
        ]
        return sorted(kept, key=lambda image: -image.created)

    def remove(self, kept: Iterable[BuiltImage]) -> list[BuiltImage]:
        """Remove images; return those that containers still use, which stay."""
        used = []
        with translate_errors("an image's removal"):
            for image in kept:
                try:
                    self._client.remove_image(image.name)
                except docker.errors.NotFound:
                    continue
                except docker.errors.APIError as error:
                    if error.status_code != 409:
                        raise
                    used.append(image)
        return used

    def _identity(self, name: str) -> str:
        self.pull(name)
        with translate_errors(f"the image {name}"):
            identity: str = self._client.inspect_image(name)["Id"]
            return identity

    def _import_path(self, identity: str) -> str:
        """Return PYTHONPATH with the dependencies before the image's own entries."""
        with translate_errors("an image"):
            settings = (self._client.inspect_image(identity).get("Config") or {}).get("Env") or ()
        old = [value for name, _, value in (each.partition("=") for each in settings) if name == "PYTHONPATH" and value]
        return ":".join((DEPENDENCIES, *old))

    def _once(
        self,
        title: str,
        digest: str,
        holds: str,
        make: Callable[[str, Mapping[str, str]], Iterable[dict[str, Any]]],
    ) -> str:
        """Build the image of a digest unless it exists, one process at a time. `make` yields the engine's events."""
        slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "image"
        name = f"{OURS}{slug}:{digest[:24]}"
        if self.present(name):
            return name
        what = f"making the image {name} ({holds})"
        with file_lock(cache_dir() / "images" / slug):
            if self.present(name):  # somebody else was quicker
                return name
            self._progress(ImageStep(what=what))
            with translate_errors(what):
                self._follow(what, make(name, {DIGEST: digest, HOLDS: holds}))
        if not self.present(name):
            raise DaemonError(f"{what}: the engine said nothing of an error, and there is no image")
        return name

    def _build(
        self,
        recipe: str,
        folders: Iterable[tuple[Path, str]],
        name: str,
        labels: Mapping[str, str],
        network: str | None,
    ) -> Iterator[dict[str, Any]]:
        """Yield the events of a build whose context holds `folders` under their names."""
        with tempfile.TemporaryFile() as context:
            write_context(recipe, folders, context)
            context.seek(0)
            yield from self._client.build(
                fileobj=context, custom_context=True, tag=name, labels=dict(labels), network_mode=network, rm=True,
                forcerm=True, decode=True,
            )  # fmt: skip

    def _follow(self, what: str, events: Iterable[dict[str, Any]]) -> None:
        last_line = ""
        for event in events:
            if "error" in event:
                why = str(event["error"]).strip().splitlines()[-1]
                hint = last_line if last_line not in why else ""
                if "rlimit" in why.lower():
                    hint = 'set "default-ulimits" in the engine\'s daemon.json'
                raise ConfigError(f"{what}: {why}" + (f" ({hint})" if hint else ""))
            text = str(event.get("stream") or event.get("status") or "").strip()
            last_line = text.splitlines()[-1][-300:] if text else last_line
            if match := re.match(r"step (\d+)/(\d+)", text, re.IGNORECASE):
                self._progress(ImageStep(what=what, done=int(match[1]) - 1, total=int(match[2])))


def pull_error(name: str, why: str) -> ConfigError | DaemonError:
    """Return why an image could not be pulled."""
    if name.startswith(OURS):
        return ConfigError(
            f"the image {name} was made here once and is gone; make it again: turnstile sandbox image build"
        )
    if any(word in why.lower() for word in UNREACHABLE):
        return DaemonError(
            f"the engine does not have the image {name}, and its registry cannot be reached or gives no more for now "
            f"({why}); bring it here (docker pull where there is a network, docker save and docker load), or make one "
            "without a registry: turnstile sandbox image build --rootfs FOLDER"
        )
    return ConfigError(
        f"the engine does not have the image {name}, and the registry does not give it ({why}); check the name, or "
        "docker login and docker pull it"
    )


def write_context(recipe: str, folders: Iterable[tuple[Path, str]], into: IO[bytes]) -> None:
    """Write a build context: the Dockerfile, and folders with all their contents."""
    with tarfile.open(fileobj=into, mode="w") as archive:
        member = tarfile.TarInfo("Dockerfile")
        member.size = len(recipe.encode())
        archive.addfile(member, io.BytesIO(recipe.encode()))
        for folder, inner in folders:
            archive.add(folder, arcname=inner)
