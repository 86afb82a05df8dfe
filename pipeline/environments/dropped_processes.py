"""Processes that users' code has started by `subprocess` and let go of: what they still print has no reader.

`subprocess` keeps such an object, and its pipes with it, until the process has ended, so one that prints into a pipe
waits there for ever. Without the pipe it ends as in a shell whose reader is gone, by SIGPIPE. One whose pipe somebody
else holds (`for line in Popen(…).stdout`), or that has none (a server), goes on.
"""

import subprocess


def let_go_of_pipes() -> None:
    """When a trajectory has ended. What is closed is what nobody else refers to."""
    for process in list(getattr(subprocess, "_active", None) or ()):  # CPython's own list of them
        process.stdin = process.stdout = process.stderr = None
        process.poll()
