"""Compile a tree once, so that runs on copies of it compile only what was changed.

    python -m turnstile.swe.in_sandbox.precompile

Every source file below the working folder gets byte code that Python checks against a hash of the source (PEP 552), and
every test file gets that of its rewritten assertions, as pytest makes it. So no copy, edit or clock makes stale code
run. Nothing in the tree is executed.
"""

from __future__ import annotations

import ast
import compileall
import importlib.util
import io
import py_compile
import sys
from pathlib import Path

from _pytest.assertion import rewrite

from turnstile.swe.tree import is_test_file


def rewrite_tests(root: Path) -> int:
    """Write the rewritten byte code of every test file, and return the number of files written.

    None are written unless pytest checks its cache by hash; it then rewrites the tests in every run, which only costs
    time.
    """
    header = io.BytesIO()
    try:
        rewrite._write_pyc_fp(header, b"\0" * 8, compile("", "", "exec"))
    except (AttributeError, TypeError):
        return 0  # this pytest's cache is checked by modification times
    if header.getvalue()[4:8] != b"\x03\0\0\0":
        return 0
    written = 0
    for file in sorted(root.rglob("*.py")):
        if is_test_file(file.name) or file.name == "conftest.py":
            name = file.relative_to(root).as_posix()  # relative, as the copies that run it are elsewhere
            source = file.read_bytes()
            try:
                tree = ast.parse(source, filename=name)
            except (SyntaxError, ValueError):
                continue  # collecting it will report the error
            rewrite.rewrite_asserts(tree, source, name, None)
            code = compile(tree, name, "exec", dont_inherit=True)
            folder = file.parent / "__pycache__"
            folder.mkdir(exist_ok=True)
            with (folder / (file.stem + rewrite.PYC_TAIL)).open("wb") as target:
                rewrite._write_pyc_fp(target, importlib.util.source_hash(source), code)
            written += 1
    return written


def main() -> None:
    """Compile all modules below the working folder, with pytest's assertion rewriting for test files."""
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(".", quiet=2, maxlevels=20, invalidation_mode=mode)  # skips files that are not Python
    rewrite_tests(Path())


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)  # long expressions in generated tests
    main()
