from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def template(tmp_path: Path) -> Path:
    folder = tmp_path / "template"
    folder.mkdir()
    (folder / "name").write_text("template\n")
    return folder
