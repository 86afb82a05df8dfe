"""A sampler that can't use the weights of a version; as a worker's module, told by `cannot-use` beside its log: the
version, and whether it raises or is killed in the middle of it. Killed once only: `died` tells that it was.
"""

import os
import signal
from pathlib import Path
from typing import Any

from workers.channel import WorkerChannel
from workers.sampler import Sampler
from workers.serving import serve_run


class Failing(Sampler):
    """What `config["log_path"]` leads to is told above."""

    def __init__(self, channel: WorkerChannel, config: dict[str, Any], *arguments: Any) -> None:
        super().__init__(channel, config, *arguments)
        self._folder = Path(config["log_path"]).parent
        version, self._how = (self._folder / "cannot-use").read_text().split()
        set_weights = self.engine.set_weights

        def fail(found, weights):
            if found == int(version):
                self._fail(found)
            set_weights(found, weights)

        self.engine.set_weights = fail

    def _fail(self, version: int) -> None:
        if self._how == "raises":
            raise RuntimeError(f"version {version} can't be used")
        if not (self._folder / "died").exists():
            (self._folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def serve(channel: WorkerChannel, config: dict[str, Any]) -> dict[str, Any] | None:
    """As the module of a worker."""
    return serve_run(channel, config, Failing)
