"""Where verifiers runs programs, tool servers among them: as children of this process that leave nothing behind.

verifiers' own subprocess runtime keeps its directories in the user's home, a tool server's port file in /tmp, and
children that outlive a killed process. Here all files lie in one directory, which goes with the run whatever ends the
process, and the kernel ends the children with it.
"""

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

from verifiers.v1.runtimes.base import ProgramResult, RuntimeProcess
from verifiers.v1.runtimes.subprocess import SubprocessRuntime

from pipeline.adapters.tied_process import tied
from workers.processes.sockets import RUN_FILES

PORT_FILE = "MCP_PORT_FILE"  # where a tool server writes its port


class TiedRuntime(SubprocessRuntime):
    """As verifiers' subprocess runtime, in a directory of the run, with children that die with this process."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._moved: dict[str, str] = {}

    async def start(self) -> None:
        self.workdir = process_directory() / self.name
        self.workdir.mkdir(parents=True)
        self.info.id = str(self.workdir)

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        return await super().run(tied(argv), env)

    async def open_process(self, argv: list[str], env: dict[str, str]) -> RuntimeProcess:
        return await super().open_process(tied(argv), env)

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        named = env.get(PORT_FILE)
        if named is not None:
            self._moved[named] = str(self.workdir / Path(named).name)
            env = env | {PORT_FILE: self._moved[named]}
        await super().run_background(tied(argv), env, log)

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        return await super()._read(self._moved.get(path, path), max_bytes)


@functools.cache
def process_directory() -> Path:
    """This process's own: in the run's private directory, which the supervisor removes when its processes are dead;
    elsewhere a temporary one until the interpreter's end.
    """
    run_files = os.environ.get(RUN_FILES)
    if run_files is not None:
        return Path(run_files) / f"verifiers-{os.getpid()}"
    made = tempfile.mkdtemp(prefix="verifiers-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)
