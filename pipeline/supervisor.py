"""Supervisor: the model, and the processes that sample from it and train it."""

import asyncio
import os
import threading
import time
import weakref
from dataclasses import replace
from typing import Any

from pipeline.active_run import ActiveRun
from pipeline.chat.format import ChatFormat
from pipeline.config_checks import check_class, check_flag, check_integer, quoted, shown
from pipeline.environments.source import EnvSource
from pipeline.errors import ConfigError, ConfigTypeError, RunError
from pipeline.events import EventLog
from pipeline.run_spec import RunSpec
from pipeline.tasks import TASKS
from pipeline.worker_pool import WorkerPool
from shm.layout import ELEMENT_BYTES
from workers.devices import count_gpus, resolve_devices, sampler_device
from workers.model_config import TINY, ModelConfig

EARLIER_RUN_SECONDS = 10.0  # what a new run waits for the end of the one before
KV_BYTES = 1 << 30  # most that a sampler on the CPU spends on its KV pool


class Supervisor:
    """Owns the processes. Entering it starts none: the first run does, once it is known what they must hold.

    model: "tiny", a small decoder from random weights. chat: how conversations become its ids (default: the words of
    the task `guess`). samplers: sampler processes. device: auto, cpu or cuda. dtype: what samplers and learner compute
    in, float32 or bfloat16; the learner's own weights, gradients and optimizer state are float32 either way. slots:
    copies of the weights (default `max_staleness + 2`, with an evaluator one more). check_weights: samplers verify a
    checksum before every step (tests). Use it in `with`; leaving ends every process. Raises ConfigError for what can't
    be.
    """

    def __init__(
        self,
        model: str = "tiny",
        *,
        chat: ChatFormat | None = None,
        samplers: int | None = None,
        device: str = "auto",
        dtype: str = "float32",
        slots: int | None = None,
        model_config: ModelConfig | None = None,
        check_weights: bool = False,
    ) -> None:
        if model != "tiny":
            raise ConfigError(f"model is {model!r}; only 'tiny' works for now, model directories aren't built yet.")
        self.device, self.num_samplers = resolve_devices(device, samplers)
        self.chat = TASKS["guess"].chat_format() if chat is None else chat
        if not isinstance(getattr(self.chat, "vocab_size", None), int):
            raise ConfigTypeError(f"chat is {shown(chat)}; give a chat format, such as rl.TinyChat(...).")
        self.model_config = replace(TINY, vocab_size=self.chat.vocab_size) if model_config is None else model_config
        check_class(self, "model_config", (ModelConfig,))
        if self.model_config.vocab_size < self.chat.vocab_size:
            raise ConfigError(
                f"model_config has a vocab_size of {self.model_config.vocab_size}, but chat writes ids up to "
                f"{self.chat.vocab_size - 1}; make it at least {self.chat.vocab_size}."
            )
        if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
            raise ConfigError(f"dtype is {shown(dtype)}; it must be one of {quoted(tuple(ELEMENT_BYTES))}.")
        self.dtype = dtype
        self.slots = slots
        check_integer(self, "slots", minimum=1, unit="copies of the weights", optional=True)
        self.check_weights = check_weights
        check_flag(self, "check_weights")
        self._pool = WorkerPool()
        # For a script that uses no `with`: at its exit, or when nobody holds this object any more.
        weakref.finalize(self, self._pool.close)
        self._run: ActiveRun | None = None

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
        """Of the learner, and of each sampler: on the CPU they divide the cores; beside a GPU a thread or two
        suffice.
        """
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

    def kv_tokens(self, concurrency: int, max_context_tokens: int) -> int:
        """Tokens of a sampler's KV pool: all that can run at once, within KV_BYTES."""
        config = self.model_config
        token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * ELEMENT_BYTES[self.dtype]
        wanted = concurrency * max_context_tokens
        return max(min(wanted, KV_BYTES // token_bytes), 1024)

    async def open_run(
        self, spec: RunSpec, env: EnvSource, events: EventLog, log_dir: str, max_requests: int
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
        num_environment_processes = max(1, len(os.sched_getaffinity(0)) // 4) if env.path is not None else 0
        run = ActiveRun(spec, env, self._pool, events, log_dir, max_requests, num_environment_processes)
        self._run = run
        try:
            await run.open()
        except BaseException:
            await self.end_run(run)
            raise
        return run

    async def end_run(self, run: ActiveRun) -> None:
        """The processes stay, idle; the run's shared memory goes."""
        try:
            await run.close()
        finally:
            self._run = None
