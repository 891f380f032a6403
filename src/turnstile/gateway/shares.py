"""The prefixes that the requests of one client session share, kept while the session is in use."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict

from turnstile.engines.base import Engine

SHARE_SECONDS = 60.0  # seconds that the shared prefixes of a session are kept after its last request
MAX_SHARES = 256  # sessions whose shared prefixes are kept; the least recently used are dropped


class SessionShares:
    """Keeps computed prefixes in `engine` for each client session, by holding an engine session open for it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # name of a client session -> (the engine session that holds its prefixes, time of last use)
        self._held: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._expiry: asyncio.TimerHandle | None = None

    def keep(self, name: str) -> str:
        """Return the share of a client session, and keep its prefixes until it has been unused for a while."""
        share = f"group/{name}"
        session = self._held.pop(name)[0] if name in self._held else self._engine.open(share)
        self._held[name] = session, time.monotonic()
        self._expire()
        return share

    def close(self) -> None:
        """Drop all prefixes."""
        while self._held:
            self._engine.close(self._held.popitem(last=False)[1][0])
        self._expire()

    def _expire(self) -> None:
        """Drop the prefixes that have expired or are too many. While some are left, run again later."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        old = time.monotonic() - SHARE_SECONDS
        while self._held and (len(self._held) > MAX_SHARES or next(iter(self._held.values()))[1] < old):
            self._engine.close(self._held.popitem(last=False)[1][0])
        if self._held:
            self._expiry = asyncio.get_running_loop().call_later(SHARE_SECONDS, self._expire)
