"""The connection to a daemon, against one that stops listening in the middle of a call."""

from __future__ import annotations

import gc
import socketserver
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from turnstile.errors import ConfigError, DaemonError

docker = pytest.importorskip("docker")

from turnstile.sandboxes.containers.daemon import Daemon, short  # noqa: E402 - needs an extra


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    accepted = 0

    def verify_request(self, request: object, client_address: object) -> bool:
        self.accepted += 1
        return True


class _Going(BaseHTTPRequestHandler):
    """Says its version; asked to remove a container, it says that one is ending, and listens no longer."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        listed = self.path.endswith("/containers/json") or "/images/" in self.path or "/containers/json?" in self.path
        self._answer(200, b"[]" if listed else b'{"ApiVersion": "1.44", "Version": "fake"}')

    def do_DELETE(self) -> None:
        self.server.server_close()
        self.close_connection = True
        self._answer(409, b'{"message": "removal is in progress"}')

    def _answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def going(tmp_path: Path) -> Iterator[_Server]:
    """Such a daemon."""
    with _Server(str(tmp_path / "socket"), _Going) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("call", [Daemon.version, Daemon.find, lambda daemon: daemon.remove("gone")])
def test_no_socket_is_left_open_where_nobody_listens_any_more(going: _Server, call: Callable[[Daemon], object]) -> None:
    """Else the collector says so in whatever runs next."""
    daemon = Daemon(f"unix://{going.server_address}")
    assert daemon.version() == "fake"
    with pytest.raises(DaemonError, match="the daemon does not answer"):
        daemon.remove("container")
    with pytest.raises(DaemonError, match="the daemon does not answer"):
        call(daemon)
    daemon.close()
    gc.collect()


def test_calls_share_a_connection(going: _Server) -> None:
    daemon = Daemon(f"unix://{going.server_address}")
    assert daemon.version() == "fake"
    assert len(daemon.find()) == 0
    assert going.accepted == 1
    daemon.close()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TimeoutError(), "TimeoutError"),
        (ValueError(" \n"), "ValueError"),
        (PermissionError(13, "Permission denied", "Dockerfile"), "[Errno 13] Permission denied: 'Dockerfile'"),
        (ConnectionRefusedError(111, "Connection refused"), "Connection refused"),
        (ValueError("first\nlast"), "last"),
    ],
)
def test_what_is_said_of_an_error(error: Exception, said: str) -> None:
    assert short(error) == said


def test_a_socket_of_nobody(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"needs a running Docker or Podman, and none answers at unix://.*No such file"
    ):
        Daemon(f"unix://{tmp_path / 'none'}")
    gc.collect()
