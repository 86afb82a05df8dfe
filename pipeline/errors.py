"""Errors that users meet."""

from shm.errors import HeadwayError


class ConfigError(HeadwayError, ValueError):
    """An option has a value out of range, an unknown name, or contradicts another one."""


class ConfigTypeError(HeadwayError, TypeError):
    """A required option is missing, or an option is of the wrong class."""


class InfrastructureError(HeadwayError, RuntimeError):
    """Raised by a user's tool or environment: the failure is the machinery's, not the model's."""


class RunError(HeadwayError, RuntimeError):
    """A run cannot go on; the message says why in one sentence."""


class JournalError(RunError):
    """What is on disk of a run can't be read, or contradicts itself; the message names the file and the place."""


class TrajectoryError(RunError):
    """A trajectory failed in user code; the message names group, member, the call and the cause."""


class TookTooLongError(TrajectoryError):
    """A trajectory failed because something of the user's did not end in its time."""


class HopelessError(TrajectoryError):
    """A trajectory failed in a way that a new start does not mend, or that new starts have not mended."""


class TemplateError(TrajectoryError):
    """A model's chat template can't render a conversation; the message names the template and its reason."""


def of_a_message(error: Exception) -> HeadwayError:
    """`error`, which a message of a worker led to, or one that tells of it in a sentence."""
    if isinstance(error, HeadwayError):
        return error
    told = RunError(f"A message could not be handled: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told
