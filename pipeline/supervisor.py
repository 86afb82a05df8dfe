"""Supervisor: the model, and the processes that sample from it and train it."""

import asyncio
import json
import os
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipeline.chat.format import ChatFormat
from pipeline.config_checks import check_choice, check_flag, check_integer, check_number
from pipeline.endpoint.openai_endpoint import OpenAIEndpoint
from pipeline.errors import ConfigError, ConfigTypeError, RunError
from pipeline.memory.estimate import HOST
from pipeline.models.model_directory import TINY_NAME, TOOL_FORMATS, ModelSource, open_model, open_tiny
from pipeline.processes.active_run import ActiveRun
from pipeline.processes.learner.learner_history import StartingPoint
from pipeline.processes.system_limits import refuse_small_limits
from pipeline.processes.worker.worker_pool import WorkerPool
from pipeline.run_dir.events import EventLog
from pipeline.run_spec import RunSpec
from pipeline.tasks import TASKS
from pipeline.user_code.source import EnvSource
from pipeline.wording import quoted, shown
from shm.layout import ELEMENT_BYTES
from workers.machine.device_memory import DeviceMemory, gpu_memory, host_memory
from workers.machine.devices import count_gpus, resolve_devices, sampler_device
from workers.model_config import TINY, ModelConfig

EARLIER_RUN_SECONDS = 10.0  # what a new run waits for the end of the one before


class Supervisor:
    """Owns the processes. Entering it starts none: the first run does, once it is known what they must hold.

    model: "tiny", a small decoder from random weights, or a Hugging Face model directory. init: a run, or a model of
    the same shape, whose weights it starts from. chat: how conversations become its ids (default: the directory's own,
    for which template_options are variables of the chat template, and tool_format says how it writes tool calls; of
    "tiny" the words of the task `guess`). samplers: sampler processes. device: auto, cpu or cuda. dtype: what
    samplers and learner compute in, float32 or bfloat16; the learner's own weights, gradients and optimizer state are
    float32 either way. slots: copies of the weights (default `max_staleness + 2`, with an evaluator one more). kv_gib:
    GiB of each sampler's KV cache. worker_timeout: seconds without a sign of life after which a sampler or the learner
    is killed and replaced. max_restarts: how often processes of one kind may be replaced within ten minutes.
    model_config: the shape of "tiny", with room for all of chat's ids (default: a small one with as many as chat has).
    check_weights: samplers verify a checksum before every step (tests). Use it in `with`; leaving ends every process.
    Raises ConfigError for what can't be.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = TINY_NAME,
        *,
        init: str | os.PathLike[str] | None = None,
        chat: ChatFormat | None = None,
        template_options: Mapping[str, Any] | None = None,
        tool_format: str = "auto",
        samplers: int | None = None,
        device: str = "auto",
        dtype: str = "float32",
        slots: int | None = None,
        kv_gib: float | None = None,
        worker_timeout: float = 60.0,
        max_restarts: int = 5,
        model_config: ModelConfig | None = None,
        check_weights: bool = False,
    ) -> None:
        self.device, self.num_samplers = resolve_devices(device, samplers)
        if chat is not None and not isinstance(getattr(chat, "vocab_size", None), int):
            raise ConfigTypeError(f"chat is {shown(chat)}; give a chat format, such as rl.TinyChat(...).")
        self.tool_format = tool_format
        check_choice(self, "tool_format", TOOL_FORMATS)
        self.source = self._open(model, init, chat, template_options, model_config)
        self.chat = self.source.chat
        self.model_config = self.source.config
        if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
            raise ConfigError(f"dtype is {shown(dtype)}; it must be one of {quoted(tuple(ELEMENT_BYTES))}.")
        self.dtype = dtype
        self.slots = slots
        check_integer(self, "slots", minimum=1, unit="copies of the weights", optional=True)
        self.kv_gib = kv_gib
        check_number(self, "kv_gib", above=0.0, optional=True)
        self.worker_timeout = worker_timeout
        check_number(self, "worker_timeout", above=0.0)
        self.max_restarts = max_restarts
        check_integer(self, "max_restarts", minimum=0, unit="replaced processes")
        self.check_weights = check_weights
        check_flag(self, "check_weights")
        self._pool = WorkerPool()
        # For a script that uses no `with`: at its exit, or when nobody holds this object any more.
        weakref.finalize(self, self._pool.close)
        self._run: ActiveRun | None = None

    def _open(
        self,
        model: str | os.PathLike[str],
        init: str | os.PathLike[str] | None,
        chat: ChatFormat | None,
        template_options: Mapping[str, Any] | None,
        model_config: ModelConfig | None,
    ) -> ModelSource:
        is_tiny = isinstance(model, str) and model == TINY_NAME
        _check_template_options(template_options)
        if (is_tiny or chat is not None) and (template_options or self.tool_format != "auto"):
            why = "a chat format of your own has neither" if chat is not None else '"tiny" has no chat template'
            raise ConfigError(
                f"template_options and tool_format belong to a model directory, and {why}; leave them out."
            )
        if not is_tiny:
            if model_config is not None:
                raise ConfigError(f'model_config is that of "tiny", but model is {model}; leave it out.')
            return open_model(
                model, init=init, chat=chat, template_options=template_options, tool_format=self.tool_format
            )
        chat = TASKS["guess"].chat_format() if chat is None else chat
        if model_config is None:
            model_config = replace(TINY, vocab_size=chat.vocab_size)
        elif not isinstance(model_config, ModelConfig):
            raise ConfigTypeError(f"model_config is {shown(model_config)}; give rl.ModelConfig(...).")
        return open_tiny(model_config, chat, init)

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def close(self) -> None:
        """End every process and remove the socket directory. Idempotent."""
        self._pool.close()

    def devices(self) -> tuple[str, list[str]]:
        """Of the learner, and of each sampler."""
        if self.device == "cpu":
            return "cpu", ["cpu"] * self.num_samplers
        num_gpus = count_gpus()
        return "cuda:0", [sampler_device(index, num_gpus) for index in range(self.num_samplers)]

    def threads(self) -> tuple[int, int]:
        """Of the learner, and of each sampler: they divide the cores."""
        cores = len(os.sched_getaffinity(0))
        share = max(1, cores // (1 + self.num_samplers))
        return share, share

    def num_slots(self, max_staleness: int, *, evaluates: bool) -> int:
        """Slots of a run with this bound, one of them for the evaluation that may run. Raises ConfigError when `slots`
        is too few to keep the bound.
        """
        if self.slots is None:
            return max_staleness + 2 + evaluates
        least = max(2, max_staleness + 1) + evaluates
        if self.slots < least:
            held = ", an evaluation holds one more" if evaluates else ""
            raise ConfigError(
                f"slots is {self.slots}, but max_staleness={max_staleness} can have {max_staleness + 1} versions "
                f"in use at once{held}, and an update is written beside the version it replaces; use at least {least}."
            )
        return self.slots

    def memory(self) -> dict[str, DeviceMemory | None]:
        """Of the host and of each device in use, as it is now; None where nobody can tell."""
        learner, samplers = self.devices()
        gpus = sorted({learner, *samplers} - {HOST})
        return {HOST: host_memory()} | {gpu: gpu_memory(int(gpu.removeprefix("cuda:"))) for gpu in gpus}

    def num_environment_processes(self, spec: RunSpec, env: EnvSource) -> int:
        """Of a run."""
        default = max(1, len(os.sched_getaffinity(0)) // 4)
        return (spec.environment_processes or default) if env.runs_in_processes else 0

    def check_limits(self, spec: RunSpec, env: EnvSource) -> None:
        """Raise ConfigError where a run would meet a limit of this process; what it may raise itself is raised."""
        num_processes = self.num_environment_processes(spec, env)
        refuse_small_limits(spec, num_processes, has_endpoint=isinstance(env, OpenAIEndpoint))

    async def open_run(
        self,
        spec: RunSpec,
        env: EnvSource,
        *,
        events: EventLog,
        log_dir: str,
        max_requests: int,
        start: StartingPoint,
    ) -> ActiveRun:
        """Start a run's processes, or use them again. One run at a time, from the main thread."""
        deadline = time.monotonic() + EARLIER_RUN_SECONDS
        while self._run is not None:  # a run whose loop the caller has left may be ending just now
            if time.monotonic() > deadline:
                raise RunError("This Supervisor is in a run already; wait for its end, or use a second Supervisor.")
            await asyncio.sleep(0.01)
        if threading.current_thread() is not threading.main_thread():
            raise RunError(
                "A run starts processes, which die with the thread that started them: run in the main thread."
            )
        self.check_limits(spec, env)
        run = ActiveRun(
            spec,
            env,
            pool=self._pool,
            events=events,
            log_dir=log_dir,
            max_requests=max_requests,
            num_environment_processes=self.num_environment_processes(spec, env),
            start=start,
        )
        self._run = run
        try:
            await run.open()
        except BaseException:
            await self.end_run(run)
            raise
        return run

    @property
    def active(self) -> ActiveRun | None:
        """The run that is under way, or being opened."""
        return self._run

    @property
    def starting(self) -> str:
        """Of a run that is being opened: which processes are not ready yet, and which of them stand still."""
        return "" if self._run is None else self._run.starting

    async def end_run(self, run: ActiveRun, *, at_once: bool = False) -> None:
        """The processes stay, idle; the run's shared memory goes. at_once: who is at work still is not waited for."""
        try:
            await run.close(at_once=at_once)
        finally:
            self._run = None


def _check_template_options(options: Any) -> None:
    """Raise ConfigTypeError unless they are plain values by name, as config.json can hold them."""
    try:
        plain = isinstance(options, Mapping) and all(isinstance(name, str) for name in options)
        if options is None or (plain and json.dumps(dict(options))):
            return
    except (TypeError, ValueError, RecursionError):  # of a value that is no JSON
        pass
    raise ConfigTypeError(
        f"template_options is {shown(options)}; give a dict of the template's variables by name, with plain values."
    )
