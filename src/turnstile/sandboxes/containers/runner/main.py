"""The program inside a container that serves `turnstile.sandboxes.containers.provider`.

It is the container's first process. Its modules are passed to the image's Python as one text (`containers.program`), so
the image only needs Python 3.7 with its standard library. Requests arrive on standard input, and answers leave on
standard output (`frames`). One request is handled at a time; only the frame `cancel`, which has no answer of its own,
may arrive meanwhile. An answer with `more` is followed by another.

As the first process of its PID namespace, it cannot be killed from inside, inherits every orphan, and can kill all
other processes with one `kill(-1)`. When its input ends, the host is gone, so it exits and ends everything in the
container.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from turnstile.sandboxes.containers.runner.commands import Commands
from turnstile.sandboxes.containers.runner.files import GoneError, begin, pack, send_file, unpack, write
from turnstile.sandboxes.containers.runner.frames import HEAD, Data, Input, send
from turnstile.sandboxes.containers.runner.kernel import kill_all, prctl

TYPE_CHECKING = False  # importing typing would take a tenth of a start
if TYPE_CHECKING:
    from typing import Any, NoReturn


PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36


def main() -> NoReturn:
    """Answer requests until the input ends."""
    prctl(PR_SET_DUMPABLE, 0)  # commands of the same user can then neither trace us nor open our pipes
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # for an engine that makes an init the first process
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which commands would inherit
    source = Input(0)
    commands = Commands(source)
    try:
        while True:
            size, data_size = HEAD.unpack(source.exactly(HEAD.size))
            request = json.loads(source.exactly(size).decode())
            answer(request, Data(source, data_size), commands)
    except (EOFError, BrokenPipeError):
        pass
    finally:
        kill_all()
    sys.exit(0)


def answer(request: dict[str, Any], data: Data, commands: Commands) -> None:
    """Carry out a request and send its result, or the error that it raised."""
    operation = request["op"]
    try:
        if operation == "exec":
            send(commands.execute(request))
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
            begin(request)
            send({})
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


def shown(name: Any) -> str:
    """Return a file's name as text."""
    return os.fsdecode(name) if isinstance(name, (str, bytes)) else str(name)
