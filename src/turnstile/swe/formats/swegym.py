"""SWE-Gym: SWE-bench's columns with the tests as lists and without environment_setup_commit; images of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from turnstile.swe.formats import swebench
from turnstile.swe.formats.instance import Instance
from turnstile.types import JSON


def from_row(row: Mapping[str, Any], where: str) -> Instance:
    """Read a row as an instance. If it names no image, that is the one published for it, as OpenHands finds it."""
    instance = swebench.from_row(row, where)
    if row.get("docker_image") or row.get("image_name"):
        return instance
    published = f"xingyaoww/sweb.eval.x86_64.{instance.id.replace('__', '_s_').lower()}"
    return dataclasses.replace(instance, image=published)


def to_row(instance: Instance) -> dict[str, JSON]:
    """Return the instance as a row."""
    own = {"test_patch": instance.test_patch, "docker_image": instance.image}
    return swebench.row_of(instance, instance.patch, list, **own)
