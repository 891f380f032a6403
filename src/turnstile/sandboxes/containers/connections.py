"""The SDK's client, changed to share connections and not to leak sockets.

The original keeps a pool of connections for each address that it has ever connected to, and leaves the socket of a
failed connection to the garbage collector.
"""

from __future__ import annotations

import socket
from typing import Any

import docker
from docker.transport.unixconn import UnixHTTPAdapter, UnixHTTPConnection, UnixHTTPConnectionPool


class Client(docker.APIClient):  # type: ignore[misc]
    """A client of a daemon. Calls fail once it is closed."""

    def mount(self, prefix: str, adapter: Any) -> None:
        if isinstance(adapter, UnixHTTPAdapter):
            adapter = _Adapter(adapter.socket_path, adapter.timeout, max_pool_size=adapter.max_pool_size)
        super().mount(prefix, adapter)


class _Adapter(UnixHTTPAdapter):  # type: ignore[misc]
    def __init__(self, path: str, timeout: float, *, max_pool_size: int) -> None:
        super().__init__(path, timeout, max_pool_size=max_pool_size)
        self._pool = _Pool(path, path, timeout, maxsize=max_pool_size)

    def get_connection(self, url: str, proxies: Any = None) -> UnixHTTPConnectionPool:
        return self._pool

    def close(self) -> None:
        super().close()
        self._pool.close()


class _Pool(UnixHTTPConnectionPool):  # type: ignore[misc]
    def _new_conn(self) -> UnixHTTPConnection:
        return _Connection(self.base_url, self.socket_path, self.timeout)


class _Connection(UnixHTTPConnection):  # type: ignore[misc]
    def connect(self) -> None:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.settimeout(self.timeout)
            made.connect(self.unix_socket)
        except BaseException:
            made.close()
            raise
        self.sock = made
