"""Every error that a user can meet. One line: what is wrong, where, and how to fix it."""

from __future__ import annotations

import signal

RESUME_HINT = "finished work is kept, and the same command resumes from there"
"""What a stopped run tells the user."""


class TurnstileError(Exception):
    """Base of all errors raised on purpose. The command line prints its text and exits with `exit_code`."""

    exit_code = 1


class ConfigError(TurnstileError):
    """A recipe, an override or a knob is wrong."""

    exit_code = 2


class ShapeError(ConfigError):
    """A function is not called as its kind is, or returns something else."""


class MissingExtraError(TurnstileError):
    """An optional dependency is not installed."""

    exit_code = 2

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an optional dependency; install it with: pip install 'turnstile-rl[{extra}]'")


class TaskError(TurnstileError):
    """A task file or a task source cannot be used."""


class CheckpointError(TurnstileError):
    """A checkpoint is missing, incomplete or of another run."""


class LedgerError(TurnstileError):
    """The ledger of a run is missing, damaged or of another version."""


class TrainingError(TurnstileError):
    """Training cannot continue (for example after too many steps with gradients that are not finite)."""


class ReplayError(TurnstileError):
    """A run cannot be trained again from its record."""


class StoppedError(TurnstileError):
    """A signal stopped the run, which resumes from there when it is started again."""

    def __init__(self, by: signal.Signals) -> None:
        super().__init__(f"stopped by {by.name}; {RESUME_HINT}")
        self.exit_code = 128 + by


class RunFolderError(TurnstileError):
    """A run's folder cannot be written, or another process is using it."""


class InfrastructureError(TurnstileError):
    """Something below the episode broke: not the agent's fault, so never a reward of zero.

    The episode ends with `Stop.ERROR`; it is retried, masked and counted.
    """


class SandboxError(InfrastructureError):
    """The sandbox died, could not start or stopped answering."""


class ContainerDiedError(SandboxError):
    """A container ended, or stopped answering, while it was in use."""


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
"""Start of the note that the engine adds to an error that several requests share."""


class EngineGoneError(EngineError):
    """The server that samples cannot be reached, or does not answer."""


class RequestFailedError(EngineError):
    """A server was reached but could not answer one request.

    `again`: whether a retry may succeed; `pause`: seconds for which the server wants no request.
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
    """The grading process got SIGKILL: the machine is short of memory, or the code under test sent it.

    The two cannot be told apart, so it is not scored 0; repeated cases are counted per task and policy, and shown.
    """
