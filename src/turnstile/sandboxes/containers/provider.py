"""Sandboxes in containers, for untrusted code. Docker or Podman runs them, through `daemon.Daemon`.

A container is started before it is needed, with a small program (`runner`) as its first process. Every command and file
goes over the stream attached to that process, in a few milliseconds. The container ends when the stream does, and so
also when this process is killed; the daemon then removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import logging
import os
import secrets
import signal
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, TypedDict

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from turnstile.errors import ConfigError, ContainerDiedError, DiskFullError, OutOfMemoryError, SandboxError
from turnstile.sandboxes.archive import pack_modules, pack_tree
from turnstile.sandboxes.base import ExecResult, Image, Limits, Template
from turnstile.sandboxes.containers.channel import Channel
from turnstile.sandboxes.containers.container import GRACE, Container
from turnstile.sandboxes.containers.daemon import Daemon, Spec
from turnstile.sandboxes.containers.images import Images
from turnstile.sandboxes.containers.program import program
from turnstile.sandboxes.folder import Home, as_folder, both_names, on_shelf
from turnstile.sandboxes.forkserver import QUIET
from turnstile.sandboxes.owner import owner_labels
from turnstile.sandboxes.pool import Pool

_log = logging.getLogger(__name__)

RUN = "turnstile.run"
PROVIDER = "turnstile.provider"
TOP = "/sandbox"
WORK = f"{TOP}/work"
CARRIED = f"{TOP}/carried"
SCRATCH = "/tmp"
BEGIN = 60.0  # seconds for the runner's first answer
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
FILES = 300.0  # seconds for the transfer of a file or an archive


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """The kind of a container: its spec, its root folder, and whether it holds the modules of `carry`."""

    spec: Spec
    root: str
    carries: bool


class ContainerSandbox:
    """A container in use. Commands run in its folder `root`, and paths are relative to that folder."""

    def __init__(
        self, provider: ContainerSandboxes, container: Container, *, root: str, limits: Limits, carries: bool
    ) -> None:
        self.container = container
        self.root = root
        self._provider = provider
        self._limits = limits
        self._carries = carries
        self._closed = False

    async def exec(
        self, argv: Sequence[str], *, limits: Limits | None = None, env: Mapping[str, str] | None = None
    ) -> ExecResult:
        """Run a command in the root, one at a time. `env` is added to the image's environment.

        Raises OutOfMemoryError or DiskFullError if the command used up the container's memory or disk, and SandboxError
        if it cannot be started.
        """
        if not argv:
            raise ValueError("an empty command")
        limits = limits or self._limits
        narrow = (
            limits.memory_mb < self.container.spec.memory_mb
        )  # otherwise the container's limit is the one that matters
        request = {
            "op": "exec",
            "argv": list(argv),
            "cwd": self.root,
            "env": self._environment(env or {}),
            "limits": {
                "seconds": limits.seconds,
                "cpu_seconds": limits.cpu_seconds,
                "processes": limits.processes,
                "file_mb": limits.file_mb,
                "output_chars": limits.output_chars,
                "address_mb": limits.memory_mb if narrow else 0,
            },
            "disks": [self.root, SCRATCH],
        }
        where = f"{argv[0]!r} in container {self.container.identity[:12]}"
        try:
            answer, _ = await self.container.ask(request, seconds=limits.seconds + GRACE)
        except OSError as error:
            raise SandboxError(f"{where} cannot be started: {error}") from None
        if answer.pop("out_of_memory"):
            raise OutOfMemoryError(
                f"{where} used up the {self.container.spec.memory_mb} MiB of its sandbox and was killed; raise "
                "sandbox.resources.memory_mb"
            )
        if answer.pop("disk_full"):
            raise DiskFullError(f"{where} filled the disk of its sandbox; raise sandbox.resources.disk_mb")
        return ExecResult(**answer)

    async def read(self, path: str) -> bytes:
        """Return a file's bytes.

        Raises FileNotFoundError, IsADirectoryError, and ValueError if the path leaves the root or is not a plain file.
        """
        _, data = await self._files({"op": "read", "path": path})
        return data

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a file, and create its folders if needed.

        Raises ValueError if the path leaves the root, and DiskFullError if there is no space.
        """
        await self._files({"op": "write", "path": path}, io.BytesIO(data))

    async def unpack(self, archive: IO[bytes]) -> None:
        """Unpack an archive (see `sandboxes.archive`) into the root, which must hold none of its files and links."""
        await self._files({"op": "unpack"}, archive)

    async def export(self, into: IO[bytes]) -> None:
        """Write the root's folders, files and links to `into`, as an archive that `unpack` accepts."""
        await self._files({"op": "pack"}, into=into)

    async def snapshot(self) -> Template:
        """Return the current state of the files as a template, which the provider deletes when it closes.

        The template is an image if the root file system is writable. Otherwise it is an archive of the root, since
        nothing else but the scratch folder can have changed.
        """
        try:
            if not self.container.spec.read_only:
                name = await self.container.commit()
                self._provider.snapshots[name] = self._carries
                return Image(name=name, root=self.root)
            target = self._provider.home.new_snapshot()
            with target.open("wb") as file:
                await self.export(file)
            return target
        except OSError as error:
            raise SandboxError(f"no snapshot can be taken: {error}") from None

    async def close(self) -> None:
        """End the sandbox's commands and start removing its container. The provider's `close` waits for that."""
        if not self._closed:
            self._closed = True
            self._provider.discard(self)

    def _environment(self, given: Mapping[str, str]) -> dict[str, str]:
        found = {**QUIET, "HOME": SCRATCH, "TMPDIR": SCRATCH, **given}
        if self._carries:
            found["PYTHONPATH"] = ":".join(filter(None, (found.get("PYTHONPATH"), CARRIED)))
        return found

    async def _files(
        self, request: dict[str, Any], data: IO[bytes] | None = None, into: IO[bytes] | None = None
    ) -> tuple[dict[str, Any], bytes]:
        try:
            return await self.container.ask({**request, "root": self.root}, data, seconds=FILES, into=into)
        except OSError as error:
            if error.errno in NO_SPACE:
                raise DiskFullError(
                    f"the disk of container {self.container.identity[:12]} is full; raise "
                    f"sandbox.resources.disk_mb ({error})"
                ) from None
            raise


class Named(TypedDict):
    """The options that name an image (see `Images.base`)."""

    image: str
    dockerfile: Path | None
    rootfs: Path | None


def named_image(image: str, dockerfile: Path | str | None, rootfs: Path | str | None) -> Named:
    """Return the options that name a recipe's image. Raises ConfigError if the recipe names none."""
    if not image and not dockerfile and not rootfs:
        raise ConfigError(
            "sandbox kind 'container' needs an image: sandbox = { kind = \"container\", image = NAME }, or "
            "dockerfile = PATH, or rootfs = FOLDER_OR_TAR"
        )
    return Named(
        image=image,
        dockerfile=Path(dockerfile) if dockerfile else None,
        rootfs=Path(rootfs) if rootfs else None,
    )


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Make an interrupt from the terminal end blocking calls in this block at once.

    Without this, `asyncio.run` holds the first interrupt back until its loop continues.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What one container may use, with memory and disk in MiB.

    With `Isolation.read_only`, `disk_mb` bounds the root and the scratch folder separately; both are kept in memory and
    count towards `memory_mb`. Otherwise it bounds the container's own layer, if `limit_layer` asks the storage driver
    for that. `ulimits` replaces default limits of the engine that its machine cannot set (nofile, nproc).
    """

    memory_mb: PositiveInt = 2048
    cpus: PositiveFloat = 1.0
    processes: PositiveInt = 256
    disk_mb: PositiveInt = 512
    limit_layer: bool = False
    ulimits: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Isolation:
    """The network and user of a container, and whether only its root and its scratch folder are writable."""

    network: str = "none"
    user: str = "1000:1000"
    read_only: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSize:
    """The numbers of containers: `warm` are kept ready, at most `most` are in use, and `starts` start at once."""

    warm: NonNegativeInt = 2
    most: PositiveInt = 64
    starts: PositiveInt = 4


class ContainerSandboxes:
    """A provider of private copies of a template in containers of an image, which needs only Python 3.7 or newer.

    The image is `image` from a registry, or is built from a `dockerfile` and its folder, or from `rootfs` (a folder or
    tar archive of a root file system). An image that the engine lacks is pulled or built (`images.Images`).

    A container has its `resources` and `isolation`, and no capabilities. `python` is the image's interpreter. Commands
    can import the image's modules and, in a sandbox started from a folder, the modules that `carry` names, copied from
    this Python. If the engine runs on this machine, commands can read the folders of `readable` and the folder of
    `shelf` that `start` gets as `deps`, each at its own path. `limits` apply to commands without their own; a command's
    own memory limit only counts if it is below the container's.

    `start` pulls an image that the engine lacks only if `pull` names it or is None.

    `pool` sets the numbers of containers. Their labels hold `run` and identify this process, so that a sweep finds
    those whose process has ended. `daemon` is a socket's address (default: DOCKER_HOST, or the usual sockets). Raises
    ConfigError if no daemon answers.
    """

    def __init__(  # noqa: PLR0913 - the keys of a section
        self,
        *,
        image: str = "",
        dockerfile: Path | str | None = None,
        rootfs: Path | str | None = None,
        python: str = "python3",
        resources: Resources = Resources(),
        isolation: Isolation = Isolation(),
        pool: PoolSize = PoolSize(),
        limits: Limits = Limits(),  # noqa: B008 - frozen
        carry: Sequence[str] = (),
        readable: Sequence[Path] = (),
        shelf: Path | None = None,
        pull: Sequence[str] | None = None,
        run: str = "",
        daemon: str | None = None,
    ) -> None:
        base = named_image(image, dockerfile, rootfs)
        self._carried = pack_modules(carry) if carry else b""
        self.snapshots: dict[str, bool] = {}  # images of snapshots, and whether they hold the modules of `carry`
        self.daemon = Daemon(daemon, threads=pool.starts + 2)
        self.images = Images(self.daemon)
        try:
            with interruptible():
                image = self.images.base(**base)
        except BaseException:
            self.daemon.close()
            raise
        self.home = Home(None)
        self._pull = None if pull is None else frozenset(pull)
        self._limits = limits
        self._own_labels = {PROVIDER: secrets.token_hex(8)}
        self.spec = Spec(
            image=image,
            program=(python, "-I", "-S", "-B", "-X", "utf8", "-c", program()),
            labels={**owner_labels(), **self._own_labels, RUN: run or self._own_labels[PROVIDER]},
            memory_mb=resources.memory_mb,
            cpus=resources.cpus,
            processes=resources.processes,
            disk_mb=resources.disk_mb,
            network=isolation.network,
            user=isolation.user,
            read_only=isolation.read_only,
            tmpfs=(TOP, SCRATCH) if isolation.read_only else (),
            folders=(TOP, SCRATCH),
            readable=both_names(map(Path, readable)) if self.daemon.is_here else (),
            ulimits=dict(resources.ulimits),
            limit_layer=resources.limit_layer and not isolation.read_only,
        )
        self._shelf = Path(shelf) if shelf is not None and self.daemon.is_here else None
        self._pool: Pool[Made, Container] = Pool(self._launch, warm=pool.warm, most=pool.most, starts=pool.starts)
        self._open: set[ContainerSandbox] = set()
        self._removing: set[asyncio.Task[None]] = set()
        self._starting: set[asyncio.Task[ContainerSandbox]] = set()
        self._swept = self._closing = False
        self._finalizer = weakref.finalize(self, _clear, self.daemon, self._own_labels, self.home, os.getpid())

    @property
    def spares(self) -> int:
        """The number of containers that are ready now."""
        return self._pool.ready

    async def start(self, template: Template, *, deps: Path | None = None) -> ContainerSandbox:
        """Start a sandbox with a copy of a folder, with an unchanged image, or from a snapshot.

        Raises SandboxError if there is no such template or no container is available, and ConfigError if none ever can
        be.
        """
        if self._closing:
            raise SandboxError("these sandboxes were closed")
        starting = asyncio.ensure_future(self._start(template, on_shelf(deps, self._shelf)))
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)
        try:
            return await starting
        except asyncio.CancelledError:
            if self._closing:
                raise SandboxError("these sandboxes were closed while one was started") from None
            raise

    async def _start(self, template: Template, deps: Path | None) -> ContainerSandbox:
        if not self._swept:
            self._swept = True
            await self.daemon.call(self.daemon.sweep)
        spec = self.spec
        if deps is not None:
            spec = replace(spec, readable=(*spec.readable, *both_names([deps])))
        if isinstance(template, Image):
            await self.daemon.call(self._ensure_image, template.name)
            spec = replace(spec, image=template.name, read_only=False, tmpfs=())
            made = Made(spec=spec, root=template.root, carries=self.snapshots.get(template.name, False))
            return self._open_sandbox(await self._pool.take(made, spares=False), made)
        archive = await asyncio.to_thread(self._archive, template)
        with archive:
            made = Made(spec=spec, root=WORK, carries=bool(self._carried))
            sandbox = self._open_sandbox(await self._pool.take(made), made)
            try:
                await sandbox.unpack(archive)
            except BaseException:
                await sandbox.close()
                raise
        return sandbox

    async def wait_for_removals(self) -> None:
        """Wait until the containers of closed sandboxes are removed."""
        await asyncio.gather(*self._removing)

    async def close(self) -> None:
        """End all commands, and remove all containers and snapshots."""
        self._closing = True
        for starting in self._starting:
            starting.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        for sandbox in tuple(self._open):
            await sandbox.close()
        await self._pool.close()
        await self.wait_for_removals()
        await asyncio.to_thread(self._finalizer)

    def discard(self, sandbox: ContainerSandbox) -> None:
        """Take a sandbox out of use and start removing its container."""
        self._open.discard(sandbox)
        sandbox.container.stop()
        task = asyncio.ensure_future(self._end(sandbox.container))
        self._removing.add(task)
        task.add_done_callback(self._removing.discard)

    async def _end(self, container: Container) -> None:
        await container.end()
        self._pool.leave()

    def _open_sandbox(self, container: Container, made: Made) -> ContainerSandbox:
        sandbox = ContainerSandbox(self, container, root=made.root, limits=self._limits, carries=made.carries)
        self._open.add(sandbox)
        return sandbox

    def _ensure_image(self, name: str) -> None:
        """Make sure that the engine has an image. Raises ConfigError if it does not and may not pull it."""
        if self._pull is None or name in self._pull:
            self.images.pull(name)
        elif not self.images.present(name):
            raise ConfigError(
                f"the engine does not have the image {name}, and may not pull it (sandbox.pull); docker pull it there, "
                f"or start turnstile sandbox serve with --image {name}, or --pull for any"
            )

    def _archive(self, template: Path) -> IO[bytes]:
        if template.is_file() and template.parent == self.home.path:
            return template.open("rb")
        return pack_tree(as_folder(template))

    async def _launch(self, made: Made) -> Container:
        """Start a container and wait for its runner. If that fails or is cancelled, remove the container."""
        spec = made.spec
        launching = asyncio.ensure_future(self.daemon.call(self.daemon.launch, spec))
        try:
            identity, attached = await asyncio.shield(launching)
        except asyncio.CancelledError:
            await asyncio.wait([launching])
            if launching.exception() is None:
                identity, attached = launching.result()
                await Container(self.daemon, identity, Channel(attached), spec).end()
            raise
        container = Container(self.daemon, identity, Channel(attached), spec)
        try:
            folders = {"make": [WORK, CARRIED], "empty": [CARRIED]} if made.carries else {"make": [WORK], "empty": []}
            await container.ask({"op": "begin", "root": made.root, **folders}, seconds=BEGIN)
            if made.carries:
                await container.ask({"op": "unpack", "root": CARRIED}, io.BytesIO(self._carried), seconds=FILES)
        except BaseException as error:
            await container.end()
            if spec.image in self.snapshots:
                if isinstance(error, OSError):  # caused by what a command did to the files, not by the recipe
                    raise SandboxError(f"the snapshot {spec.image} cannot be started: {error}") from None
            elif isinstance(error, OSError) or (isinstance(error, ContainerDiedError) and container.stderr_end):
                raise ConfigError(f"the image {spec.image} cannot be used as a sandbox: {error}") from None
            raise
        return container


def _clear(daemon: Daemon, labels: Mapping[str, str], home: Home, pid: int) -> None:
    """Remove what is left of a provider when it closes, when it is garbage-collected or when its process ends."""
    if os.getpid() != pid:
        return  # a fork of its process
    home.remove()
    try:
        daemon.remove_all(daemon.find(labels))
    except SandboxError as error:
        _log.warning("containers may be left behind (turnstile sandbox prune removes them): %s", error)
    daemon.close()
