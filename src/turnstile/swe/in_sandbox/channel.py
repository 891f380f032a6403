"""The parts that the reports on test runners have in common.

They are report lines that begin with a random key, the request that contains the key, and checks of the runner's
functions. For Python 3.6 or newer, with the standard library only.
"""

import json
import os
import sys
import traceback
import types
from typing import Any

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
KEYFILE = "key.json"
LONGEST = 300  # characters of a message


class Channel:
    """Writes lines that begin with a key to the standard output as it was at the start."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.output = os.dup(1)
        self.write: Any = os.write
        self.dumps: Any = json.dumps

    def emit(self, **event: Any) -> None:
        data = f"\n{self.key} {self.dumps(event)}\n".encode()
        while data:
            data = data[self.write(self.output, data) :]


def request() -> Any:
    """Return the request to the first process that asks for it, and None to all later ones.

    Deletes the key file and these modules from the disk, and removes their folder from the import path.
    """
    file = os.path.join(HERE, KEYFILE)
    if not os.path.exists(file):
        return None
    with open(file) as opened:
        asked = json.load(opened)
    os.unlink(file)
    folder = os.path.dirname(os.path.abspath(__file__))
    for name in os.listdir(folder):
        if name.endswith(".py"):
            os.unlink(os.path.join(folder, name))
    sys.path[:] = [place for place in sys.path if os.path.abspath(place or ".") != HERE]
    asked["root"] = os.path.realpath(asked["root"])
    return asked


def codes(packages: Any, modules: Any = None) -> Any:
    """Return the code objects of all functions in these packages, by module, class and name.

    Functions are looked up in the loaded modules, or in `modules`.
    """
    found: Any = {}
    for place, module in list((sys.modules if modules is None else modules).items()):
        if module is None or place.partition(".")[0] not in packages:
            continue
        for name, value in list(vars(module).items()):
            found[place, name] = getattr(value, "__code__", None)
            if isinstance(value, type) and value.__module__ == place:
                for inner, method in list(vars(value).items()):
                    found[place, name, inner] = getattr(method, "__code__", None)
    return {name: code for name, code in found.items() if isinstance(code, types.CodeType)}


def keeper(objects: Any) -> Any:
    """Return a function that restores the current attributes of `objects` and returns the names of those changed.

    The attributes are kept in its closure, which no attribute leads to.
    """
    whole = [(each, dict(vars(each))) for each in objects]

    def restore() -> Any:
        changed = []
        for each, attributes in whole:
            now = dict(vars(each))
            vars(each).update(attributes)
            for name in now:
                if now[name] is not attributes.get(name):
                    changed.append("the report's " + name)
                    if name not in attributes:
                        del vars(each)[name]
        return changed

    return restore


def find_replaced(before: Any, now: Any) -> Any:
    """Return the names of functions in `before` whose code now is none of the earlier codes.

    Runners may swap functions that were there before.
    """
    own = set(map(id, before.values()))
    return [".".join(name) for name in before if id(now.get(name)) not in own]


def first_line(error: Any) -> str:
    """Return the first line of an exception, `Type: message`, in at most `LONGEST` characters."""
    kind = type(error).__name__
    for line in traceback.format_exception_only(type(error), error):  # a syntax error's place, this line, then notes
        if line.partition(":")[0].strip().rpartition(".")[2] == kind:
            return line.strip().splitlines()[0][:LONGEST]
    return kind
