"""SWE-Gym, with SWE-bench's columns but lists of tests, no environment_setup_commit, and its own images."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from turnstile.swe.formats import swebench
from turnstile.swe.formats.instance import Instance
from turnstile.types import JSON


def from_row(row: Mapping[str, Any], where: str) -> Instance:
    """Convert a row to an instance; if it names no image, use the one that OpenHands uses for its id."""
    instance = swebench.from_row(row, where)
    if row.get("docker_image") or row.get("image_name"):
        return instance
    published = f"xingyaoww/sweb.eval.x86_64.{instance.id.replace('__', '_s_').lower()}"
    return dataclasses.replace(instance, image=published)


def to_row(instance: Instance) -> dict[str, JSON]:
    """Convert an instance to a row."""
    own = {"test_patch": instance.test_patch, "docker_image": instance.image}
    return swebench.row_of(instance, instance.patch, list, **own)
