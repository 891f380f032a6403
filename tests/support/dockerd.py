"""A Docker daemon of the tests' own, and an image for it made of what this machine has.

    python tests/support/dockerd.py

tries whether one can be started here, and a container in it; the exit code is 77 where this machine does not let it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import docker

from turnstile.sandboxes.containers.provider import ContainerSandboxes, Isolation, PoolSize, Resources

IMAGE = "turnstile-test"
BARE = "turnstile-test-bare"  # without Python


ULIMITS = {"nofile": 16384, "nproc": 8192}  # what a machine without CAP_SYS_RESOURCE can set
PROGRAMS = (
    *("sh", "cat", "ls", "sleep", "wc", "ln", "touch", "env", "head", "tail", "tr", "dd", "rm", "mkdir", "kill", "mv"),
    *("setsid", "yes", "id", "true", "seq", "chmod", "df", "printf", "mount", "nohup"),
)
NO_ENGINE = "TURNSTILE_TESTS_NO_ENGINE"
"""The environment variable that says why an engine would not run here though it is installed."""
CANNOT = 77
LEFT_OUT = ("test", "site-packages", "idlelib", "tkinter", "ensurepip", "lib2to3", "turtledemo", "pydoc_data")


def make_containers(address: str, **knobs: Any) -> ContainerSandboxes:
    """A provider without spares; the knobs of its tables are given flat."""
    given: dict[str, Any] = {"daemon": address, "image": IMAGE, "ulimits": ULIMITS, "warm": 0, **knobs}
    for table, kind in (("resources", Resources), ("isolation", Isolation), ("pool", PoolSize)):
        given[table] = kind(**{field.name: given.pop(field.name) for field in fields(kind) if field.name in given})
    return ContainerSandboxes(**given)


def why_not() -> str | None:
    """Why no daemon can be started here; None when one can."""
    if not sys.platform.startswith("linux"):
        return "a Docker daemon of the tests' own runs on Linux alone"
    if shutil.which("dockerd") is None:
        return "dockerd is not installed (apt-get install docker.io)"
    if os.geteuid() != 0:
        return "starting dockerd takes root"
    return os.environ.get(NO_ENGINE) or None


class DidNotStartError(RuntimeError):
    """The daemon ended or did not answer."""


class Dockerd:
    """A daemon below one folder: its socket, its data, its log. It has no networks but `none` and `host`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"unix://{folder / 'docker.sock'}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        (self.folder / "docker.pid").unlink(missing_ok=True)
        command = ["dockerd", "--host", self.address, "--data-root", str(self.folder / "data")]
        command += ["--exec-root", str(self.folder / "exec"), "--pidfile", str(self.folder / "docker.pid")]
        command += ["--config-file", str(self.folder / "daemon.json")]
        (self.folder / "daemon.json").write_text('{"iptables": false, "ip6tables": false, "bridge": "none"}')
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 120
        while True:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise DidNotStartError(f"dockerd did not start: {(self.folder / 'log').read_text()[-2000:]}")
            with contextlib.suppress(OSError):
                knock(self.folder / "docker.sock")
                return
            time.sleep(0.1)

    def load(self) -> None:
        """Make both images."""
        with self.client() as client:
            for name, python in ((IMAGE, True), (BARE, False)):
                archive = self.folder / f"{name}.tar"
                write_root(archive, python)
                client.import_image(str(archive), repository=name)
                archive.unlink()

    def kill(self) -> None:
        """End it without a chance to clean up. Its containerd, which goes with it, is waited for."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        pid_file = self.folder / "exec" / "containerd" / "containerd.pid"
        pid = pid_file.read_text()
        deadline = time.monotonic() + 60
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        pid_file.unlink()

    def stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()

    def sweep(self) -> None:
        """End what a daemon that was killed left running, and unmount what it left mounted."""
        here = str(self.folder).encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if here in (entry / "cmdline").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
        mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for point in reversed(mounts):
            if point.startswith(f"{self.folder}/"):
                subprocess.run(["umount", "--lazy", point], check=False)

    @contextlib.contextmanager
    def client(self) -> Iterator[docker.APIClient]:
        client = docker.APIClient(base_url=self.address, timeout=120)
        try:
            yield client
        finally:
            client.close()

    def containers(self) -> list[str]:
        """The ids of all containers, also of those that do not run."""
        with self.client() as client:
            return sorted(found["Id"] for found in client.containers(all=True))

    def volumes(self) -> list[str]:
        with self.client() as client:
            return sorted(found["Name"] for found in client.volumes()["Volumes"] or [])

    def images(self) -> list[str]:
        with self.client() as client:
            return sorted(found["Id"] for found in client.images())


@contextlib.contextmanager
def dockerd() -> Iterator[Dockerd]:
    """A running daemon with both images."""
    folder = Path(tempfile.mkdtemp(prefix="turnstile-dockerd-"))
    daemon = Dockerd(folder)
    try:
        daemon.start()
        daemon.load()
        yield daemon
    finally:
        daemon.stop()
        daemon.sweep()
        shutil.rmtree(folder, ignore_errors=True)


def knock(path: Path) -> None:
    """Raises OSError if nothing listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.connect(str(path))


def write_root(
    archive: Path, python: bool, *, programs: Sequence[str] = (), more: Mapping[str, str | Path] = MappingProxyType({})
) -> None:
    """A root file system as an archive: a few programs and `programs`, this Python, the libraries of all, and `more`,
    which are files here by their path in it."""
    files: dict[str, str] = {path: str(here) for path, here in more.items()}  # path in the root -> path here
    for program in (*PROGRAMS, *programs):
        found = shutil.which(program)
        assert found is not None, program
        files[f"/usr/bin/{program}"] = os.path.realpath(found)
    links = {"/bin": "usr/bin", "/lib": "usr/lib", "/lib64": "usr/lib64"}
    if python:
        executable = os.path.realpath(sys.executable)
        stdlib = Path(sysconfig.get_paths()["stdlib"])
        files[executable] = executable
        links |= {"/usr/bin/python3": executable, "/usr/bin/python": executable}
        for folder, inner, names in os.walk(stdlib):
            inner[:] = [name for name in inner if name not in LEFT_OUT and not name.startswith("config-")]
            for name in names:
                path = os.path.join(folder, name)
                files[path] = os.path.realpath(path)
    linked = [here for path, here in files.items() if path.startswith("/usr/bin/") or path.endswith(".so")]
    for library in libraries([*linked, *([executable] if python else [])]):
        files[library.replace("/lib/", "/usr/lib/", 1) if library.startswith("/lib/") else library] = library
    with tarfile.open(archive, "w") as made:
        for folder in ("usr/bin", "usr/lib", "usr/lib64", "etc", "dev", "proc", "sys", "tmp"):
            member = tarfile.TarInfo(folder)
            member.type, member.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            made.addfile(member)
        for path, target in links.items():
            member = tarfile.TarInfo(path.lstrip("/"))
            member.type, member.linkname = tarfile.SYMTYPE, target
            made.addfile(member)
        for path, here in files.items():
            if path.startswith("/lib64/"):
                path = "/usr" + path
            made.add(os.path.realpath(here), arcname=path.lstrip("/"), recursive=False)


def libraries(programs: list[str]) -> set[str]:
    """The shared libraries that programs are linked with, as the linker finds them here."""
    done = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False)
    found = set()
    for line in done.stdout.splitlines():
        words = line.split()
        path = words[2] if "=>" in words and len(words) > 2 else words[0] if words else ""
        if path.startswith("/") and not path.endswith(":") and os.path.exists(path):
            found.add(path)
    return found


def trial() -> None:
    """Raises where no container can be run in a daemon that was started here."""
    with dockerd() as running:
        client = docker.DockerClient(base_url=running.address)
        try:
            limits = [docker.types.Ulimit(name=name, soft=most, hard=most) for name, most in ULIMITS.items()]
            client.containers.run(IMAGE, ["true"], remove=True, network_mode="none", ulimits=limits)
        finally:
            client.close()


if __name__ == "__main__":
    reason = why_not()
    if reason is not None:
        print(reason)
        sys.exit(CANNOT)
    try:
        trial()
    except (DidNotStartError, docker.errors.APIError, docker.errors.ContainerError) as error:
        print(f"dockerd runs no container here: {error}")
        sys.exit(CANNOT)
    print("dockerd starts here, and runs a container")
