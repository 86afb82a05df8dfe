"""Errors of the worker layer."""

from shm.errors import HeadwayError


class MessageError(HeadwayError, ValueError):
    """A message is of another protocol version, of no known kind, or has fields of the wrong type."""


class ChannelError(HeadwayError, RuntimeError):
    """A channel was used from another thread than its own, or after it was closed."""


class WorkerDied(HeadwayError, RuntimeError):
    """A worker process ended; the message holds its role, pid, how it ended and its last words.

    by_signal: someone or something killed it (the kernel, for want of memory; a crash), it did not end by itself.
    """

    def __init__(self, message: str, *, by_signal: bool = False) -> None:
        super().__init__(message)
        self.by_signal = by_signal


class WorkerFailed(WorkerDied):
    """It ended itself over a broken rule, which its successor would meet as well."""


class NonFiniteError(HeadwayError, ArithmeticError):
    """A loss or gradient is not finite; no parameter and no slot has been touched."""


class ModelConfigError(HeadwayError, ValueError):
    """The numbers of a model configuration do not fit together, or ask for what no model of ours does."""


class CheckpointError(HeadwayError, ValueError):
    """Weights on disk are not whole, not this model's, or can't be written; the message names tensors and files."""


class ImportPathError(HeadwayError, ValueError):
    """What a user named as `module:name` or `file.py:name` can't be imported; the message says why."""
