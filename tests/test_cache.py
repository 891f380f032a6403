from __future__ import annotations

from pathlib import Path

import pytest

from turnstile.cache import cache_dir


def test_the_cache_is_in_the_home_folder_or_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TURNSTILE_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("TURNSTILE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "turnstile"
    monkeypatch.setenv("TURNSTILE_CACHE", "~/elsewhere")
    assert cache_dir() == tmp_path / "elsewhere"
