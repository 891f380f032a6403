"""A limit on how many attempts may fail by program errors before the run stops."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from turnstile.errors import TurnstileError, is_shared

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Failures:
    """Counts the attempts in one process of a run that failed by a program error.

    Up to `limit` such attempts are given up, like attempts whose infrastructure failed; the next error is raised. With
    `limit` 0 the first error is raised.
    """

    limit: int = 0
    count: int = 0

    def tolerates(self, fault: Exception, where: str) -> bool:
        """Count a failure and return whether the run continues; if so, log the error with its traceback.

        TurnstileErrors and errors that many episodes share, such as the engine's, are neither counted nor tolerated.
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
        """Return the text that tells how many attempts failed before an untolerated error; "" if `limit` is 0."""
        return f"; {self.limit} attempts had failed before it (rollout.max_failures)" if self.limit else ""
