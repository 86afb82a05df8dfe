"""Warnings of a run under way: somebody should know, and asks for nothing just now."""

import warnings


class RunWarning(UserWarning):
    """Something stands still or went wrong; the message says what, and what comes of it. The run goes on, unless that
    says otherwise.
    """


def warn_of_run(sentence: str) -> None:
    """Warn at once, each time: a sentence that was told before may be news again (without a registry, none is passed
    over).
    """
    warnings.warn_explicit(sentence, RunWarning, "headway", 1)
