"""How many attempts a fault of the program may cost before it stops a run."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from turnstile.errors import TurnstileError, is_shared

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Failures:
    """Counts the attempts of a run, in one process, that met a fault of the program. `most` of them are given up, like
    those in which infrastructure failed; the next one's fault is raised. 0: the first one's is."""

    limit: int = 0
    count: int = 0

    def tolerates(self, fault: Exception, where: str) -> bool:
        """Whether the other episodes go on, which the log then says with the fault's traceback. An error that is raised
        on purpose is never forgiven, nor is a fault of the engine, which many episodes share."""
        if isinstance(fault, TurnstileError) or is_shared(fault):
            return False
        self.count += 1
        if self.count > self.limit:
            return False
        _log.warning(
            "%s: %s: %s; this attempt is given up, the others go on (%d of at most %d, rollout.max_failures)",
            where, type(fault).__name__, fault, self.count, self.limit, exc_info=fault,
        )  # fmt: skip
        return True

    def note(self) -> str:
        """What is to be said of a fault that was not forgiven, besides where it was."""
        return f"; {self.limit} attempts had failed so before it (rollout.max_failures)" if self.limit else ""
