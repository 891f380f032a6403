"""A limit on the attempts that may fail by program errors before the run stops."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from turnstile.errors import TurnstileError, is_shared

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Failures:
    """Counts the attempts of a run, in one process, that failed by an error of the program.

    Up to `limit` of them are given up like attempts in which infrastructure failed; the next error is raised. With a
    limit of 0 the first one is.
    """

    limit: int = 0
    count: int = 0

    def tolerates(self, fault: Exception, where: str) -> bool:
        """Return whether the other episodes continue after this error, and log it with its traceback if so.

        TurnstileErrors are never tolerated, nor are errors of the engine, which many episodes share.
        """
        if isinstance(fault, TurnstileError) or is_shared(fault):
            return False
        self.count += 1
        if self.count > self.limit:
            return False
        _log.warning(
            "%s: %s: %s; this attempt is given up, the others continue (%d of at most %d, rollout.max_failures)",
            where, type(fault).__name__, fault, self.count, self.limit, exc_info=fault,
        )  # fmt: skip
        return True

    def note(self) -> str:
        """Return what to add to the note of an error that was not tolerated: how many were before it."""
        return f"; {self.limit} attempts had failed before it (rollout.max_failures)" if self.limit else ""
