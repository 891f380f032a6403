"""What runs inside a container and carries out what `turnstile.sandboxes.containers.provider` asks for.

It is the container's first process, handed to the image's Python as text, so of the image it needs nothing but
Python 3.7 with its standard library. Requests come over standard input, answers go over standard output:

    frame = length of the JSON (4 bytes), length of the data (8 bytes), both big endian, then JSON and data

One request is carried out at a time; the only frame that may come meanwhile is `cancel`, which has no answer of its
own. An answer that says `more` is followed by another. Being first in its PID namespace, this process cannot be
killed from inside, gets every orphan as its child and ends all others with one `kill(-1)`. When its input ends,
the host is gone: it exits, and everything in the container with it.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import signal
import stat
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NoReturn

HEAD = struct.Struct(">IQ")
CHUNK = 1 << 20
TICK = 0.1  # seconds between two looks at the number of processes
STUBBORN = 10.0  # seconds within which killed processes must be gone
TIMED_OUT = 124
NOT_FOUND = 127
NO_ROOM = 1 << 16  # bytes; a disk with less left is full
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
F_SETPIPE_SZ = 1031
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
GROUPS = "/sys/fs/cgroup"
EVENTS = [f"{GROUPS}/memory.events", f"{GROUPS}/memory/memory.oom_control"]  # wherever it is told


class Input:
    """Standard input, read as it comes. Raises EOFError where it ends."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.buffer = b""

    def some(self, count: int) -> bytes:
        """At least one byte and at most `count`."""
        if not self.buffer:
            self.buffer = os.read(self.descriptor, CHUNK)
            if not self.buffer:
                raise EOFError
        data, self.buffer = self.buffer[:count], self.buffer[count:]
        return data

    def exactly(self, count: int) -> bytes:
        parts = []
        while count:
            parts.append(self.some(count))
            count -= len(parts[-1])
        return b"".join(parts)


class Data:
    """The data of one frame, as a file to read from."""

    def __init__(self, source: Input, size: int) -> None:
        self.source = source
        self.left = size

    def read(self, count: int = -1) -> bytes:
        count = self.left if count < 0 else min(count, self.left)
        data = self.source.exactly(count)
        self.left -= count
        return data

    def skip(self) -> None:
        while self.left:
            self.left -= len(self.source.some(self.left))


class Cut:
    """Text that arrives as bytes: its head and its tail, `limit` characters together, and how many are between."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.head: list[str] = []
        self.head_left = limit // 2
        self.tail: deque[str] = deque()
        self.tail_length = 0
        self.dropped = 0

    def feed(self, data: bytes, final: bool = False) -> None:
        text = self.decoder.decode(data, final)
        if self.head_left and text:
            self.head.append(text[: self.head_left])
            text = text[self.head_left :]
            self.head_left -= len(self.head[-1])
        if text:
            self.tail.append(text)
            self.tail_length += len(text)
        room = self.limit - self.limit // 2
        while self.tail and self.tail_length - len(self.tail[0]) >= room:
            gone = len(self.tail.popleft())
            self.tail_length -= gone
            self.dropped += gone

    def text(self) -> str:
        self.feed(b"", final=True)
        head, tail = "".join(self.head), "".join(self.tail)
        surplus = max(0, len(tail) - (self.limit - self.limit // 2))
        left_out = self.dropped + surplus
        return f"{head}\n[... {left_out} characters left out ...]\n{tail[surplus:]}" if left_out else head + tail


def main() -> NoReturn:
    """Answer requests until nobody asks any more."""
    prctl(PR_SET_DUMPABLE, 0)  # commands of the same user can then neither trace us nor open our pipes
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # for an engine that puts an init before us
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)  # and not SIG_IGN, which commands would inherit
    source = Input(0)
    try:
        while True:
            size, data_size = HEAD.unpack(source.exactly(HEAD.size))
            request = json.loads(source.exactly(size).decode())
            answer_one(request, Data(source, data_size), source)
    except (EOFError, BrokenPipeError):
        pass
    finally:
        kill_all()
    sys.exit(0)


def answer_one(request: dict[str, Any], data: Data, source: Input) -> None:
    operation = request["op"]
    try:
        if operation == "exec":
            send(execute(request, source))
        elif operation == "read":
            send_file(request)
        elif operation == "write":
            write(request, data)
            send({})
        elif operation == "unpack":
            unpack(request["root"], data)
            send({})
        elif operation == "pack":
            pack(request["root"])
        elif operation == "begin":
            send(begin(request))
        elif operation == "ping":
            send({})
    except (EOFError, BrokenPipeError):
        raise
    except GoneError as error:
        send({"gone": str(error)})
    except ValueError as error:
        send({"value": str(error)})
    except OSError as error:
        send({"errno": error.errno, "text": f"{error.strerror}: {shown(error.filename)}"})
    except Exception as error:
        send({"fault": f"{type(error).__name__}: {error}"})
    data.skip()


def send(answer: dict[str, Any], data: bytes = b"") -> None:
    body = json.dumps(answer).encode()
    put(HEAD.pack(len(body), len(data)) + body + data)


def put(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


def shown(name: Any) -> str:
    return os.fsdecode(name) if isinstance(name, (str, bytes)) else str(name)


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class GoneError(Exception):
    """The folder that everything happens in is no more."""


def begin(request: dict[str, Any]) -> dict[str, Any]:
    """Make the folders; say who we are."""
    os.umask(0o022)
    EVENTS.insert(0, f"{GROUPS}{own_group('/proc/self/cgroup')}/memory.events")
    for folder in request["empty"]:
        remove_inside(folder)
    for folder in request["make"]:
        os.makedirs(folder, mode=0o755, exist_ok=True)
    if not os.path.isdir(request["root"]):
        raise NotADirectoryError(errno.ENOTDIR, "there is no such root folder", request["root"])
    return {"python": sys.version.split()[0], "pid": os.getpid(), "uid": os.getuid()}


def remove_inside(folder: str) -> None:
    """What a snapshot brought along, and is to be put here anew."""
    for top, folders, files in os.walk(folder, topdown=False):
        for name in files:
            os.unlink(os.path.join(top, name))
        for name in folders:
            path = os.path.join(top, name)
            os.unlink(path) if os.path.islink(path) else os.rmdir(path)


def check_root(root: str) -> None:
    if os.path.islink(root) or not os.path.isdir(root):
        raise GoneError(f"its folder {root} is gone")


# Commands


def execute(request: dict[str, Any], source: Input) -> dict[str, Any]:
    """Run a command to its end, and end whatever it leaves behind."""
    check_root(request["cwd"])
    limits = request["limits"]
    killed_before = out_of_memory_kills()
    bell, ring = os.pipe()
    out, out_end = os.pipe()
    err, err_end = os.pipe()
    outputs = {out: Cut(limits["output_chars"]), err: Cut(limits["output_chars"])}
    for descriptor in (bell, ring, out, err):
        os.set_blocking(descriptor, False)
    for descriptor in outputs:
        with contextlib.suppress(OSError):  # larger than this user may have
            fcntl.fcntl(descriptor, F_SETPIPE_SZ, CHUNK)
    signal.set_wakeup_fd(ring)
    try:
        started = time.monotonic()
        try:
            child = spawn(request, out_end, err_end)
        finally:
            os.close(out_end)
            os.close(err_end)
        status, spent, verdict = NOT_FOUND << 8, 0.0, ""
        if child is not None:
            status, spent, verdict = watch(child, started, limits, outputs, bell, source)
        seconds = time.monotonic() - started
        end_all(bell)
        for descriptor, cut in outputs.items():
            drain(descriptor, cut)
    finally:
        signal.set_wakeup_fd(-1)
        for descriptor in (bell, ring, out, err):
            os.close(descriptor)
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
    if verdict == "crowd":  # the command's own doing, and not to be taken for the kernel's out-of-memory kill
        code = 128 + signal.SIGTERM
    used_up = spent >= limits["cpu_seconds"]
    timed_out = verdict == "time" or code == 128 + signal.SIGXCPU or (code == 128 + signal.SIGKILL and used_up)
    note = "\n[too many processes]\n" if verdict == "crowd" else ""
    return {
        "exit_code": TIMED_OUT if timed_out else code,
        "stdout": outputs[out].text(),
        "stderr": outputs[err].text() + note,
        "seconds": seconds,
        "timed_out": timed_out,
        "out_of_memory": out_of_memory_kills() > killed_before,
        "disk_full": any(is_full(folder) for folder in request["disks"]),
    }


def watch(
    child: int, started: float, limits: dict[str, Any], outputs: dict[int, Cut], bell: int, source: Input
) -> tuple[int, float, str]:
    """Read what a command writes until it ends, or until a limit or the host says that it shall.

    Gives its status, the seconds of processor time that it used, and what ended it.
    """
    poll = select.poll()
    for descriptor in (*outputs, bell, source.descriptor):
        poll.register(descriptor, select.POLLIN)
    verdict = "cancelled" if source.buffer else ""
    next_count = started + TICK
    deadline = 0.0
    while True:
        ended = reap(child)
        if ended is not None:
            return (*ended, verdict)
        now = time.monotonic()
        left = started + limits["seconds"] - now
        if not verdict and left <= 0:
            verdict = "time"
        if not verdict and now >= next_count:
            next_count = now + TICK
            verdict = "crowd" if count_others() > limits["processes"] else ""
        if verdict:
            kill_all()
            deadline = deadline or now + STUBBORN
            if now > deadline:
                raise GoneError(f"its command does not end {STUBBORN:.0f} s after it was killed")
        for descriptor, _ in poll.poll(max(0.0, TICK if verdict else min(left, TICK)) * 1000):
            if descriptor == bell:
                os.read(bell, 4096)
            elif descriptor == source.descriptor:
                verdict = verdict or "cancelled"
                poll.unregister(descriptor)
            elif not take(descriptor, outputs[descriptor]):
                poll.unregister(descriptor)


def take(descriptor: int, cut: Cut) -> bool:
    """Read once; False where no more can come."""
    try:
        data = os.read(descriptor, CHUNK)
    except BlockingIOError:
        return True
    cut.feed(data)
    return bool(data)


def drain(descriptor: int, cut: Cut) -> None:
    while True:
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:  # whoever holds the other end could not be killed
            return
        if not data:
            return
        cut.feed(data)


def reap(child: int) -> tuple[int, float] | None:
    """Collect every process that has ended; the command's own status and processor time if it is among them."""
    found = None
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = status, usage.ru_utime + usage.ru_stime


def end_all(bell: int) -> None:
    """Kill every other process of the container and wait until they are gone. Raises GoneError when they do not go."""
    deadline = time.monotonic() + STUBBORN
    while kill_all():
        reap(0)
        if time.monotonic() > deadline:
            raise GoneError(f"processes that were killed are still there after {STUBBORN:.0f} s")
        if select.select([bell], [], [], 0.01)[0]:
            os.read(bell, 4096)


def kill_all() -> bool:
    """Kill every other process of the container; False where there is none."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def count_others() -> int:
    return sum(name.isdigit() for name in os.listdir("/proc")) - 1


def out_of_memory_kills() -> int:
    """How often the kernel has killed a process of this container for want of memory."""
    for path in EVENTS:
        try:
            with open(path) as file:
                for line in file:
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        except FileNotFoundError:
            EVENTS.remove(path)  # the other version of control groups
            return out_of_memory_kills()
    return 0


def own_group(told: str) -> str:
    """Our control group of version 2 as we see it: empty where we have a view of our own, or where it is version 1."""
    try:
        with open(told) as file:
            return next((line[3:].strip().rstrip("/") for line in file if line.startswith("0::")), "")
    except FileNotFoundError:
        return ""


def is_full(folder: str) -> bool:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize < NO_ROOM


def spawn(request: dict[str, Any], out: int, err: int) -> int | None:
    """Start the command, in a session of its own: its process id, or None where it cannot be run at all.

    Python starts it without copying this process, which costs a fifth of `os.fork`. So its limits are set a moment
    after it began; what bounds the container as a whole holds from the start.
    """
    argv = request["argv"]
    try:
        process = subprocess.Popen(
            [os.fsencode(word) for word in argv],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=request["cwd"],
            env=environment(request["env"]),
            start_new_session=True,
            close_fds=False,  # Python opens none that would be inherited
        )
    except (OSError, ValueError) as error:  # not to be found, not to be run, or no text that can be passed on
        reason = error.strerror if isinstance(error, OSError) else str(error)
        os.write(err, f"{argv[0]}: {reason}\n".encode(errors="replace"))
        return None
    process.returncode = 0  # it is ours to wait for
    limits = request["limits"]
    cpu = max(1, int(-(-limits["cpu_seconds"] // 1)))
    with contextlib.suppress(ProcessLookupError):
        cap(process.pid, resource.RLIMIT_CPU, cpu, cpu + 2)
        cap(process.pid, resource.RLIMIT_FSIZE, limits["file_mb"] << 20)
        cap(process.pid, resource.RLIMIT_CORE, 0)
        if limits["address_mb"]:
            cap(process.pid, resource.RLIMIT_AS, limits["address_mb"] << 20)
    with contextlib.suppress(OSError), open(f"/proc/{process.pid}/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out, it is the command that goes, and not the runner
    return process.pid


def environment(given: dict[str, str]) -> dict[bytes, bytes]:
    """The image's environment with what a command is given; of import paths the image's stays, after the given."""
    found = {**os.environ, **given}
    if "PYTHONPATH" in given and os.environ.get("PYTHONPATH"):
        found["PYTHONPATH"] = ":".join((given["PYTHONPATH"], os.environ["PYTHONPATH"]))
    return {os.fsencode(name): os.fsencode(value) for name, value in found.items()}


def cap(pid: int, what: int, soft: int, hard: int | None = None) -> None:
    """Lower one limit of a process, never above what it has."""
    ceiling = resource.getrlimit(what)[1]
    top = soft if hard is None else hard
    if ceiling != resource.RLIM_INFINITY:
        soft, top = min(soft, ceiling), min(top, ceiling)
    resource.prlimit(pid, what, (soft, top))


# Files


def resolve(root: str, path: str) -> str:
    """The real path of `path` below `root`. Raises ValueError when it leaves the root, links followed."""
    check_root(root)
    top = os.path.realpath(root)
    if not os.path.isabs(path) and "\0" not in path:
        real = os.path.realpath(os.path.join(top, path))
        if real == top or real.startswith(top.rstrip("/") + "/"):
            return real
    raise ValueError(f"the path {path!r} leaves the sandbox; give one relative to its root")


def send_file(request: dict[str, Any]) -> None:
    """A file's bytes, as data of the answer."""
    real = resolve(request["root"], request["path"])
    descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb", buffering=0, closefd=True) as file:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), real)
        if not stat.S_ISREG(status.st_mode):  # a pipe or a device would never end
            raise ValueError(f"{request['path']!r} is no plain file")
        body = b"{}"
        put(HEAD.pack(len(body), status.st_size) + body)
        for part in exactly(file, status.st_size):
            put(part)


def write(request: dict[str, Any], data: Data) -> None:
    """Replace rather than overwrite, so that no link made by a command carries the write elsewhere."""
    real = resolve(request["root"], request["path"])
    folder = os.path.dirname(real)
    os.makedirs(folder, exist_ok=True)
    mode = stat.S_IMODE(os.stat(real).st_mode) if os.path.exists(real) else 0o644
    temporary = os.path.join(folder, f".being-written-{time.monotonic_ns()}")
    try:
        put_file(temporary, 0o600, data, data.left)
        os.chmod(temporary, mode)
        os.replace(temporary, real)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def put_file(path: str, mode: int, data: Data, size: int) -> None:
    """A new file of the next `size` bytes."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        while size:
            view = memoryview(data.read(min(CHUNK, size)))
            size -= len(view)
            while view:
                view = view[file.write(view) :]


# Archives: entries one after the other, each a frame. Its JSON has `kind` (folder, file or link), `name` (below the
# root, folders before what is in them), a file's `mode` and where a link leads, `to`; its data is a file's content.


def unpack(root: str, data: Data) -> None:
    """Put an archive's folders, files and links into `root`, which must hold none of its files and links."""
    check_root(root)
    while data.left:
        size, data_size = HEAD.unpack(data.read(HEAD.size))
        entry = json.loads(data.read(size).decode())
        path = os.path.join(root, entry["name"])
        if entry["kind"] == "folder":
            os.makedirs(path, exist_ok=True)
        elif entry["kind"] == "link":
            os.symlink(entry["to"], path)
        else:
            put_file(path, entry["mode"] & 0o777, data, data_size)


def pack(root: str) -> None:
    """Send `root` as an archive, in answers that say `more`: folders, files and links, and nothing else."""
    check_root(root)
    pieces = Pieces()
    pending = [(root, "")]
    while pending:
        folder, inner = pending.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                name = inner + entry.name
                if entry.is_symlink():
                    pieces.add({"kind": "link", "name": name, "to": os.readlink(entry.path)}, 0)
                elif entry.is_dir():
                    pieces.add({"kind": "folder", "name": name}, 0)
                    pending.append((entry.path, name + "/"))
                elif entry.is_file():
                    with open(entry.path, "rb", buffering=0) as file:
                        status = os.fstat(file.fileno())
                        pieces.add({"kind": "file", "name": name, "mode": status.st_mode}, status.st_size)
                        for part in exactly(file, status.st_size):
                            pieces.put(part)
    pieces.flush()
    send({})


def exactly(file: Any, size: int) -> Iterator[bytes]:
    """The next `size` bytes of a file, in pieces; where it ends before, zeros, since that length is promised."""
    while size:
        part = file.read(min(CHUNK, size)) or bytes(min(CHUNK, size))
        size -= len(part)
        yield part


class Pieces:
    """What goes out as answers that say `more`, each of about a chunk."""

    def __init__(self) -> None:
        self.held: list[bytes] = []
        self.size = 0

    def add(self, entry: dict[str, Any], size: int) -> None:
        body = json.dumps(entry).encode()
        self.put(HEAD.pack(len(body), size) + body)

    def put(self, data: bytes) -> None:
        self.held.append(data)
        self.size += len(data)
        if self.size >= CHUNK:
            self.flush()

    def flush(self) -> None:
        if self.held:
            send({"more": True}, b"".join(self.held))
            self.held, self.size = [], 0


if __name__ == "__main__":
    main()
