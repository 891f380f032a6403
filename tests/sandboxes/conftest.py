from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from turnstile.sandboxes.local import LocalSandboxes


@pytest.fixture
def template(tmp_path: Path) -> Path:
    folder = tmp_path / "template"
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg" / "__init__.py").write_text("answer = 42\n")
    (folder / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (folder / "run.sh").chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSandboxes]:
    provider = LocalSandboxes(root=tmp_path_factory.mktemp("local"))
    yield provider
    asyncio.run(provider.close())
