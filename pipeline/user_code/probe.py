"""What users' code says of itself, asked in a process of its own before any worker starts.

The process (`probe_process.py`) imports the code, makes an instance, and answers with plain values: msgpack in a
memory file, bounded, nothing of it ever unpickled. It dies with this one, as does whatever it starts; what users' code
prints goes to stderr. So a mistake in it costs a second and no model is loaded, and whatever it does while being
imported, it does elsewhere.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from typing import Any, NamedTuple

import msgpack

from pipeline.errors import ConfigError, ConfigTypeError
from pipeline.user_code.description import MAX_ANSWER_BYTES, describe
from pipeline.user_code.named import checked_path
from pipeline.user_code.source import EnvSource
from shm.errors import HeadwayError
from workers.import_path import search_path
from workers.processes.keeper import KEEPER
from workers.processes.process import KEEPER_END_SECONDS, KILLED_SECONDS, ROOT, end_kept, signal_name, start_kept

MODULE = "pipeline.user_code.probe_process"
TIMEOUT = 600.0  # seconds; rows of some puzzles take long to make
REPORT_SECONDS = 10.0  # between two lines that tell of a wait

_ERRORS: dict[str, type[HeadwayError]] = {cls.__name__: cls for cls in (ConfigError, ConfigTypeError)}


class EnvDescription(NamedTuple):
    """What an environment says of itself: its class's name, its tools' names, what its unfinished trajectories may be
    gone on with, and the rows that it brings along (None: they come from data).
    """

    name: str
    tools: list[str]
    recovery: str
    rows: list[dict[str, Any]] | None


def describe_environments(
    source: EnvSource, *, seed: int = 0, without_rows: Collection[str] = (), timeout: float = TIMEOUT
) -> dict[str, EnvDescription]:
    """Of each environment of the source, by name ("" if it isn't a mix): imported, and an instance made.

    seed: of the rows. without_rows: the names of those that need not make theirs, which may take long. Raises
    ConfigError or ConfigTypeError for what can't be imported or made, also when that takes longer than `timeout`
    seconds or ends the process.
    """
    parts = source.parts
    if source.runs_in_thread:  # no other process can import it, and it is in this one already
        makers, _ = source.load_makers()
        found = {
            name: describe(maker.func, parts[name].arguments, None if name in without_rows else seed)
            for name, maker in (makers.items() if source.is_mix else [("", makers)])
        }
    else:
        asked = {
            name: [part.path, part.arguments, None if name in without_rows else seed] for name, part in parts.items()
        }
        what = ", ".join(str(part.path) for part in parts.values())
        found = _ask({"environments": asked}, f"The environment {what}", timeout)
    return {name: EnvDescription(**answer) for name, answer in found.items()}


def describe_environment(
    source: EnvSource, *, seed: int = 0, with_rows: bool = True, timeout: float = TIMEOUT
) -> EnvDescription:
    """The same of a source that isn't a mix."""
    without_rows = () if with_rows else ("",)
    (description,) = describe_environments(source, seed=seed, without_rows=without_rows, timeout=timeout).values()
    return description


def env_rows(env: Any, env_arguments: dict[str, Any] | None = None, *, seed: int = 0) -> list[dict[str, Any]]:
    """The rows that an environment brings along, such as those of `reasoning_gym:chain_sum`. env and env_arguments as
    `RolloutEngine` takes them. Raises ConfigError if its rows come from data.
    """
    source = EnvSource(env, {} if env_arguments is None else env_arguments)
    rows: list[dict[str, Any]] = []
    for name, found in describe_environments(source, seed=seed).items():
        if found.rows is None:
            raise ConfigError(
                f"The environment {found.name} brings no rows along: they come from data. Load them with rl.load_rows."
            )
        rows += [row | {"environment": name} for row in found.rows] if source.is_mix else found.rows
    return rows


def call_rows(path: str, *, timeout: float = TIMEOUT) -> list[dict[str, Any]]:
    """The rows that the function at `module:function` or `path/to/file.py:function` gives, called without arguments.
    Raises as `describe_environments` does.
    """
    path = checked_path(path, "data", "my_data:rows", or_itself=False)
    return _ask({"rows": path}, f"The data {path}", timeout)


def _ask(question: dict[str, Any], what: str, timeout: float) -> Any:
    python_path = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
    asked, answer = os.memfd_create("headway-question"), os.memfd_create("headway-answer")
    try:
        with open(asked, "wb", closefd=False) as file:
            file.write(msgpack.packb(question | {"sys_path": search_path()}))
        os.lseek(asked, 0, os.SEEK_SET)
        process, told = start_kept(
            [sys.executable, "-P", "-m", MODULE, KEEPER, str(answer)],
            stdin=asked,
            stdout=2,  # nothing that users' code prints may be taken for our output
            pass_fds=[answer],
            start_new_session=True,
            # The hash of text is fixed: rows that are made by going through a set are the same each time.
            env=os.environ | {"PYTHONPATH": python_path, "PYTHONHASHSEED": "0"},
        )
        os.close(told)
        status = _wait(process, what, timeout)
        if status is None:
            raise ConfigError(
                f"{what} has not come up within {timeout:g} s: importing it, or making an instance or its rows, takes "
                "too long. See what it waits for, or make less at the start."
            )
        return _read(answer, what, status)
    finally:
        os.close(asked)
        os.close(answer)


def _wait(process: subprocess.Popen, what: str, timeout: float) -> int | None:
    """Its exit status, or None after `timeout` seconds; it and whatever users' code has started are gone then. A long
    wait is told of on stderr.
    """
    began, reported = time.monotonic(), 0.0
    pidfd = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        while not (ended := poll.poll(1000 * min(REPORT_SECONDS, max(0.0, timeout - reported)))):
            reported = time.monotonic() - began
            if reported >= timeout:
                break
            print(f"waiting for {what[0].lower()}{what[1:]} to come up: {reported:.0f} s so far", file=sys.stderr)
    finally:
        end_kept(process)
        poll.poll(1000 * KEEPER_END_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)  # it isn't reaped yet, so that the number is still its session's
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel can't end it yet: a dead disk
            process.wait(KILLED_SECONDS)
        os.close(pidfd)
    return process.returncode if ended else None


def _read(file: int, what: str, status: int) -> Any:
    """The answer: its value, or the error that it tells of."""
    size = os.fstat(file).st_size
    if status != 0 or not 0 < size <= MAX_ANSWER_BYTES:
        ended = f"was killed by {signal_name(-status)}" if status < 0 else f"ended with status {status}"
        raise ConfigError(
            f"{what} can't be used: the process that imports it {ended} before it had answered. What it said is above."
        )
    answer = msgpack.unpackb(os.pread(file, size, 0), strict_map_key=False)
    if "error" in answer:
        raise _ERRORS[answer["kind"]](answer["error"])
    return answer["found"]
