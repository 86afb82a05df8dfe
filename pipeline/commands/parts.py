"""What a run and an evaluation of the command line have alike: their processes, their engine, and the signals that end
them.
"""

import asyncio
import contextlib
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from pipeline.commands.shared_config import SharedConfig, parse_template_options
from pipeline.commands.workload import Workload, tiny_chat
from pipeline.config_checks import ConfigWarning
from pipeline.endpoint.openai_endpoint import FILE_NAME as ENDPOINT_FILE
from pipeline.endpoint.openai_endpoint import OpenAIEndpoint
from pipeline.model_directory import TINY_NAME
from pipeline.rollouts.rollout_engine import RolloutEngine
from pipeline.supervisor import Supervisor
from pipeline.trainer_config import EngineConfig

ENDPOINT_SECONDS = 0.1  # between two looks whether the endpoint is there
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def supervisor_of(config: SharedConfig, *, init: str | None, slots: int | None = None) -> Supervisor:
    """The processes' owner for `config`. Raises ConfigError when its model can't be used."""
    return Supervisor(
        config.model,
        init=init,
        chat=tiny_chat(config.workload) if config.model == TINY_NAME else None,
        template_options=parse_template_options(config.template_options),
        tool_format=config.tool_format,
        samplers=config.samplers,
        device=config.device,
        dtype=config.dtype,
        slots=slots,
        kv_gib=config.kv_gib,
        worker_timeout=config.worker_timeout,
        max_restarts=config.max_restarts,
    )


def engine_of(model: Supervisor, workload: Workload, engine: EngineConfig) -> RolloutEngine:
    """Rollouts of the workload, as `engine` says."""
    values = {name: getattr(engine, name) for name in engine.__slots__}
    with without_warnings():
        return RolloutEngine(model, **workload.engine_arguments(engine.environment_timeout), **values)


async def tell_endpoint(
    engine: RolloutEngine, directory: Callable[[], Path | None], tell: Callable[[str], None]
) -> None:
    """Where agents come by themselves: `tell` where they find the endpoint and its key, as soon as it is there.
    directory: the run's, which has one by then.
    """
    endpoint = engine.env
    if not isinstance(endpoint, OpenAIEndpoint) or endpoint.agent is not None:
        return
    while endpoint.url is None:
        await asyncio.sleep(ENDPOINT_SECONDS)
    tell(f"endpoint: {endpoint.url}; its key is in {directory() / ENDPOINT_FILE}")


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """For configs made a second time: the same options were warned of when they were parsed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        yield


class Stoppable(Protocol):
    """A run that can end in order."""

    def request_stop(self) -> None: ...


class Signals:
    """The first SIGINT or SIGTERM asks the run to end in order, the second one ends it now."""

    def __init__(self, run: Stoppable) -> None:
        self.received: signal.Signals | None = None
        self._run = run
        self._task = asyncio.current_task()
        for number in EXIT_CODES:
            asyncio.get_running_loop().add_signal_handler(number, self._receive, number)

    def end_in_order(self, number: signal.Signals) -> None:
        """As if this signal had come first; nothing when one has come already."""
        if self.received is None:
            self.received = number
            self._run.request_stop()

    def _receive(self, number: signal.Signals) -> None:
        if self.received is None:
            self.end_in_order(number)
        else:
            self._task.cancel()


def end_by_sigterm() -> None:
    """Until a run has its own way with signals: SIGTERM ends this process with its exit code, and what is begun is
    undone, as it is after Ctrl-C.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(EXIT_CODES[signal.Signals(number)]))


def ignore_signals() -> None:
    """To be called when the outcome is decided: a signal must not change it while processes and Python end."""
    with contextlib.suppress(RuntimeError):  # no loop runs any more
        for number in EXIT_CODES:  # else the loop, when it is closed, would set the handlers from before
            asyncio.get_running_loop().remove_signal_handler(number)
    for number in EXIT_CODES:
        signal.signal(number, signal.SIG_IGN)
