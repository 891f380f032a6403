"""Load `in_sandbox.report` or `in_sandbox.unittests` when the Python that runs the tests starts.

At that time no module of the repository can have been imported yet. This file is put as `sitecustomize.py` into a
folder that is first in PYTHONPATH, for Python 3.6 or newer. The environment names the plugin, the runner that it is
for, and the repository. In a process whose command line does not name that runner, nothing is changed.
"""

import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
REPOSITORY = "TURNSTILE_REPOSITORY"
PLUGIN = "TURNSTILE_PLUGIN"
RUNNER = "TURNSTILE_RUNNER"
PROGRAMS = {
    "pytest": ("pytest", "py.test"),
    "unittest": ("unittest", "unittest.__main__", "runtests.py", "manage.py", "django"),
}
"""Names of modules and files that run tests, by runner."""


def runs(runner: str, arguments: Any) -> bool:
    """Return whether the arguments of Python run tests with that runner, directly or under coverage."""
    programs = PROGRAMS[runner]
    pending = list(arguments)
    while pending:
        first = pending.pop(0)
        if first in ("-W", "-X"):
            del pending[:1]
        elif first.startswith("-m") or not first.startswith("-"):
            names = [first[2:], *pending] if first.startswith("-m") else [os.path.basename(first), *pending]
            names = [name for name in names if name]
            if names[:1] == ["coverage"]:
                return any(os.path.basename(name) in programs for name in names)
            return names[:1] != [] and names[0] in programs
    return False


def load(name: str, repository: str) -> None:
    """Import the plugin without the repository on the import path; if that fails, import it with the whole path."""
    whole = list(sys.path)
    sys.path[:] = [place for place in whole if not (os.path.realpath(place) + os.sep).startswith(repository + os.sep)]
    try:
        importlib.import_module(name)
    except ImportError:
        sys.path[:] = whole  # the repository is pytest's own
        importlib.import_module(name)
    else:
        sys.path[:] = [place for place in whole if os.path.abspath(place) != HERE]


def go_on() -> None:
    """Run the sitecustomize module that this one hides, if there is one."""
    others = [place for place in sys.path if os.path.abspath(place) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def main() -> None:
    """Load the plugin and remove this file, if this interpreter runs the tests of the repository."""
    with open("/proc/self/cmdline", "rb") as file:  # sys.argv is not there yet in older versions
        arguments = file.read().decode("utf-8", "replace").split("\0")[1:-1]
    if REPOSITORY in os.environ and runs(os.environ[RUNNER], arguments):
        repository = os.path.realpath(os.environ.pop(REPOSITORY))
        os.unlink(__file__)
        plugin = os.environ.pop(PLUGIN)
        load(plugin, repository)
        if os.environ[RUNNER] != "pytest":  # pytest looks it up by its name, and hides it then
            for name in [name for name in sys.modules if name.partition(".")[0] == plugin]:
                del sys.modules[name]


if __name__ == "sitecustomize":
    try:
        main()
    finally:
        go_on()
