"""What users are warned of: a setting that takes a risk (ConfigWarning), and what a run met with (RunWarning)."""

import sys
import warnings


class ConfigWarning(UserWarning):
    """A setting is accepted, but trades correctness or freshness away; the message says which."""


class RunWarning(UserWarning):
    """Something stands still or went wrong; the message says what, and what comes of it. The run goes on, unless that
    says otherwise.
    """


def warn(sentence: str) -> None:
    """Warn of a risk that the user asked for, at the line of theirs that did: the innermost one outside of Headway."""
    level, frame = 2, sys._getframe(1)
    # A dataclass's own __init__ counts as its module's; asyncio's frames stand between rl.run and what it runs.
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("pipeline", "asyncio"):
        level, frame = level + 1, frame.f_back
    warnings.warn(sentence, ConfigWarning, stacklevel=level)


def warn_of_run(sentence: str) -> None:
    """Warn at once, each time: a sentence that was told before may be news again (without a registry, none is passed
    over).
    """
    warnings.warn_explicit(sentence, RunWarning, "headway", 1)
