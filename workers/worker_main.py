"""The frame of every worker process: become one, say hello, serve run after run, report why it ends.

`python -P -m workers.worker_main MODULE ENDPOINT INCARNATION PARENT`. It becomes a worker before it imports the role's
module: torch takes seconds to load, in which the process must already die with its parent.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from shm.errors import HeadwayError
from workers.channel import WorkerChannel
from workers.errors import ChannelError
from workers.machine.limits import MOST_DESCRIPTORS, raise_descriptor_limit, refusal_in_words
from workers.messages import Failed, Hello, Start, Stop
from workers.processes.stacks import answer_with_stacks

PR_SET_PDEATHSIG = 1
START_SECONDS = 3600.0  # bound on the wait for a start message; a sampler's comes when the learner is ready

# serve(channel, config) runs one run and returns the next run's config, or None to end.
Serve = Callable[[WorkerChannel, dict[str, Any]], dict[str, Any] | None]


def become_worker(parent: int) -> None:
    """Die with the parent, be deaf to SIGINT (the supervisor alone decides), leave a trace on a crash, and have as many
    descriptors as there may be: users' agents hold connections.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise ChannelError(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}.")
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    raise_descriptor_limit(MOST_DESCRIPTORS)
    answer_with_stacks()


def load(module: str) -> Serve:
    """The module's `serve`. What is imported stays for good: no collection walks it, now or later. For torch's modules
    that is a tenth of the processor's time that a worker needs to be up.
    """
    gc.disable()
    try:
        return importlib.import_module(module).serve
    finally:
        gc.freeze()
        gc.enable()


def log_to(path: str) -> None:
    """Write what this process prints to `path` from now on: each run has a log of its own."""
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def wait_for_start(channel: WorkerChannel, role: str) -> dict[str, Any] | None:
    """The config of the first run; None when told to stop. Raises ChannelError when nobody speaks."""
    channel.send(Hello(role=role, pid=os.getpid()))
    message = channel.receive(START_SECONDS)
    if isinstance(message, Start):
        return message.config
    if isinstance(message, Stop):
        return None
    raise ChannelError(f"The {role} waited {START_SECONDS:g} s for its start message and got {message!r:.80}.")


def main() -> None:
    """Serve with the module's `serve` until told to stop. Ends the process."""
    module, endpoint, incarnation, parent = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    become_worker(parent)
    channel = WorkerChannel(endpoint, incarnation)
    status = 0
    try:
        serve = load(module)
        config = wait_for_start(channel, module)
        while config is not None:
            log_to(config["log_path"])
            config = serve(channel, config)
            if config is not None:
                gc.collect()  # what the run has left
    except Exception as error:  # the outermost frame: report, then exit
        status = 1
        with contextlib.suppress(OSError):  # on a full disk the message is all that tells
            print(traceback.format_exc(), file=sys.stderr, flush=True)
        why = str(error) if isinstance(error, HeadwayError) else f"{type(error).__name__}: {error}"
        if isinstance(error, OSError | MemoryError) and not isinstance(error, HeadwayError):
            why = refusal_in_words(error) or why
        # A user's text may hold half a surrogate pair, which no message can carry: ? instead.
        why = why.encode("utf-8", "replace").decode("utf-8")
        channel.send(Failed(why=why, is_final=isinstance(error, HeadwayError)))
    channel.close()
    with contextlib.suppress(OSError):  # the log's disk is full
        sys.stdout.flush()
        sys.stderr.flush()
    # Without the interpreter's teardown: mapped blocks and torch's threads need none, and it can hang.
    os._exit(status)


if __name__ == "__main__":
    main()
