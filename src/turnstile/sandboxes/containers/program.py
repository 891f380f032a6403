"""The program of a container's first process, as a single text for `python -c`."""

from __future__ import annotations

import functools
import inspect

from turnstile.sandboxes.containers.runner import commands, cut, files, frames, kernel, main, start

MODULES = (frames, cut, kernel, files, start, commands, main)  # each comes after those that it imports
_BEGIN = """
import sys, types
for name, text in {texts!r}:
    sys.modules[name] = module = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
module.main()
"""


@functools.cache
def program() -> str:
    """Return the modules of `runner` as one program.

    In it the modules import each other by name, and the last one is run.
    """
    return _BEGIN.format(texts=[(module.__name__, inspect.getsource(module)) for module in MODULES])
