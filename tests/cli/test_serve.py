"""`turnstile serve`: the real command in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from helpers import byte_tokenizer, tiny_llama
from turnstile.cli.main import run


@pytest.mark.slow
def test_serves_a_folder_until_it_is_told_to_end(tmp_path: Path) -> None:
    words = byte_tokenizer()
    words.save_pretrained(tmp_path / "model")
    tiny_llama(len(words)).save_pretrained(tmp_path / "model")
    command = ["serve", str(tmp_path / "model"), "engine.pack_weights=false", "--port", "0", "--name", "tiny"]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "turnstile", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("tiny is served at http://127.0.0.1:")
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 3}
        asked = urllib.request.Request(f"{said.split()[-1]}/chat/completions", json.dumps(body).encode())
        with urllib.request.urlopen(asked, timeout=120) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] <= 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()


def test_other_machines_need_a_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("TURNSTILE_SERVE_TOKEN", raising=False)
    assert run(["serve", "none", "--host", "0.0.0.0"]) == 2
    assert "clients must have a key: set TURNSTILE_SERVE_TOKEN" in capsys.readouterr().err
