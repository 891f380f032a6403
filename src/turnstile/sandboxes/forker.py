"""The fork server, a preloaded Python process that forks commands on request.

`turnstile.sandboxes.forkserver` runs it as a script that needs only the standard library. Standard input is a Unix
socket. Each message on it is one byte and a file descriptor, which is a connection for a single request. A request and
its answer are JSON after a four-byte length.

    server --fork--> warden (one per request: limits, clock, answer) --fork--> the command (own session)

The warden kills the command's whole process tree when the command ends, when its time is up, when the client hangs up
(even because it was killed) and when the server dies. On Linux, orphans are reparented to the warden
(PR_SET_CHILD_SUBREAPER), so a process that left the process group is found too; elsewhere only the process group is
killed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.abc
import importlib.util
import json
import os
import pkgutil
import resource
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
import types
from typing import Any, NoReturn

LINUX = sys.platform.startswith("linux")
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
ADDR_NO_RANDOMIZE = 0x0040000
TIMED_OUT = 124
NOT_FOUND = 127
TICK = 0.1  # seconds between two counts of the processes

BASE_PATH: list[str] = []
KEEP: set[str] = set()  # names of preloaded packages, which a working folder may not replace
PROGRAMS: dict[str, types.CodeType] = {}  # code of preloaded modules, whose files may change later


def prctl(option: int, value: int) -> None:
    """Set an option of this process on Linux; do nothing elsewhere."""
    if LINUX:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def fix_addresses() -> None:
    """Restart this process without address space randomisation, if the kernel allows it.

    Before Python 3.12 the hash of None is its address, so the order of a set, and with it the ids of tests, would
    differ between servers.
    """
    if LINUX:
        personality = ctypes.CDLL(None).personality
        old = personality(0xFFFFFFFF)  # only a query
        if old != -1 and not old & ADDR_NO_RANDOMIZE:
            personality(old | ADDR_NO_RANDOMIZE)
            if personality(0xFFFFFFFF) & ADDR_NO_RANDOMIZE:
                os.execv(sys.executable, sys.orig_argv)


def preload(names: list[str]) -> None:
    """Import the modules in `names`, where `package.*` stands for every module of a package."""
    for name in names:
        KEEP.add(name.partition(".")[0])
        if name.endswith(".*"):
            package = importlib.import_module(name[:-2])
            for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
                if not module.name.endswith(("__main__", "_argcomplete")):
                    importlib.import_module(module.name)
        else:
            loader = importlib.import_module(name).__loader__
            if isinstance(loader, importlib.abc.InspectLoader) and (code := loader.get_code(name)):
                PROGRAMS[name] = code


def prefer(folder: str) -> None:
    """Make sure that Turnstile is imported from `folder`, as it is in the client.

    The client may have found it through its own PYTHONPATH, which this process does not inherit.
    """
    spec = importlib.util.find_spec("turnstile")
    if spec is None or spec.origin is None or os.path.dirname(os.path.dirname(spec.origin)) != folder:
        sys.path.insert(0, folder)


def serve() -> None:
    """Serve the requests that arrive on the control socket until it is closed."""
    control = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that ended wardens need not be waited for
    prefer(sys.argv[1])
    BASE_PATH.extend(entry for entry in sys.path if entry)
    preload(sys.argv[2:])
    sys.stdout.flush()  # so that children do not inherit buffered output
    gc.collect()
    gc.freeze()  # keeps the collector from touching, and so copying, the pages shared with the children
    life, life_of_server = os.pipe()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            break
        if os.fork() == 0:
            control.close()
            os.close(life_of_server)
            ward(socket.socket(fileno=descriptors[0]), life)
        os.close(descriptors[0])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    wait_for_all(kill=True)


def ward(connection: socket.socket, life: int) -> NoReturn:
    """Handle one request in a process of its own, which then exits."""
    code = 0
    try:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        request = receive(connection)
        if request is not None:
            answer = supervise(request, connection, life)
            if answer is not None:
                send(connection, answer)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the client has gone, so nothing needs the answer
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        wait_for_all(kill=True)
        os._exit(code)


def receive(connection: socket.socket) -> Any:
    """Return the next message of a connection, or None if the connection has ended."""
    stream = connection.makefile("rb")
    head = stream.read(4)
    if len(head) < 4:
        return None
    return json.loads(stream.read(struct.unpack(">I", head)[0]))


def send(connection: socket.socket, answer: dict[str, Any]) -> None:
    """Send a message over a connection."""
    body = json.dumps(answer).encode()
    connection.sendall(struct.pack(">I", len(body)) + body)


def supervise(request: dict[str, Any], connection: socket.socket, life: int) -> dict[str, Any] | None:
    """Run the command under its limits and return the answer, or None if the client or the server has gone."""
    if not os.path.isdir(request["cwd"]):
        return {"error": f"the working folder {request['cwd']} is gone"}
    limits = request["limits"]
    bell, ring = os.pipe()
    os.set_blocking(ring, False)
    os.set_blocking(bell, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ring)
    fault, fault_end = os.pipe()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            become(request, out.fileno(), err.fileno(), fault_end)
        os.close(fault_end)
        status, usage, verdict = watch(child, started, limits, (connection.fileno(), life, bell))
        seconds = time.monotonic() - started
        kill_tree(child)
        if verdict == "abandoned":
            return None
        fault_text = os.read(fault, 1 << 16).decode(errors="replace")
        if fault_text:
            return {"error": fault_text}
        code = os.waitstatus_to_exitcode(status)
        if verdict == "crowd":  # caused by the command, and not to be mistaken for an out-of-memory kill
            code = -signal.SIGTERM
        spent = usage.ru_utime + usage.ru_stime >= limits["cpu_seconds"]
        timed_out = verdict == "time" or code == -signal.SIGXCPU or (code == -signal.SIGKILL and spent)
        return {
            "exit_code": TIMED_OUT if timed_out else code if code >= 0 else 128 - code,
            "stdout": text_of(out, limits["output_chars"]),
            "stderr": text_of(err, limits["output_chars"]) + ("\n[too many processes]\n" if verdict == "crowd" else ""),
            "seconds": seconds,
            "timed_out": timed_out,
        }


def watch(
    child: int, started: float, limits: dict[str, Any], watched: tuple[int, int, int]
) -> tuple[int, resource.struct_rusage, str]:
    """Wait until the command ends, or kill it if a limit is exceeded or the client or the server has gone.

    Returns its wait status, its resource usage and why it was killed: "time", "crowd" (too many processes),
    "abandoned", or "" if it ended on its own.
    """
    connection, life, bell = watched
    poll = select.poll()
    for descriptor in watched:
        poll.register(descriptor, select.POLLIN)
    verdict = ""
    next_count = started + TICK
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            return status, usage, verdict
        now = time.monotonic()
        left = started + limits["seconds"] - now
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, min(left, TICK)) * 1000)} if left > 0 else set()
        if bell in ready:
            os.read(bell, 4096)
        if connection in ready or life in ready:
            verdict = "abandoned"
        elif left <= 0:
            verdict = "time"
        elif now >= next_count:
            next_count = now + TICK
            verdict = "crowd" if count_tree(os.getpid()) > limits["processes"] else ""
        if verdict:
            kill_group(child)
            _, status, usage = os.wait4(child, 0)
            return status, usage, verdict


def children_of(pid: int) -> list[int]:
    """Return the ids of a process's children; none if the process has ended."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found.extend(map(int, file.read().split()))
    except (FileNotFoundError, ProcessLookupError):
        pass  # it has just ended
    return found


def count_tree(pid: int) -> int:
    """Return the number of descendants of the process `pid`; 0 on systems other than Linux."""
    if not LINUX:
        return 0
    below = children_of(pid)
    return len(below) + sum(count_tree(each) for each in below)


def kill_group(pid: int) -> None:
    """Kill a process and its process group."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # not a group leader yet, or gone
            kill(pid, signal.SIGKILL)


def kill_tree(child: int) -> None:
    """Kill what the command left running: its process group and, on Linux, orphans reparented to this process."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    wait_for_all(kill=True)


def wait_for_all(kill: bool = False) -> None:
    """Wait until this process has no children left.

    With `kill`, and on Linux, kill the children and then the orphans that they leave.
    """
    while True:
        if kill and LINUX:
            for pid in children_of(os.getpid()):
                kill_group(pid)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def text_of(file: Any, limit: int) -> str:
    """Return a file's text; if it is longer than `limit` characters, only its head and tail.

    The number of characters left out is noted between the two.
    """
    file.seek(0)
    text: str = file.read().decode(errors="replace")
    if len(text) <= limit:
        return text
    head = limit // 2
    tail = limit - head
    return f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{text[len(text) - tail :]}"


def become(request: dict[str, Any], out: int, err: int, fault: int) -> NoReturn:
    """Turn this newly forked process into the command."""
    try:
        enter(request, out, err, fault)
    except BaseException:
        os.write(fault, traceback.format_exc().encode()[-4000:])
        os._exit(125)
    argv, cwd, env = request["argv"], request["cwd"], request["env"]
    if request["fork"]:
        os.close(fault)
        code = 1
        try:
            code = run_module(argv, cwd, env)
        finally:
            os._exit(code)
    try:
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
    os._exit(NOT_FOUND)


def enter(request: dict[str, Any], out: int, err: int, fault: int) -> None:
    """Set up the session, signals, standard streams, limits, folder and environment of the command."""
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (out, 1), (err, 2)):
        os.dup2(source, target)
    os.closerange(3, fault)
    os.closerange(fault + 1, 1 << 20)
    limits = request["limits"]
    cpu = max(1, int(-(-limits["cpu_seconds"] // 1)))
    cap(resource.RLIMIT_CPU, cpu, cpu + 2)
    if LINUX:  # other kernels refuse this limit or do not enforce it
        cap(resource.RLIMIT_AS, limits["memory_mb"] << 20)
    cap(resource.RLIMIT_FSIZE, limits["file_mb"] << 20)
    cap(resource.RLIMIT_CORE, 0)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    tempfile.tempdir = None


def cap(what: int, soft: int, hard: int | None = None) -> None:
    """Set a resource limit of this process, but never above its current maximum."""
    ceiling = resource.getrlimit(what)[1]
    top = soft if hard is None else hard
    if ceiling != resource.RLIM_INFINITY:
        soft, top = min(soft, ceiling), min(top, ceiling)
    resource.setrlimit(what, (soft, top))


def run_module(argv: list[str], cwd: str, env: dict[str, str]) -> int:
    """Do in this process what `python -m MODULE ARGS...` does, and return the exit code."""
    sys.stdin = sys.__stdin__ = os.fdopen(0, encoding="utf-8")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", errors="surrogateescape")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = os.fdopen(  # type: ignore[misc]
        2, "w", encoding="utf-8", errors="backslashreplace", buffering=1
    )
    given = env.get("PYTHONPATH", "").split(os.pathsep)
    given = [os.path.normpath(os.path.join(cwd, entry)) for entry in given if entry]
    sys.path[:] = [cwd, *given, *BASE_PATH]
    forget_shadowed([cwd, *given])
    importlib.invalidate_caches()
    code = 0
    try:
        sys.argv = [argv[2], *argv[3:]]
        execute(argv[2])
    except SystemExit as end:
        if isinstance(end.code, int):
            code = end.code & 0xFF
        elif end.code is not None:
            print(end.code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        code = code or 120  # the exit code of Python itself when flushing fails
    return code


def forget_shadowed(folders: list[str]) -> None:
    """Drop preloaded modules that one of `folders` also has, so that the folder's own are imported.

    Modules of the standard library stay, as in any running Python, and so do packages named by `preload`.
    """
    own = {entry.partition(".")[0] for folder in folders if os.path.isdir(folder) for entry in os.listdir(folder)}
    shadowed = own - KEEP - sys.stdlib_module_names - set(sys.builtin_module_names)
    for name in [name for name in sys.modules if name.partition(".")[0] in shadowed]:
        del sys.modules[name]


def execute(name: str) -> None:
    """Run a module, or a package's `__main__`, as the main program."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(name + ".__main__")
    if spec is None or spec.loader is None:
        sys.exit(f"{sys.executable}: No module named {name}")
    code = PROGRAMS.get(spec.name) or spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=spec.origin, __spec__=spec, __package__=spec.parent, __loader__=spec.loader)
    sys.modules["__main__"] = main
    sys.argv[0] = spec.origin or name
    exec(code, main.__dict__)


if __name__ == "__main__":
    fix_addresses()
    serve()
