"""What a run and an evaluation of the command line have alike: their processes, and their engine."""

import asyncio
import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline.commands.shared_config import SharedConfig, parse_template_options
from pipeline.commands.workload import Workload, tiny_chat
from pipeline.endpoint.openai_endpoint import OpenAIEndpoint
from pipeline.models.model_directory import TINY_NAME
from pipeline.rollouts.rollout_engine import RolloutEngine
from pipeline.run_dir.run_files import ENDPOINT
from pipeline.supervisor import Supervisor
from pipeline.trainer_config import EngineConfig
from pipeline.user_warnings import ConfigWarning

ENDPOINT_SECONDS = 0.1  # between two looks whether the endpoint is there


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
    tell(f"endpoint: {endpoint.url}; its key is in {directory() / ENDPOINT}")


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """For configs made a second time: the same options were warned of when they were parsed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        yield
