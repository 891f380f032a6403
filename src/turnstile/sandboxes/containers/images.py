"""Container images, pulled from a registry or built here once and named by the digest of their contents.

An image built here is named `localhost/turnstile/TITLE:DIGEST`, where the digest covers everything that went into it,
so any process can reuse it. No process owns it: sweeps keep it, and `turnstile sandbox prune --images` removes it.
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
OURS = "localhost/turnstile/"  # no registry has this prefix, so no such image is ever pulled
DEPENDENCIES = "/opt/turnstile/deps"
WORKDIR = "/testbed"
UNREACHABLE = ("dial ", "lookup ", "timeout", "timed out", "connection", "eof", "no route",
               "toomanyrequests", "too many requests", "rate limit")  # fmt: skip
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageStep:
    """A progress report on an image: what is being done, and `done` of `total` bytes or steps, if known."""

    what: str
    done: int = 0
    total: int | None = None


Progress = Callable[[ImageStep], None]


def announce() -> Progress:
    """Return a progress callback that logs each step's description once, warning that it may take minutes."""
    announced: set[str] = set()

    def say(step: ImageStep) -> None:
        if step.what not in announced:
            announced.add(step.what)
            _log.warning("%s; this may take minutes", step.what)

    return say


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltImage:
    """An image that was built here.

    `holds` describes its contents, `size` is in bytes and `created` in Unix seconds.
    """

    name: str
    holds: str
    size: int
    created: int


class Images:
    """The images of one engine. Methods block, and may be called from several threads and processes at once.

    They raise ConfigError for an image that cannot be obtained or built, and DaemonError if the engine or a registry
    does not answer.
    """

    def __init__(self, daemon: Daemon, progress: Progress | None = None) -> None:
        self._daemon = daemon
        self._client = daemon.client
        self._progress = progress or announce()

    def base(self, *, image: str = "", dockerfile: Path | None = None, rootfs: Path | None = None) -> str:
        """Pull or build the image that one of the three options names, and return the image's name.

        Raises ConfigError unless exactly one option is given.
        """
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
        """Pull an image by its registry name, unless the engine has it."""
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
        """Build the image of a Dockerfile from its folder, and return the image's name.

        What a .dockerignore in that folder excludes is left out. `network` is the network that RUN steps may use
        (default: the engine's choice).
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

        return self._build_once(folder.name, digest, f"what {dockerfile} makes", make)

    def from_root(self, rootfs: Path) -> str:
        """Build an image from a root file system (a folder or a tar archive of one), and return its name."""
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

        return self._build_once(rootfs.resolve().name.partition(".")[0], digest, f"the root file system {rootfs}", make)

    def with_packages(
        self, base: str, requirements: Sequence[str], *, python: str = "python3", network: str | None = None
    ) -> str:
        """Build an image of `base` plus packages that its own pip installs, and return the image's name.

        They come from the index that pip is configured to use in `base`.
        """
        digest = digest_of("packages", self._identity(base), python, *requirements)
        words = shlex.join([python, "-m", "pip", "install", "--no-cache-dir", "--no-input", *requirements])
        recipe = f"FROM {self._identity(base)}\nUSER 0\nRUN PIP_BREAK_SYSTEM_PACKAGES=1 {words}\n"

        def make(name: str, labels: Mapping[str, str]) -> Iterator[dict[str, Any]]:
            return self._build(recipe, (), name, labels, network)

        return self._build_once("packages", digest, f"{base} with {', '.join(requirements)}", make)

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
        """Build an image of `base` plus a source tree in `workdir`, as a git repository with a single commit.

        The repository belongs to `user`. `deps` is a folder of installed packages that is copied into the image and put
        first on its PYTHONPATH. `holds` describes the tree in words (default: its folder's name).
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

        return Image(name=self._build_once(holds, digest, f"{holds} in {workdir} on {base}", make), root=workdir)

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
        """Remove images, and return those that stay because containers use them."""
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
        """Return a PYTHONPATH that has the dependencies before the image's own entries."""
        with translate_errors("an image"):
            settings = (self._client.inspect_image(identity).get("Config") or {}).get("Env") or ()
        old = [value for name, _, value in (each.partition("=") for each in settings) if name == "PYTHONPATH" and value]
        return ":".join((DEPENDENCIES, *old))

    def _build_once(
        self,
        title: str,
        digest: str,
        holds: str,
        make: Callable[[str, Mapping[str, str]], Iterable[dict[str, Any]]],
    ) -> str:
        """Build the image of a digest unless it exists, and return its name. `make` yields the engine's events.

        Only one process at a time builds images with the same title.
        """
        slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "image"
        name = f"{OURS}{slug}:{digest[:24]}"
        if self.present(name):
            return name
        what = f"making the image {name} ({holds})"
        with file_lock(cache_dir() / "images" / slug):
            if self.present(name):  # another process was quicker
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
        """Build an image from a Dockerfile's text and `folders`, each under its name; yield the engine's events."""
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
    """Return an error that says why an image could not be pulled."""
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
    """Write a build context as a tar archive: the Dockerfile, and folders with all their contents."""
    with tarfile.open(fileobj=into, mode="w") as archive:
        member = tarfile.TarInfo("Dockerfile")
        member.size = len(recipe.encode())
        archive.addfile(member, io.BytesIO(recipe.encode()))
        for folder, inner in folders:
            archive.add(folder, arcname=inner)
