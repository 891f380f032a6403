"""Sandboxes in containers: the tier for code that nobody trusts. Docker or Podman, through `daemon.Daemon`.

A container is started ahead of its use with a small program as its first process (`runner`), and every command and
file goes over the one stream attached to that: a few milliseconds each. The container ends when the stream does, so
also when this process is killed, and the daemon removes it then.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import logging
import os
import secrets
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, TypedDict

from turnstile.errors import ConfigError, ContainerDiedError, DiskFullError, OutOfMemoryError, SandboxError
from turnstile.sandboxes import runner
from turnstile.sandboxes.archive import pack_modules, pack_tree
from turnstile.sandboxes.base import ExecResult, Image, Limits, Template
from turnstile.sandboxes.channel import Channel, ChannelClosedError
from turnstile.sandboxes.daemon import Daemon, Spec
from turnstile.sandboxes.folder import Home, as_folder
from turnstile.sandboxes.forkserver import QUIET
from turnstile.sandboxes.images import Images
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
ALIVE = 5.0  # seconds for its answer before a container is handed out
GRACE = 30.0  # seconds past its own limit after which a silent container is given up
FILES = 300.0  # seconds for a file or an archive to go to and fro


class Container:
    """One running container and its runner: requests one at a time. A member of the pool."""

    def __init__(self, daemon: Daemon, identity: str, channel: Channel, spec: Spec) -> None:
        self.identity = identity
        self.spec = spec
        self._daemon = daemon
        self._channel = channel
        self._started = time.time()
        self._turn = asyncio.Lock()
        self._sending = asyncio.Lock()
        self._broken: SandboxError | None = None
        self._ended = False

    async def ask(
        self,
        request: Mapping[str, Any],
        data: IO[bytes] | None = None,
        *,
        seconds: float,
        into: IO[bytes] | None = None,
    ) -> tuple[dict[str, Any], bytes]:
        """One request and its answer; the data of all answers but the last go `into` a file.

        A cancelled caller cancels the command that runs. Raises SandboxError when the container is of no use any more,
        and the ValueError or OSError that the request met in it.
        """
        async with self._turn:
            if self._ended:
                raise SandboxError("the sandbox was closed")
            if self._broken is not None:
                raise self._broken
            asking = asyncio.ensure_future(self._converse(dict(request), data, into))
            try:
                async with asyncio.timeout(seconds):
                    answer, found = await asyncio.shield(asking)
            except TimeoutError:
                self._channel.shut()
                self._broken = ContainerDiedError(
                    f"container {self.identity[:12]} did not answer within {seconds:.0f} s"
                )
                await asyncio.gather(asking, return_exceptions=True)
                raise self._broken from None
            except asyncio.CancelledError:
                await self._cancel(asking)
                raise
            except ChannelClosedError:
                if self._ended:
                    raise SandboxError("the sandbox was closed while it was in use") from None
                self._broken = await self._daemon.call(self._daemon.fate, self.identity, self._started, self.said)
                raise self._broken from None
        check(answer, self.identity)
        return answer, found

    @property
    def said(self) -> str:
        """What the runner wrote to its standard error: nothing, unless it broke."""
        return self._channel.said.decode(errors="replace")

    async def alive(self) -> bool:
        try:
            await self.ask({"op": "ping"}, seconds=ALIVE)
        except SandboxError:
            return False
        return True

    async def commit(self) -> str:
        """An image of the files as they are between two requests."""
        async with self._turn:
            if self._ended:
                raise SandboxError("the sandbox was closed")
            return await self._daemon.call(self._daemon.commit, self.identity)

    def stop(self) -> None:
        """End what runs, and with it whoever waits for it; the container is still to be removed."""
        self._ended = True
        self._channel.shut()

    async def end(self) -> None:
        """Remove the container. One that the daemon cannot remove now is left to a sweep."""
        self.stop()
        try:
            await self._daemon.call(self._daemon.remove, self.identity)
        except SandboxError as error:
            _log.warning("a container is left behind for now (turnstile sandbox prune removes it): %s", error)
        finally:
            self._channel.close()

    async def _converse(
        self, request: dict[str, Any], data: IO[bytes] | None, into: IO[bytes] | None
    ) -> tuple[dict[str, Any], bytes]:
        async with self._sending:
            await self._channel.send(request, data)
        while True:
            answer, found = await self._channel.receive()
            if not answer.pop("more", False):
                return answer, found
            if into is not None:
                await asyncio.to_thread(into.write, found)

    async def _cancel(self, asking: asyncio.Future[tuple[dict[str, Any], bytes]]) -> None:
        """Let the request under way come to its end at once, so that the next answer belongs to the next request."""
        try:
            if not asking.done():
                async with self._sending:
                    await self._channel.send({"op": "cancel"})
        except ChannelClosedError:
            pass  # then it is at its end
        done, _ = await asyncio.wait([asking], timeout=GRACE)
        if not done:
            self._channel.shut()
            await asyncio.wait([asking])
        if asking.cancelled() or asking.exception() is not None:
            self._broken = ContainerDiedError(f"container {self.identity[:12]} ended while a command was cancelled")


def check(answer: Mapping[str, Any], identity: str) -> None:
    """Raise what a runner's answer says went wrong."""
    if "value" in answer:
        raise ValueError(answer["value"])
    if "gone" in answer:
        raise SandboxError(f"the sandbox in container {identity[:12]} is broken: {answer['gone']}")
    if "errno" in answer:
        raise OSError(answer["errno"], answer["text"])
    if "fault" in answer:
        raise SandboxError(f"container {identity[:12]} cannot do that: {answer['fault'].strip().splitlines()[-1]}")


class ContainerSandbox:
    """One container in use. Commands and paths start at `root`, a folder inside it."""

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
        """Run a command in the root, one at a time. `env` adds to the image's environment.

        Raises OutOfMemoryError and DiskFullError where the command used up the container's memory or disk.
        """
        if not argv:
            raise ValueError("an empty command")
        limits = limits or self._limits
        narrow = limits.memory_mb < self.container.spec.memory_mb  # otherwise it is the container that counts
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
                "sandbox.memory_mb"
            )
        if answer.pop("disk_full"):
            raise DiskFullError(f"{where} filled the disk of its sandbox; raise sandbox.disk_mb")
        return ExecResult(**answer)

    async def read(self, path: str) -> bytes:
        """A file's bytes. Raises ValueError outside the root, FileNotFoundError, IsADirectoryError."""
        _, data = await self._files({"op": "read", "path": path})
        return data

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a file, with its folders. Raises ValueError outside the root, DiskFullError."""
        await self._files({"op": "write", "path": path}, io.BytesIO(data))

    async def unpack(self, archive: IO[bytes]) -> None:
        """Put an archive's folders, files and links (`archive`) into the root, which must hold none of them."""
        await self._files({"op": "unpack"}, archive)

    async def export(self, into: IO[bytes]) -> None:
        """Write the root's folders, files and links into a file, as `unpack` takes them."""
        await self._files({"op": "pack"}, into=into)

    async def snapshot(self) -> Template:
        """The state of the files: an image where the root file system can be written, else an archive of the root,
        as nothing else could change but the scratch folder. Both are the provider's, and go with it."""
        try:
            if not self.container.spec.read_only:
                name = await self.container.commit()
                if self._carries:
                    self._provider.carrying.add(name)
                return Image(name=name, root=self.root)
            target = self._provider.home.new_snapshot()
            with target.open("wb") as file:
                await self.export(file)
            return target
        except OSError as error:
            raise SandboxError(f"no snapshot can be taken: {error}") from None

    async def close(self) -> None:
        """End what runs here. The container's removal goes on behind; the provider's `close` waits for it."""
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
            if error.errno in runner.NO_SPACE:
                raise DiskFullError(
                    f"the disk of container {self.container.identity[:12]} is full; raise sandbox.disk_mb ({error})"
                ) from None
            raise


class Named(TypedDict):
    """How an image is named; see `Images.base`."""

    image: str
    dockerfile: Path | None
    rootfs: Path | None


def named(image: str, dockerfile: Path | str | None, rootfs: Path | str | None) -> Named:
    """The image that a recipe names. Raises ConfigError where it names none."""
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


class ContainerSandboxes:
    """Private copies of a template in containers of an image, which needs Python 3.7 or newer and no network.

    The image is one of a registry, `image`, what a `dockerfile` makes of its folder, or `rootfs`, a folder or tar
    archive of a root file system; what is not there yet is pulled or made here (`images.Images`).

    A container may use `memory_mb`, `cpus`, `processes` and, where it can write, `disk_mb`: with `read_only` that is
    its root and its scratch folder, kept in memory and counting as such; without, its own layer, which `limit_layer`
    asks the storage driver to bound. It runs as `user`, without capabilities and without a network but the one named;
    `ulimits` sets what a daemon cannot raise on its own (nofile, nproc). `python` is the image's interpreter; commands
    can import the image's modules and, where a folder was started from, those that `carry` names, copied from this
    Python. `readable` folders of this machine can be read at the same place inside, where the engine is one of this
    machine. `limits` hold for commands that bring none: a command's own memory limit counts where it is below the
    container's.

    At most `most` containers are in use, `warm` more are ready, and `starts` start at once. They carry labels with
    `run` and with this process, so that a sweep finds those whose process is gone. `daemon` is a socket's address
    (default: DOCKER_HOST, or the usual sockets); `root` is where snapshots lie. Raises ConfigError when no daemon
    answers.
    """

    def __init__(
        self,
        *,
        image: str = "",
        dockerfile: Path | str | None = None,
        rootfs: Path | str | None = None,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        memory_mb: int = 2048,
        cpus: float = 1.0,
        processes: int = 256,
        disk_mb: int = 512,
        network: str = "none",
        user: str = "1000:1000",
        read_only: bool = True,
        limit_layer: bool = False,
        ulimits: Mapping[str, int] | None = None,
        python: str = "python3",
        carry: Sequence[str] = (),
        readable: Sequence[Path] = (),
        warm: int = 2,
        most: int = 64,
        starts: int = 4,
        run: str = "",
        daemon: str | None = None,
        root: Path | None = None,
    ) -> None:
        base = named(image, dockerfile, rootfs)
        self._carried = pack_modules(carry) if carry else b""
        self.carrying: set[str] = set()  # images of snapshots that hold what is carried
        self.daemon = Daemon(daemon, threads=starts + 2)
        self.images = Images(self.daemon)
        try:
            image = self.images.base(**base)
        except BaseException:
            self.daemon.close()
            raise
        self.home = Home(root)
        self.starts = starts
        self._limits = limits
        self._mine = {PROVIDER: secrets.token_hex(8)}
        self.spec = Spec(
            image=image,
            program=(python, "-I", "-S", "-B", "-X", "utf8", "-c", inspect.getsource(runner)),
            labels={**owner_labels(), **self._mine, RUN: run or self._mine[PROVIDER]},
            memory_mb=memory_mb,
            cpus=cpus,
            processes=processes,
            disk_mb=disk_mb,
            network=network,
            user=user,
            read_only=read_only,
            tmpfs=(TOP, SCRATCH) if read_only else (),
            folders=(TOP, SCRATCH),
            readable=tuple(str(Path(path).resolve()) for path in readable) if self.daemon.is_here else (),
            ulimits=dict(ulimits or {}),
            limit_layer=limit_layer and not read_only,
        )
        self._pool: Pool[Container] = Pool(
            lambda: self._launch(self.spec, WORK, carry=bool(carry)), warm=warm, most=most, starts=starts
        )
        self._open: set[ContainerSandbox] = set()
        self._going: set[asyncio.Task[None]] = set()
        self._starting: set[asyncio.Task[ContainerSandbox]] = set()
        self._swept = self._closing = False
        self._finalizer = weakref.finalize(self, _clear, self.daemon, self._mine, self.home, os.getpid())

    @property
    def spares(self) -> int:
        """How many containers are ready to be handed out."""
        return self._pool.ready

    async def start(self, template: Template) -> ContainerSandbox:
        """A container with a copy of a folder, or one of an image as it is, or of a snapshot.

        Raises SandboxError when there is no such template or no container can be had, ConfigError when none ever can.
        """
        if self._closing:
            raise SandboxError("these sandboxes were closed")
        starting = asyncio.ensure_future(self._start(template))
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)
        try:
            return await starting
        except asyncio.CancelledError:
            if self._closing:
                raise SandboxError("these sandboxes were closed while one was started") from None
            raise

    async def _start(self, template: Template) -> ContainerSandbox:
        if not self._swept:
            self._swept = True
            await self.daemon.call(self.daemon.sweep)
        if isinstance(template, Image):
            await self.daemon.call(self.images.pull, template.name)
            spec = replace(self.spec, image=template.name, read_only=False, tmpfs=())
            carries = template.name in self.carrying
            container = await self._pool.take(lambda: self._launch(spec, template.root, carry=carries))
            return self._opened(container, template.root, carries=carries)
        archive = await asyncio.to_thread(self._archive, template)
        with archive:
            sandbox = self._opened(await self._pool.take(), WORK, carries=bool(self._carried))
            try:
                await sandbox.unpack(archive)
            except BaseException:
                await sandbox.close()
                raise
        return sandbox

    async def settled(self) -> None:
        """Wait until the containers of closed sandboxes are removed."""
        await asyncio.gather(*self._going)

    async def close(self) -> None:
        """End every command, remove every container and every snapshot."""
        self._closing = True
        for starting in self._starting:
            starting.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        for sandbox in tuple(self._open):
            await sandbox.close()
        await self._pool.close()
        await self.settled()
        await asyncio.to_thread(self._finalizer)

    def discard(self, sandbox: ContainerSandbox) -> None:
        """Take a sandbox out of use, and see to its container's removal."""
        self._open.discard(sandbox)
        sandbox.container.stop()
        task = asyncio.ensure_future(self._end(sandbox.container))
        self._going.add(task)
        task.add_done_callback(self._going.discard)

    async def _end(self, container: Container) -> None:
        await container.end()
        self._pool.leave()

    def _opened(self, container: Container, root: str, *, carries: bool) -> ContainerSandbox:
        sandbox = ContainerSandbox(self, container, root=root, limits=self._limits, carries=carries)
        self._open.add(sandbox)
        return sandbox

    def _archive(self, template: Path) -> IO[bytes]:
        if template.is_file() and template.parent == self.home.path:
            return template.open("rb")
        return pack_tree(as_folder(template))

    async def _launch(self, spec: Spec, root: str, *, carry: bool = False) -> Container:
        """A container whose runner has answered. Nothing is left of one whose start was cancelled or failed."""
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
            folders = {"make": [WORK, CARRIED], "empty": [CARRIED]} if carry else {"make": [WORK], "empty": []}
            await container.ask({"op": "begin", "root": root, **folders}, seconds=BEGIN)
            if carry:
                await container.ask({"op": "unpack", "root": CARRIED}, io.BytesIO(self._carried), seconds=FILES)
        except BaseException as error:
            await container.end()
            if isinstance(error, OSError) or (isinstance(error, ContainerDiedError) and container.said):
                raise ConfigError(f"the image {spec.image} cannot be used as a sandbox: {error}") from None
            raise
        return container


def _clear(daemon: Daemon, labels: Mapping[str, str], home: Home, pid: int) -> None:
    """Remove what is left of a provider: at its close, when it is forgotten, and at the end of this process."""
    if os.getpid() != pid:
        return  # a fork of its process
    home.remove()
    try:
        daemon.clear(daemon.find(labels))
    except SandboxError as error:
        _log.warning("containers may be left behind (turnstile sandbox prune removes them): %s", error)
    daemon.close()
