"""Convert tasks that `turnstile tasks make` made to instances, so that they can be written in the formats of others."""

from __future__ import annotations

import difflib

from turnstile.swe.bug import Bug
from turnstile.swe.formats.instance import Instance, reversed_patch
from turnstile.swe.packages.source import Package


def as_instance(name: str, bug: Bug, package: Package, *, image: str = "", workdir: str = "/testbed") -> Instance:
    """Return a made task as an instance.

    `image` is an image that holds the package's files, with its dependencies, in a git repository at `workdir`. Raises
    TaskError if the package is not the one that the bug was made in.
    """
    buggy, pristine = (
        text.splitlines(keepends=True) for text in (bug.bugged_text(package), bug.pristine_text(package))
    )
    lines = difflib.unified_diff(buggy, pristine, f"a/{bug.file}", f"b/{bug.file}")
    ended = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    patch = f"diff --git a/{bug.file} b/{bug.file}\n" + "".join(ended)
    return Instance(
        id=name.replace("/", "__"),
        problem=bug.statement or bug.message,
        repo=bug.source,
        patch=patch,
        bug_patch=reversed_patch(patch),
        fail_to_pass=bug.f2p,
        pass_to_pass=bug.p2p,
        image=image,
        workdir=workdir,
    )
