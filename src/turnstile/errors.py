"""Every error a user can meet. One line: what is wrong, where, and how to mend it."""

from __future__ import annotations

import signal

RESUME_HINT = "what is finished is kept, and the same command goes on from there"
"""What a run that was stopped is told."""


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
    """A checkpoint is missing, torn or of another run."""


class LedgerError(TurnstileError):
    """The ledger of a run is missing, damaged or of another version."""


class TrainingError(TurnstileError):
    """Training cannot go on (for example too many steps with gradients that are not finite)."""


class ReplayError(TurnstileError):
    """A run cannot be trained again from its record."""


class StoppedError(TurnstileError):
    """A signal asked the run to stop. It did, and goes on from there when it is started again."""

    def __init__(self, by: signal.Signals) -> None:
        super().__init__(f"stopped by {by.name}; {RESUME_HINT}")
        self.exit_code = 128 + by


class RunFolderError(TurnstileError):
    """A run's folder cannot be written, or another process is at work in it."""


class InfrastructureError(TurnstileError):
    """Something under the episode broke: not the agent's fault, so never a reward of zero.

    An episode that meets one ends with `Stop.ERROR`; it is retried, masked and counted.
    """


class SandboxError(InfrastructureError):
    """The sandbox died, could not start or stopped answering."""


class ContainerDiedError(SandboxError):
    """A container ended, or stopped answering, while it was in use."""


class DaemonError(SandboxError):
    """The daemon that runs containers does not answer, or could not do what it was asked to."""


class OutOfMemoryError(SandboxError):
    """The kernel killed a process because its sandbox had used up its memory."""


class DiskFullError(SandboxError):
    """A sandbox has used up its disk, or the machine that it runs on has."""


class EngineError(InfrastructureError):
    """The engine could not sample."""


def is_shared(fault: BaseException) -> bool:
    """Whether a fault met several requests of the engine at once, so that no single episode is its place."""
    return any(note.startswith(ENGINE_NOTE) for note in getattr(fault, "__notes__", ()))


ENGINE_NOTE = "in the engine, "
"""How the note begins that the engine adds to a fault that several requests share."""


class EngineGoneError(EngineError):
    """The server that samples cannot be reached, or does not say that it is there."""


class RequestFailedError(EngineError):
    """A server was reached and could not answer one request. `again`: whether it may be able to when it is asked again;
    `pause`: for how many seconds it wants no request."""

    def __init__(self, text: str, *, again: bool, pause: float | None = None) -> None:
        super().__init__(text)
        self.again = again
        self.pause = pause


class WeightsLostError(EngineError):
    """A server no longer samples with the weights that training gave it."""


class VerifierError(InfrastructureError):
    """The verdict could not be had: the verifier crashed, was killed or wrote nothing."""


class VerifierKilledError(VerifierError):
    """The process that judged got SIGKILL: the machine is short of memory, or the code under test did it itself.

    Nobody can tell which, so it is no score of 0; that it keeps happening to a task or a policy is counted and shown.
    """
