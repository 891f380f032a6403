"""The program of a container's first process, as one text for `python -c`."""

from __future__ import annotations

import functools
import inspect

from turnstile.sandboxes.containers.runner import commands, cut, files, frames, kernel, main, start

MODULES = (frames, cut, kernel, files, start, commands, main)  # each after those that it imports
_BEGIN = """
import sys, types
for name, text in {texts!r}:
    sys.modules[name] = module = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
module.main()
"""


@functools.cache
def program() -> str:
    """Return the modules of `runner` as one program, in which they import each other by name; it runs the last one."""
    return _BEGIN.format(texts=[(module.__name__, inspect.getsource(module)) for module in MODULES])
