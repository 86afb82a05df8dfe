"""Episodes of a verifiers environment: each asks the run's endpoint with its own rollout's key.

One environment per event loop and config, loaded at its first episode. Its servers (the one that records turns, tool
servers that a taskset shares) stay up until the loop ends, which cancels the task that holds them.
"""

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import verifiers.v1 as vf
from verifiers.v1.interception import Interception, Slot
from verifiers.v1.session import RolloutSession

from pipeline.adapters.verifiers_loading import load_environment, task_from
from pipeline.errors import RunError

# The model's name at the run's endpoint. No address: each rollout has its own, see `RolloutEndpoints`.
CONTEXT = vf.ModelContext(model="headway", client=vf.EvalClientConfig(base_url="http://127.0.0.1", api_key_var=""))


class EpisodeError(RunError):
    """An episode failed; the message says where."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """metrics: the episode's, and `reward/<name>` of each reward function, unweighted."""

    reward: float
    metrics: dict[str, float]


class RolloutEndpoints(Interception):
    """verifiers' server for model calls, but each rollout's calls go to its own address with its own key.

    verifiers keeps a client for each address and key until the server ends (0.8 MB and two descriptors), so all
    rollouts share one, of which each has a shallow copy that names its own place.
    """

    def __init__(self, inner: Interception) -> None:
        """inner: has been started, and is stopped, by its owner."""
        super().__init__()
        self.places: dict[str, tuple[str, str]] = {}  # trace id -> base_url, api_key
        self._inner = inner

    async def start(self) -> None:
        """It is up."""

    @asynccontextmanager
    async def acquire(self, session: RolloutSession) -> AsyncIterator[Slot]:
        async with self._inner.acquire(session) as slot:
            session.client = copy.copy(session.client)
            session.client.base_url, session.client.api_key = self.places[session.trace.id]
            yield slot


class ServedEnvironment:
    """A loaded environment whose servers are up."""

    def __init__(self, environment: vf.Env) -> None:
        self._environment = environment
        self._endpoints: RolloutEndpoints | None = None
        self.up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._holder = asyncio.ensure_future(self._hold())

    async def _hold(self) -> None:
        try:
            async with self._environment.serving():
                # Episodes take it from there; verifiers 0.4 has no other place to give it.
                self._endpoints = self._environment._interception = RolloutEndpoints(self._environment._interception)
                self.up.set_result(None)
                await asyncio.Event().wait()
        except Exception as failure:
            if self.up.done():
                raise
            self.up.set_exception(failure)

    async def play(self, row: Mapping[str, Any], base_url: str, api_key: str) -> Outcome:
        """One episode of a row's task. Raises EpisodeError if it failed."""
        places = self._endpoints.places
        begun: list[str] = []

        def begin(trace: vf.Trace) -> None:
            begun.append(trace.id)
            places[trace.id] = (base_url, api_key)

        try:
            episode = await self._environment.run_episode(task_from(self._environment, row), CONTEXT, on_trace=begin)
        finally:
            for trace_id in begun:
                del places[trace_id]
        return outcome_of(episode)


def outcome_of(episode: vf.Episode) -> Outcome:
    """What is trained on. Raises EpisodeError for an episode that failed, in part too, or ran out of time.

    verifiers scores what a time-out left; but that a turn was late says more of this machine than of the policy.
    """
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if episode.is_timeout or any(trace.is_timeout for trace in episode.traces):
        stops = ", ".join(trace.stop_condition or "" for trace in episode.traces)
        raise EpisodeError(f"the episode ran out of the time that its task gives it ({stops or errors[-1].message})")
    if errors or not episode.ok:
        said = "; ".join(f"{error.type}: {error.message}" for error in errors)
        raise EpisodeError(f"the episode failed: {said or 'verifiers calls it not ok'}")
    if len(episode.traces) != 1:
        raise EpisodeError(f"the episode has {len(episode.traces)} traces, each with a reward; a rollout trains one")
    (trace,) = episode.traces
    scores = {f"reward/{name}": reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    return Outcome(trace.reward, metrics | scores)


_served: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, ServedEnvironment]] = WeakKeyDictionary()


async def served(taskset: str, config: Mapping[str, Any]) -> ServedEnvironment:
    """The environment of this taskset and config on the running loop, its servers up. Raises ConfigError, and what
    keeps a server from starting; the next call tries again.
    """
    environments = _served.setdefault(asyncio.get_running_loop(), {})
    key = json.dumps([taskset, config], sort_keys=True)
    if key not in environments:
        environments[key] = ServedEnvironment(load_environment(taskset, config))
    environment = environments[key]
    try:
        await asyncio.shield(environment.up)
    except Exception:
        if environments.get(key) is environment:
            del environments[key]
        raise
    return environment
