"""Worker processes that serve one Supervisor after another, in file after file of a test session.

To start a learner and a sampler takes several seconds of the processor, most of it torch, and a short run takes less
than one. What these processes can't prove, how a user's own are started and ended, is proved by the tests that start
run.py, a script, or a Supervisor of their own.
"""

import contextlib
import io
import runpy
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pipeline as rl
from pipeline.commands import cli
from pipeline.processes.worker.worker_handle import WorkerHandle
from pipeline.processes.worker.worker_pool import WorkerPool

OUR_ENVIRONMENTS = "pipeline.tasks."  # how the paths of environments begin in which there is no code of a user's
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # whose handlers a command changes for good


class KeptHandle(WorkerHandle):
    """Knows whether its process may have imported a user's modules, which it does once and for all."""

    holds_users_code = False

    def spawn(self, *arguments: Any) -> None:
        self.holds_users_code = False
        super().spawn(*arguments)

    async def start(self, config: dict[str, Any], log_dir: str) -> dict[str, Any]:
        environment = config.get("environment", "")
        paths = environment.values() if isinstance(environment, dict) else [environment]
        self.holds_users_code |= not all(path.startswith(OUR_ENVIRONMENTS) for path in paths)
        return await super().start(config, log_dir)


class KeptProcesses(WorkerPool):
    """A pool that its Supervisors leave as it is; `end` ends it."""

    def handle(self, role: str, index: int, module: str, threads: int) -> WorkerHandle:
        self._handles.setdefault((role, index), KeptHandle(role, index, module, threads))
        return super().handle(role, index, module, threads)

    def close(self) -> None:
        """What a Supervisor calls at its end."""

    def end(self) -> None:
        """Ask all to end and wait for it, as a Supervisor's end does."""
        super().close()

    @property
    def pids(self) -> set[int]:
        """Of the processes that serve or wait for the next Supervisor; none that was replaced is among them."""
        return {handle.pid for handle in self.handles if handle.started}

    @contextlib.contextmanager
    def serve(self) -> Iterator[None]:
        """Every Supervisor that is made meanwhile takes these processes, one after the other. What a command changes
        for good in its process is undone.
        """
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pipeline.supervisor.WorkerPool", lambda: self)
            patch.setattr(sys, "path", list(sys.path))
            patch.setattr("warnings.showwarning", warnings.showwarning)
            try:
                yield
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        self.forget(users_code_only=True)

    @contextlib.contextmanager
    def supervisor(self, *arguments: Any, **options: Any) -> Iterator[rl.Supervisor]:
        """A Supervisor with these options, on these processes; no other takes them meanwhile."""
        self.forget()
        with self.serve():
            model = rl.Supervisor(*arguments, **options)
        yield model
        if model._run is not None:  # what a failed test has left: nobody after it is to meet that
            self.end()
        self.forget()

    def forget(self, *, users_code_only: bool = False) -> None:
        """End the environment processes; those alone in which a user's modules may be, if asked for."""
        for handle in self.handles:
            if handle.role == "environment" and (handle.holds_users_code or not users_code_only):
                handle.discard()

    def command(self, directory: Path, *arguments: str) -> tuple[int, str, str]:
        """`headway` with these arguments, in this process: its exit code, stdout and stderr."""
        with self.serve(), _printing(directory) as (out, err):
            code = cli.main(arguments)
        return code, out.getvalue(), err.getvalue()

    def script(self, directory: Path, path: Path) -> str:
        """A script, as it is run from a shell, in this process; what it prints. Raises what it raises."""
        with self.serve(), _printing(directory) as (out, _):
            sys.path.insert(0, str(path.parent))
            runpy.run_path(str(path), run_name="__main__")
        return out.getvalue()


KEPT = KeptProcesses()  # of this session; tests/conftest.py ends them with it


@contextlib.contextmanager
def _printing(directory: Path) -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """In `directory`; (stdout, stderr) get what is printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(directory), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield out, err
