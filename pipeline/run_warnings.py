"""Warnings of a run under way: it goes on, but somebody should know."""

import warnings


class RunWarning(UserWarning):
    """Something stands still or went wrong, and the run goes on; the message says what, and what comes of it."""


def warn_of_run(sentence: str) -> None:
    """Warn at once, each time: a sentence that was told before may be news again (without a registry, none is passed
    over).
    """
    warnings.warn_explicit(sentence, RunWarning, "headway", 1)
