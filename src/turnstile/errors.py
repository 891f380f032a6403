"""All errors that a user can encounter. Each says in one line what is wrong, where, and how to fix it."""

from __future__ import annotations

import signal

RESUME_HINT = "finished work is kept, and the same command resumes from there"
"""Text that tells the user how to resume a stopped run."""


class TurnstileError(Exception):
    """The base class of all errors raised on purpose. The command line prints the text and exits with `exit_code`."""

    exit_code = 1


class ConfigError(TurnstileError):
    """A recipe, an override or a knob is wrong."""

    exit_code = 2


class ShapeError(ConfigError):
    """A function has the wrong signature for its kind, or returns something of the wrong form."""


class MissingExtraError(TurnstileError):
    """An optional dependency is not installed."""

    exit_code = 2

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an optional dependency; install it with: pip install 'turnstile-rl[{extra}]'")


class TaskError(TurnstileError):
    """A task file or a task source cannot be used."""


class CheckpointError(TurnstileError):
    """A checkpoint is missing, incomplete or from another run."""


class LedgerError(TurnstileError):
    """The ledger of a run is missing, damaged or from another version."""


class TrainingError(TurnstileError):
    """Training cannot continue, for example after too many steps with gradients that are not finite."""


class ReplayError(TurnstileError):
    """Training cannot be repeated from a run's record."""


class StoppedError(TurnstileError):
    """A signal stopped the run, which resumes when it is started again."""

    def __init__(self, by: signal.Signals) -> None:
        super().__init__(f"stopped by {by.name}; {RESUME_HINT}")
        self.exit_code = 128 + by


class RunFolderError(TurnstileError):
    """A run's folder cannot be written, or another process is using it."""


class InfrastructureError(TurnstileError):
    """Something other than the agent failed, which is therefore never scored as a reward of zero.

    The episode ends with `Stop.ERROR`; it is retried, excluded from training and counted.
    """


class SandboxError(InfrastructureError):
    """The sandbox died, could not start or stopped answering."""


class ContainerDiedError(SandboxError):
    """A container exited, or stopped answering, while in use."""


class DaemonError(SandboxError):
    """The container daemon does not answer, or could not carry out a request."""


class OutOfMemoryError(SandboxError):
    """The kernel killed a process because its sandbox ran out of memory."""


class DiskFullError(SandboxError):
    """A sandbox, or the machine that it runs on, ran out of disk space."""


class EngineError(InfrastructureError):
    """The engine could not sample."""


def is_shared(fault: BaseException) -> bool:
    """Return whether an error hit several requests of the engine at once, so that it belongs to no single episode."""
    return any(note.startswith(ENGINE_NOTE) for note in getattr(fault, "__notes__", ()))


ENGINE_NOTE = "in the engine, "
"""Beginning of the note that the engine adds to an error shared by several requests."""


class EngineGoneError(EngineError):
    """The server that samples cannot be reached or does not answer."""


class RequestFailedError(EngineError):
    """A server was reached but could not answer one request.

    `again` says whether a retry may succeed; `pause` is for how many seconds the server wants no requests.
    """

    def __init__(self, text: str, *, again: bool, pause: float | None = None) -> None:
        super().__init__(text)
        self.again = again
        self.pause = pause


class WeightsLostError(EngineError):
    """A server no longer samples with the weights that training gave it."""


class VerifierError(InfrastructureError):
    """There is no verdict: the verifier crashed, was killed or wrote nothing."""


class VerifierKilledError(VerifierError):
    """The grading process got SIGKILL, either for lack of memory or from the code under test.

    The two causes cannot be distinguished, so the attempt is not scored 0. Such cases are counted, and an alarm reports
    them if they recur.
    """
