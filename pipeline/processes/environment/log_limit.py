"""A bound on what users' code may print: the log of an environment process is cut when it gets too long."""

import os

MAX_LOG_BYTES = 64 << 20
KEPT_BYTES = 1 << 20  # of its end, then


def limit_log(path: str, max_bytes: int = MAX_LOG_BYTES, kept_bytes: int = KEPT_BYTES) -> bool:
    """Cut the file to its end if it has more than max_bytes; who writes it must append. What is written at this very
    moment may be lost. Returns whether it was cut.
    """
    try:
        size = os.path.getsize(path)
        if size <= max_bytes:
            return False
        with open(path, "r+b") as log:
            log.seek(size - kept_bytes)
            end = log.read(kept_bytes)
            log.truncate(0)
        with open(path, "ab") as log:
            log.write(b"[%d bytes before this were cut: a log holds %d]\n" % (size - len(end), max_bytes) + end)
    except OSError:  # it is gone, or the disk is full: nothing that a log may end a run for
        return False
    return True
