"""Runs users' environments: answers each `EnvironmentCall` with exactly one `EnvironmentReply`.

Pure asyncio, one event loop. The environment process uses it, and so does a thread of the supervisor for classes that
cannot be imported. Coroutines of users run on the loop, plain tools in threads, plain `reset`, `on_turn`, `reward` and
`on_truncated` inline (graders use `signal.alarm`, which works on the main thread only). Every call has a deadline: then
it is cancelled and answered with an error. What blocks the loop itself can only be ended from outside.
"""

import asyncio
import functools
import inspect
import logging
import random
import time
from collections.abc import Callable, Mapping
from types import CoroutineType
from typing import Any

from pipeline.data.dataset import ENVIRONMENT_KEY
from pipeline.env import Env, TrajectoryView, TurnResult, as_messages, cut_tool_message
from pipeline.environments.tool_calls import failure_text, sendable
from pipeline.environments.values import catch_up, finite, mask_end_of
from pipeline.tools import tools_of
from workers.messages import EnvironmentCall, EnvironmentReply

GRACE_SECONDS = 5.0  # what a cancelled call has to end in, before it is answered without it

LOGGER = "headway.environment"  # what users' code raises, with its trace

_log = logging.getLogger(LOGGER)


class _Refused(Exception):
    """A failure that is its own sentence: nothing was raised by user code."""


class _Episode:
    """One environment with its view; `running` is the call that user code is in."""

    __slots__ = ("env", "key", "name", "row", "running", "view")

    def __init__(self, key: tuple[int, int], row: dict[str, Any], name: str) -> None:
        self.key = key  # group, member
        self.env: Env | None = None
        self.name = name  # the environment's, for messages
        self.row = row
        self.view: TrajectoryView | None = None
        self.running: _Running | None = None


class _Running:
    """One call from its arrival to its reply."""

    __slots__ = ("answer", "call", "episode", "expired", "interrupted_by", "method", "started", "task", "timer")

    def __init__(self, call: EnvironmentCall, answer: Callable[[EnvironmentReply], None]) -> None:
        self.call = call
        self.answer: Callable[[EnvironmentReply], None] | None = answer  # None once the reply is out
        self.episode: _Episode | None = None  # once the call has found or made it
        self.expired = False
        self.interrupted_by: str | None = None
        self.method = call.call
        self.started = time.perf_counter()
        self.task: asyncio.Task | None = None
        self.timer: asyncio.TimerHandle | None = None

    async def settle(self, value: Any) -> Any:
        """The value of a user's method, plain or a coroutine; `CancelledError` also if it ignored a cancellation."""
        if type(value) is CoroutineType or inspect.isawaitable(value):
            value = await value
            if self.expired or self.interrupted_by is not None:
                raise asyncio.CancelledError
        return value

    def reply(self, result: dict[str, Any], tools: list, error: str | None) -> None:
        if self.answer is not None:
            answer, self.answer = self.answer, None
            answer(EnvironmentReply(self.call.request, result, tools, time.perf_counter() - self.started, error))


class EnvironmentHost:
    """The trajectories of one event loop, each with its own environment from `make_env`.

    `make_env` may be a mapping, for a mix: then each row's "environment" names its maker. `name` is the environment
    class's, for messages; `timeout` is the seconds that one call may take; a tool's result
    is cut at `max_tool_chars` (the trajectory's loop then cuts it at its tokens), so that no process swallows more.
    """

    def __init__(
        self,
        make_env: Callable[[], Env] | Mapping[str, Callable[[], Env]],
        *,
        timeout: float,
        name: str,
        grace: float = GRACE_SECONDS,
        max_tool_chars: int | None = None,
    ) -> None:
        self._make_env = make_env
        self._max_tool_chars = max_tool_chars
        self._timeout = timeout
        self._grace = grace
        self._name = name
        self._episodes: dict[tuple[int, int], _Episode] = {}
        self._tasks: set[asyncio.Task] = set()  # the loop itself keeps only weak references
        self._steps = {"reset": self._reset, "turn": self._turn, "truncate": self._truncate, "drop": self._drop}

    @property
    def num_episodes(self) -> int:
        return len(self._episodes)

    def start(self, call: EnvironmentCall, answer: Callable[[EnvironmentReply], None]) -> None:
        """Begin a call; `answer` gets its reply, on this loop. Calls of one trajectory take effect in order.

        `truncate` and `drop` interrupt a `reset` or `turn` of the same trajectory: that is answered with an error.
        """
        loop = asyncio.get_running_loop()
        running = _Running(call, answer)
        running.task = loop.create_task(self._run(running))
        running.timer = loop.call_later(self._timeout, self._expire, running)
        self._tasks.add(running.task)
        running.task.add_done_callback(functools.partial(self._ended, running))

    async def handle(self, call: EnvironmentCall) -> EnvironmentReply:
        """`start` and wait for the reply."""
        future = asyncio.get_running_loop().create_future()
        self.start(call, lambda reply: None if future.done() else future.set_result(reply))
        return await future

    async def close(self) -> None:
        """Cancel what runs and close all environments; what does not end within the grace is left behind."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self._grace)
        episodes, self._episodes = list(self._episodes.values()), {}
        closing = [asyncio.ensure_future(self._close(episode)) for episode in episodes]
        if closing:
            await asyncio.wait(closing, timeout=self._grace)

    def _ended(self, running: _Running, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        running.timer.cancel()
        if task.cancelled():  # before its first step
            running.reply({}, [], f"{self._where(running.call, running.method)} was cancelled by the end of the run")

    async def _run(self, running: _Running) -> None:
        call = running.call
        result, tools, error = {}, [], None
        try:
            result, tools = await self._steps[call.call](running)
        except BaseException as failure:  # the border to user code: whatever it raises (SystemExit too) is answered
            error = self._sentence(running, failure)
            if not isinstance(failure, (_Refused, asyncio.CancelledError)):
                _log.warning("%s", error, exc_info=failure)
            episode = running.episode
            if episode is not None and episode.running is running and self._forget(episode):
                await self._close(episode)
        running.reply(result, tools, error)

    def _expire(self, running: _Running) -> None:
        if running.answer is None:  # replied in this very tick
            return
        running.expired = True
        running.timer = asyncio.get_running_loop().call_later(self._grace, self._abandon, running)
        running.task.cancel()

    def _abandon(self, running: _Running) -> None:
        if running.episode is not None and running.episode.running is running:
            self._forget(running.episode)
        running.reply({}, [], f"{self._sentence(running, None)}, and does not end when cancelled")

    # The steps: each returns the result and the tool records of its reply.

    async def _reset(self, running: _Running) -> tuple[dict, list]:
        call = running.call
        if (call.group, call.member) in self._episodes:
            raise _Refused(f"{self._where(call, 'reset')} came while its environment is open; close it with drop first")
        episode = running.episode = _Episode((call.group, call.member), call.argument["row"], self._name)
        self._episodes[episode.key] = episode
        episode.running = running
        running.method = "__init__"
        make_env = self._make_env
        if isinstance(make_env, Mapping):  # the supervisor has checked that every row names one
            episode.name = episode.row[ENVIRONMENT_KEY]
            make_env = make_env[episode.name]
        env = make_env()
        env.rng = random.Random(call.argument["seed"])
        episode.env = env
        running.method = "reset"
        messages = as_messages(await running.settle(env.reset(episode.row)), f"{episode.name}.reset")
        schemas = [spec.schema for spec, _ in tools_of(env).values()]
        wrap_up = as_messages(env.wrap_up, f"{episode.name}.wrap_up")
        episode.view = TrajectoryView(call.group, call.member, list(messages))
        episode.view.max_tool_chars = self._max_tool_chars
        episode.running = None
        return {"messages": messages, "tools": schemas, "wrap_up": wrap_up}, []

    async def _turn(self, running: _Running) -> tuple[dict, list]:
        episode = self._open_episode(running, "turn")
        view, argument = episode.view, running.call.argument
        catch_up(view, [*argument.get("unseen", ()), argument])
        view.tool_records = []
        view.running_tools.clear()
        view.rewritten, view.in_turn = False, True
        running.method = "on_turn"
        try:
            outcome = await running.settle(episode.env.on_turn(view))
        finally:
            view.in_turn = False
        if outcome is not None and not isinstance(outcome, TurnResult):
            raise TypeError(f"on_turn gave {type(outcome).__name__}; it gives a TurnResult, or None to end the episode")
        result: dict[str, Any] = {}
        if outcome is not None and outcome.metrics:
            result["metrics"] = {
                sendable(str(name)): finite(value, f"metric {name!r}") for name, value in outcome.metrics.items()
            }
        tools = view.tool_records
        if outcome is None or outcome.done:
            running.method = "reward"
            reward = finite(await running.settle(episode.env.reward(view, episode.row)), "reward")
            result |= mask_end_of(view)
            await self._finish(running)
            result["messages"], result["reward"] = None, reward
        else:
            messages = as_messages(outcome.messages, f"{episode.name}.on_turn")
            messages = [cut_tool_message(message, self._max_tool_chars) for message in messages]
            view.messages.extend(messages)
            episode.running = None
            result |= mask_end_of(view)
            result["messages"], result["max_turn_tokens"] = messages, outcome.max_turn_tokens
            if view.rewritten:
                result["messages"], result["rewrites"] = list(view.messages), True
        return result, tools

    async def _truncate(self, running: _Running) -> tuple[dict, list]:
        episode = self._episodes.get((running.call.group, running.call.member))
        if episode is None:
            raise _Refused(f"{self._where(running.call, 'truncate')} came when it had no environment")
        interrupted, episode.running = episode.running, running
        running.episode = episode
        if not await self._interrupt(interrupted, "truncate"):
            raise _Refused(f"{self._where(running.call, interrupted.method)} does not end when interrupted by truncate")
        if episode.view is None:
            raise _Refused(f"{self._where(running.call, 'truncate')} came before its reset had ended")
        running.method = "on_truncated"
        catch_up(episode.view, running.call.argument.get("unseen", ()))
        cause = running.call.argument["cause"]
        reward = finite(await running.settle(episode.env.on_truncated(episode.view, episode.row, cause)), "reward")
        mask_end = mask_end_of(episode.view)
        await self._finish(running)
        return {"reward": reward} | mask_end, []

    async def _drop(self, running: _Running) -> tuple[dict, list]:
        """Close without a reward; an environment that is not (or no longer) there is as good as dropped."""
        episode = self._episodes.pop((running.call.group, running.call.member), None)
        if episode is not None:
            await self._interrupt(episode.running, "drop")
            running.method = "close"
            await self._close(episode)
        return {}, []

    def _open_episode(self, running: _Running, call: str) -> _Episode:
        episode = self._episodes.get((running.call.group, running.call.member))
        if episode is None:
            raise _Refused(f"{self._where(running.call, call)} came without a reset before it")
        if episode.running is not None:
            raise _Refused(
                f"{self._where(running.call, call)} came while its {episode.running.call.call} is unanswered"
            )
        episode.running = running
        running.episode = episode
        return episode

    async def _interrupt(self, running: _Running | None, by: str) -> bool:
        """Cancel a call and wait for its end; False if it does not end within the grace."""
        if running is None:
            return True
        running.interrupted_by = by
        running.task.cancel()
        await asyncio.wait({running.task}, timeout=self._grace)
        return running.task.done()

    async def _finish(self, running: _Running) -> None:
        running.method = "close"
        self._forget(running.episode)
        await self._close(running.episode)

    def _forget(self, episode: _Episode) -> bool:
        """Make room for a new environment of this trajectory; False if it was no longer known."""
        if self._episodes.get(episode.key) is not episode:
            return False
        del self._episodes[episode.key]
        return True

    async def _close(self, episode: _Episode) -> None:
        """Call the user's `close`, if there is one. It comes after the outcome, so what it raises is only logged."""
        env, episode.env = episode.env, None
        if env is None or type(env).close is Env.close:
            return
        try:
            async with asyncio.timeout(self._timeout):
                closed = env.close()
                if inspect.isawaitable(closed):
                    await closed
        except Exception as failure:
            _log.warning("%s.close failed: %s", episode.name, failure_text(failure), exc_info=failure)

    def _where(self, call: EnvironmentCall, method: str, name: str | None = None) -> str:
        return f"{name or self._name}.{method} of trajectory {call.group}.{call.member}"

    def _sentence(self, running: _Running, failure: BaseException | None) -> str:
        name = running.episode.name if running.episode is not None else self._name
        where = self._where(running.call, running.method, name)
        if running.method == "on_turn" and running.episode.view.running_tools:
            where += f", in tool {', '.join(running.episode.view.running_tools)},"
        if running.interrupted_by is not None:
            return f"{where} was interrupted by {running.interrupted_by}"
        if running.expired:
            return f"{where} took longer than environment_timeout = {self._timeout:g} s"
        if isinstance(failure, _Refused):
            return str(failure)
        return f"{where} failed with {failure_text(failure)}"
