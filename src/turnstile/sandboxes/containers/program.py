"""The program that is a container's first process, as one text: what `python -c` takes."""

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
    """The modules of `runner` under their own names, of which none needs to be installed; the last one is run."""
    return _BEGIN.format(texts=[(module.__name__, inspect.getsource(module)) for module in MODULES])
