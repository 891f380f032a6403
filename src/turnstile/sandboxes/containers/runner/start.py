"""Starting commands without copying this process, which takes a fifth of the time of `os.fork`.

A command's limits are therefore set a moment after it starts; the container's limits apply from the start.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import resource
import signal

TYPE_CHECKING = False  # importing typing would take a tenth of a start
if TYPE_CHECKING:
    from typing import Any


HANDLED = [getattr(signal, name) for name in ("SIGPIPE", "SIGXFSZ") if hasattr(signal, name)]
"""Signals that Python ignores and commands must not."""
OWN = dict(os.environ)  # a copy, since os.environ decodes a variable at each access
can_spawn = hasattr(os, "posix_spawn")  # since Python 3.8; `launch` clears it if the C library is too old


def spawn(request: dict[str, Any], out: int, err: int) -> int | None:
    """Start the command in its own session and return its process id.

    If it cannot be run, write why to `err` and return None.
    """
    argv = request["argv"]
    try:
        pid = launch(argv, request["cwd"], environment(request["env"]), out, err)
    except (OSError, ValueError) as error:  # not found, not executable, or with text that cannot be passed on
        reason = error.strerror if isinstance(error, OSError) else str(error)
        os.write(err, f"{argv[0]}: {reason}\n".encode(errors="replace"))
        return None
    limits = request["limits"]
    cpu = max(1, int(-(-limits["cpu_seconds"] // 1)))
    with contextlib.suppress(ProcessLookupError):
        cap(pid, resource.RLIMIT_CPU, cpu, cpu + 2)
        cap(pid, resource.RLIMIT_FSIZE, limits["file_mb"] << 20)
        cap(pid, resource.RLIMIT_CORE, 0)
        if limits["address_mb"]:
            cap(pid, resource.RLIMIT_AS, limits["address_mb"] << 20)
    with contextlib.suppress(OSError):
        score = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY)
        try:
            os.write(score, b"1000")  # if memory runs out, the kernel kills the command and not the runner
        finally:
            os.close(score)
    return pid


def launch(argv: list[str], cwd: str, env: dict[str, str], out: int, err: int) -> int:
    """Start the command and return its process id. Raises OSError or ValueError if it cannot be run."""
    global can_spawn
    os.chdir(cwd)
    if can_spawn:
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, out, 1),
            (os.POSIX_SPAWN_DUP2, err, 2),
        ]  # no other open file is inherited
        program = find(argv[0], env.get("PATH", os.defpath))
        try:
            return os.posix_spawn(program, argv, env, file_actions=actions, setsid=True, setsigdef=HANDLED)
        except NotImplementedError:  # the C library cannot start a session this way
            can_spawn = False
    import subprocess  # only here, since importing it takes as long again

    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, start_new_session=True, close_fds=False
    )
    process.returncode = 0  # this process waits for it, not Popen
    return process.pid


def find(program: str, path: str) -> str:
    """Return the path of a program, found in the folders of `path` as a shell would find it.

    A name with "/" is returned unchanged. Raises OSError if no folder has an executable of that name.
    """
    if "/" in program:
        return program
    files = [f"{folder or '.'}/{program}" for folder in path.split(os.pathsep)]
    for file in files:
        if os.access(file, os.X_OK) and not os.path.isdir(file):
            return file
    reason = errno.EACCES if any(map(os.path.exists, files)) else errno.ENOENT
    raise OSError(reason, os.strerror(reason))


def environment(given: dict[str, str]) -> dict[str, str]:
    """Return the image's environment, updated with a command's own.

    If both set PYTHONPATH, the command's entries come first.
    """
    found = {**OWN, **given}
    if "PYTHONPATH" in given and OWN.get("PYTHONPATH"):
        found["PYTHONPATH"] = ":".join((given["PYTHONPATH"], OWN["PYTHONPATH"]))
    return found


def cap(pid: int, what: int, soft: int, hard: int | None = None) -> None:
    """Set a resource limit of a process, but never above its current maximum."""
    highest = ceiling(what)
    top = soft if hard is None else hard
    if highest != resource.RLIM_INFINITY:
        soft, top = min(soft, highest), min(top, highest)
    resource.prlimit(pid, what, (soft, top))


@functools.lru_cache(maxsize=16)
def ceiling(what: int) -> int:
    """Return this process's own hard limit, with which every command starts."""
    return resource.getrlimit(what)[1]
