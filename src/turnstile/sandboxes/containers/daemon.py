"""The container daemon (Docker, or Podman's Docker-compatible service), used through the `docker` SDK.

Every call blocks, so `Daemon.call` makes it in a thread. `translate_errors` turns the SDK's errors into typed ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import socket
import ssl
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from turnstile.errors import (
    ConfigError,
    ContainerDiedError,
    DaemonError,
    DiskFullError,
    MissingExtraError,
    OutOfMemoryError,
    SandboxError,
)
from turnstile.sandboxes.owner import PID, is_gone

try:
    import docker
    import docker.errors
    import docker.types
    import docker.utils
    import requests.exceptions

    from turnstile.sandboxes.containers.connections import Client
except ModuleNotFoundError as error:
    raise MissingExtraError("sandbox kind 'container'", "container") from error

T = TypeVar("T")
TIMEOUT = 120.0  # seconds for one call
UNIX = "unix://"
AGAIN = 2.0  # seconds after which a removal is requested again
ENDING = (409, 500)  # status codes of Docker and Podman for a container that is just ending
GOING = 30.0  # seconds within which a container must be gone after its removal began
NEEDED = "sandbox kind 'container' needs a running Docker or Podman"
ADVICE = "start one (systemctl start docker, or podman system service), or name its socket in DOCKER_HOST"


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """The specification of a container.

    Memory and disk are in MiB; `disk_mb` bounds each folder of `tmpfs` and, with `limit_layer`, the container's
    writable layer. With `read_only` only the folders of `tmpfs` are writable. Otherwise `folders` are created, writable
    for every user.
    """

    image: str
    program: tuple[str, ...]
    labels: Mapping[str, str]
    memory_mb: int
    cpus: float
    processes: int
    disk_mb: int
    network: str
    user: str
    read_only: bool
    tmpfs: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()  # folders of the engine's machine, mounted at the same path
    ulimits: Mapping[str, int] = field(default_factory=dict)
    limit_layer: bool = False  # bound the writable layer too; only some storage drivers can


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftovers:
    """The ids of containers and images, and the names of volumes, that Turnstile created in a daemon."""

    containers: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.containers) + len(self.images) + len(self.volumes)


class Daemon:
    """A connection to the daemon at `address` (default: DOCKER_HOST, or the first usual socket that exists).

    At most `threads` calls run at once. Raises ConfigError if no daemon answers.
    """

    def __init__(self, address: str | None = None, *, threads: int = 16) -> None:
        named = os.environ.get("DOCKER_HOST")
        found = address or named or find_socket()
        if found is None:
            raise ConfigError(f"{NEEDED}, and there is no socket of one in the usual places; {ADVICE}")
        self.address = found
        self._threads = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="turnstile-daemon")
        try:
            given = docker.utils.kwargs_from_env() if self.address == named else {"base_url": self.address}
            self.client = Client(**given, version="auto", timeout=TIMEOUT, max_pool_size=threads)
        except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
            self._threads.shutdown(wait=False)
            raise ConfigError(f"{NEEDED}, and none answers at {self.address} ({short(error)}); {ADVICE}") from None

    @property
    def is_here(self) -> bool:
        """Whether the address is a Unix socket, so that the daemon runs on this machine and sees the same folders."""
        return self.address.startswith(UNIX)

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a blocking function in a thread and return its result.

        The function runs to its end even if the caller is cancelled.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def version(self) -> str:
        with translate_errors("its version"):
            found = self.client.version()
            platform = (found.get("Platform") or {}).get("Name") or (found.get("Components") or [{}])[0].get("Name", "")
            return f"{platform} {found['Version']}".strip()

    def launch(self, spec: Spec) -> tuple[str, socket.socket]:
        """Create a container, attach to it and start it; return its id and the stream of its first process.

        Raises ConfigError if no start can succeed (no such image, no such program, limits that cannot be set).
        """
        with translate_errors(f"a container of {spec.image}"):
            identity: str = self.create(spec)
            attached = None
            try:
                if spec.folders and not spec.read_only:
                    self.client.put_archive(identity, "/", empty_dirs_tar(spec.folders))
                attached = self.client.attach_socket(
                    identity, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
                )
                self.client.start(identity)
            except BaseException:
                if attached is not None:
                    own(attached).close()
                with contextlib.suppress(SandboxError):  # the first error is the one to raise
                    self.remove(identity)
                raise
            return identity, own(attached)

    def create(self, spec: Spec) -> str:
        """Create a container without starting it, and return its id.

        The container is removed by `remove`, or by the daemon when its first process ends.
        """
        client = self.client
        options = f"rw,exec,nosuid,nodev,mode=1777,size={spec.disk_mb}m"
        host = client.create_host_config(
            auto_remove=True,  # when its first process ends, as it does when this process ends
            init=False,  # the runner must be the first process, so that nothing inside can kill it
            network_mode=spec.network,
            read_only=spec.read_only,
            tmpfs=dict.fromkeys(spec.tmpfs, options) or None,
            mounts=[docker.types.Mount(path, path, type="bind", read_only=True) for path in spec.readable] or None,
            mem_limit=f"{spec.memory_mb}m",
            memswap_limit=f"{spec.memory_mb}m",
            nano_cpus=int(spec.cpus * 1e9),
            pids_limit=spec.processes + 1,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            ulimits=[docker.types.Ulimit(name=name, soft=limit, hard=limit) for name, limit in spec.ulimits.items()],
            log_config=docker.types.LogConfig(type="none"),  # the attached stream is not a log
            storage_opt={"size": f"{spec.disk_mb}m"} if spec.limit_layer else None,
        )
        made = client.create_container(
            image=spec.image,
            command=[],
            entrypoint=list(spec.program),
            user=spec.user,
            working_dir="/",
            stdin_open=True,
            labels=dict(spec.labels),
            host_config=host,
            healthcheck={"test": ["NONE"]},
            stop_signal="SIGKILL",  # the first process of a container may ignore any other signal
        )
        identity: str = made["Id"]
        return identity

    def remove(self, identity: str) -> None:
        """Kill a container and remove it with its unnamed volumes; a missing container is not an error.

        Raises DaemonError if the container is still there after a while.
        """
        with translate_errors("a container's removal"):
            deadline = time.monotonic() + GOING
            while not self._request_removal(identity):
                again = time.monotonic() + AGAIN
                while time.monotonic() < again:
                    if not self._exists(identity):
                        return
                    time.sleep(0.02)
                if time.monotonic() > deadline:
                    raise DaemonError(f"container {identity[:12]} is still there {GOING:.0f} s after its removal began")

    def _request_removal(self, identity: str) -> bool:
        """Request a removal; return False if the engine is already removing the container because its stream ended."""
        try:
            self.client.remove_container(identity, v=True, force=True)
        except docker.errors.NotFound:
            return True
        except docker.errors.APIError as error:
            if error.status_code not in ENDING:
                raise
            return False
        return True

    def _exists(self, identity: str) -> bool:
        try:
            self.client.inspect_container(identity)
        except docker.errors.NotFound:
            return False
        return True

    def commit(self, identity: str) -> str:
        """Create an image of a container's files, with the container's labels, and return the image's id."""
        with translate_errors("a snapshot"):
            image: str = self.client.commit(identity, pause=False)["Id"]
            return image

    def fate(self, identity: str, since: float, last_output: str) -> SandboxError:
        """Return an error that says why a container ended.

        `since` is when it started (seconds since the epoch), and `last_output` is what its runner wrote to standard
        error.
        """
        short_id = identity[:12]
        try:
            with translate_errors("a container's state"):
                state = self._state(identity, since)
        except SandboxError as error:
            return error
        if state["oom"]:
            return OutOfMemoryError(
                f"container {short_id} ran out of memory and was killed; raise sandbox.resources.memory_mb"
            )
        last = last_output.strip().splitlines()[-1:]
        why = f": {last[0]}" if last else f" with exit code {state['code']}" if state["code"] is not None else ""
        return ContainerDiedError(f"container {short_id} ended while it was in use{why}")

    def _state(self, identity: str, since: float) -> dict[str, Any]:
        try:
            found = self.client.inspect_container(identity)["State"]
            if not found.get("Running"):
                return {"oom": bool(found.get("OOMKilled")), "code": found.get("ExitCode")}
        except docker.errors.NotFound:
            pass  # it is removed when it ends, but the daemon remembers its last events
        wanted = {"container": [identity], "type": ["container"]}
        answer = self.client.get(
            f"{self.client.base_url}/v{self.client.api_version}/events",
            params={"since": int(since) - 1, "until": int(time.time()) + 1, "filters": json.dumps(wanted)},
            timeout=TIMEOUT,
        )
        answer.raise_for_status()
        seen = [json.loads(line) for line in answer.text.splitlines()]
        codes = [event["Actor"]["Attributes"].get("exitCode") for event in seen if event["Action"] in ("die", "died")]
        return {"oom": any(event["Action"] == "oom" for event in seen), "code": codes[-1] if codes else None}

    def find(self, wanted: Mapping[str, str] | None = None, *, everybodys: bool = False) -> Leftovers:
        """Return the objects that Turnstile created in this daemon and that have the labels `wanted`.

        Without `wanted`, return those whose owner on this machine has ended, or with `everybodys` all of them.
        """
        labels = [f"{name}={value}" for name, value in (wanted or {}).items()] or [PID]
        filters = {"label": labels}

        def ours(labels: Mapping[str, str] | None) -> bool:
            return wanted is not None or everybodys or is_gone(labels or {})

        with translate_errors("a list of containers"):
            containers = self.client.containers(all=True, filters=filters)
            images = self.client.images(filters=filters)
            volumes = self.client.volumes(filters=filters).get("Volumes") or []
        return Leftovers(
            containers=tuple(found["Id"] for found in containers if ours(found.get("Labels"))),
            images=tuple(found["Id"] for found in images if ours(found.get("Labels"))),
            volumes=tuple(found["Name"] for found in volumes if ours(found.get("Labels"))),
        )

    def remove_all(self, leftovers: Leftovers) -> None:
        """Remove these leftovers; missing ones are not an error."""
        for identity in leftovers.containers:
            self.remove(identity)
        with translate_errors("a removal"):
            for image in leftovers.images:
                with contextlib.suppress(docker.errors.NotFound):
                    self.client.remove_image(image, force=True)
            for volume in leftovers.volumes:
                with contextlib.suppress(docker.errors.NotFound):
                    self.client.remove_volume(volume, force=True)

    def sweep(self) -> Leftovers:
        """Remove what dead processes of this machine left behind, and return it."""
        found = self.find()
        self.remove_all(found)
        return found

    def close(self) -> None:
        self._threads.shutdown(wait=False)
        self.client.close()


def own(attached: Any) -> socket.socket:
    """Return the socket of an attached stream, without the HTTP response in which the SDK wraps it."""
    inner = getattr(attached, "_sock", attached)
    if not isinstance(inner, socket.socket) or isinstance(inner, ssl.SSLSocket):
        found: socket.socket = inner  # encrypted or tunnelled, so used as it is
        return found
    mine = socket.socket(fileno=os.dup(inner.fileno()))
    inner.close()
    attached.close()
    mine.setblocking(False)
    return mine


def find_socket() -> str | None:
    """Return the address of the first usual socket that this process may open, or None if there is none."""
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
    usual = (
        Path("/var/run/docker.sock"),
        runtime / "docker.sock",
        Path.home() / ".docker" / "run" / "docker.sock",
        runtime / "podman" / "podman.sock",
        Path("/run/podman/podman.sock"),
    )
    for path in usual:
        if path.is_socket() and os.access(path, os.R_OK | os.W_OK):
            return f"unix://{path}"
    return None


def empty_dirs_tar(names: tuple[str, ...]) -> bytes:
    """Return a tar archive of empty folders that every user may write to."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name in names:
            member = tarfile.TarInfo(name.strip("/"))
            member.type, member.mode, member.mtime = tarfile.DIRTYPE, 0o1777, int(time.time())
            archive.addfile(member)
    return made.getvalue()


@contextlib.contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Raise the SDK's errors as errors of this project; their messages begin with `what`."""
    try:
        yield
    except docker.errors.ImageNotFound as error:
        raise ConfigError(f"{what}: the daemon has no such image; get it with: docker pull ({short(error)})") from None
    except docker.errors.NotFound as error:
        raise ContainerDiedError(f"{what}: {short(error)}") from None
    except docker.errors.APIError as error:
        raise error_for(what, short(error)) from None
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
        raise DaemonError(f"{what}: the daemon does not answer ({short(error)})") from None


def error_for(what: str, text: str) -> ConfigError | SandboxError:
    """Return the typed error for a refusal of the daemon, chosen by its text."""
    lowered = text.lower()
    if "no space left" in lowered or "disk quota" in lowered:
        return DiskFullError(f"{what}: the daemon's disk is full ({text})")
    if "rlimit" in lowered:
        remedy = "sandbox.resources.ulimits = { nofile = 16384, nproc = 8192 }"
        return ConfigError(f"{what}: this machine sets no such limits; try {remedy} ({text})")
    if "unable to find user" in lowered or "no matching entries in passwd" in lowered:
        return ConfigError(
            f"{what}: the image does not know that user; give its number in sandbox.isolation.user ({text})"
        )
    if "storage-opt" in lowered or "storage opt" in lowered:
        return ConfigError(
            f"{what}: its storage driver cannot limit a container's disk; sandbox.resources.limit_layer = false"
        )
    if "bind source path does not exist" in lowered or "mounts denied" in lowered:
        return ConfigError(
            f"{what}: the engine does not see a folder of this machine; set sandbox.readable = [] ({text})"
        )
    if "executable file not found" in lowered or "no such file or directory" in lowered:
        return ConfigError(
            f"{what}: the image has no such Python; use an image with Python 3.7 or newer, or say where it is with "
            f"sandbox.python ({text})"
        )
    return DaemonError(f"{what}: {text}")


def short(error: Exception) -> str:
    """Return the last line (at most 400 characters) of the daemon's explanation of an error.

    Without an explanation, use the message of the OSError that caused the error, else that of the error itself.
    """
    text = getattr(error, "explanation", None)
    below: BaseException | None = error
    while not text and below is not None:
        if isinstance(below, OSError) and not isinstance(below, requests.exceptions.RequestException):
            text = str(below) if below.filename else below.strerror or str(below)
        below = below.__cause__ or (None if below.__suppress_context__ else below.__context__)
    lines = str(text or error).strip().splitlines()
    return lines[-1][-400:] if lines else type(error).__name__
