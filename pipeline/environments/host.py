"""Runs users' environments: answers each `EnvironmentCall` with exactly one `EnvironmentReply`.

Pure asyncio, one event loop. The environment process uses it, and so does a thread of the supervisor for classes that
cannot be imported. Coroutines of users run on the loop, plain tools in threads, plain `reset`, `on_turn`, `reward` and
`on_truncated` inline (graders use `signal.alarm`, which works on the main thread only). Every call has a deadline, in
time of its own (`call_time.py`): then it is cancelled and answered with an error. What blocks the loop itself, and what
goes on although it was cancelled, can only be ended from outside: the activity board names it.
"""

import asyncio
import contextvars
import functools
import inspect
import logging
import os
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.dataset import ENVIRONMENT_KEY
from pipeline.env import ChatMessage, Env, TrajectoryView, TurnResult, as_messages, check_recovery, cut_tool_message
from pipeline.environments.activity import ActivityBoard, private_board
from pipeline.environments.call_time import CALL, CallTime, LoopTime
from pipeline.environments.dropped_processes import let_go_of_pipes
from pipeline.environments.running_call import Episode, Refused, RunningCall
from pipeline.environments.values import (
    catch_up,
    finite,
    mask_end_of,
    plain_snapshot,
    refuse_too_large,
    tell_again,
)
from pipeline.user_code.failures import LOGGER, failure_text, sendable
from pipeline.user_code.tools import tools_of
from workers.import_path import own_line
from workers.messages import EnvironmentCall, EnvironmentReply

GRACE_SECONDS = 5.0  # what a cancelled call has to end in, before it is answered without it
CANCEL_SECONDS = 2.0  # the same when the run ends, of all calls together
CLOSE_SECONDS = 3.0  # what all `close` together have behind that
LEAST_SECONDS = 0.001  # a call with less left than this has used its time up

_TIMED_OUT = {"timed_out": True}

_log = logging.getLogger(LOGGER)


class EnvironmentHost:
    """The trajectories of one event loop, each with its own environment from `make_env`.

    `make_env` may be a mapping, for a mix: then each row's "environment" names its maker. `name` is the environment
    class's, for messages; `timeout` is the seconds that one call may take; a tool's result is cut at `max_tool_chars`
    (the trajectory's loop then cuts it at its tokens), so that no process swallows more.
    """

    def __init__(
        self,
        make_env: Callable[[], Env] | Mapping[str, Callable[[], Env]],
        *,
        timeout: float,
        name: str,
        grace: float = GRACE_SECONDS,
        max_tool_chars: int | None = None,
        board: ActivityBoard | None = None,
    ) -> None:
        """board: where others see who is in user code."""
        self._time = LoopTime(private_board() if board is None else board)
        self._make_env = make_env
        self._max_tool_chars = max_tool_chars
        self._timeout = timeout
        self._grace = grace
        self._name = name
        self._pid = os.getpid()
        self._episodes: dict[tuple[int, int], Episode] = {}
        self._tasks: set[asyncio.Task] = set()  # the loop itself keeps only weak references
        self._steps = {
            "reset": self._reset,
            "restore": self._restore,
            "turn": self._turn,
            "truncate": self._truncate,
            "drop": self._drop,
        }

    def open(self) -> None:
        """On the host's loop, before the first call: from now on it gives signs of life."""
        self._time.attach(asyncio.get_running_loop())

    def start(self, call: EnvironmentCall, answer: Callable[[EnvironmentReply], None]) -> None:
        """Begin a call; `answer` gets its reply, on this loop. Calls of one trajectory take effect in order.

        `truncate` and `drop` interrupt a `reset` or `turn` of the same trajectory: that is answered with an error.
        """
        loop = asyncio.get_running_loop()
        self._time.attach(loop)
        running = RunningCall(call, answer, CallTime(self._time, call.request))
        context = contextvars.copy_context()
        context.run(CALL.set, running.time)
        self._time.num_calls += 1
        running.task = loop.create_task(self._run(running), context=context)
        running.timer = loop.call_later(self._timeout, self._expire, running)
        self._tasks.add(running.task)
        running.task.add_done_callback(functools.partial(self._ended, running))

    async def handle(self, call: EnvironmentCall) -> EnvironmentReply:
        """`start` and wait for the reply."""
        future = asyncio.get_running_loop().create_future()
        self.start(call, lambda reply: None if future.done() else future.set_result(reply))
        return await future

    async def close(self) -> None:
        """Cancel what runs and close all environments; what does not end in time is left behind."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=min(self._grace, CANCEL_SECONDS))
        episodes, self._episodes = list(self._episodes.values()), {}
        closing = [asyncio.ensure_future(self._close(episode)) for episode in episodes]
        if closing:
            await asyncio.wait(closing, timeout=min(self._grace, CLOSE_SECONDS))
        self._time.detach()

    def _ended(self, running: RunningCall, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        self._time.num_calls -= 1
        running.timer.cancel()
        if running.release is not None:
            running.release()
        if task.cancelled():  # before its first step
            running.reply({}, [], f"{self._where(running.call, running.method)} was cancelled by the end of the run")

    async def _run(self, running: RunningCall) -> None:
        call = running.call
        result, tools, error = {}, [], None
        try:
            result, tools = await self._steps[call.call](running)
        except BaseException as failure:  # the border to user code: whatever it raises (SystemExit too) is answered
            error = self._sentence(running, failure)
            if not isinstance(failure, (Refused, asyncio.CancelledError)):
                _log.warning("%s", error, exc_info=failure)
            episode = running.episode
            if episode is not None and episode.running is running and self._forget(episode):
                await self._close(episode)
        if os.getpid() != self._pid:  # users' code has forked, and let its child come back here
            os._exit(1)
        running.reply(_TIMED_OUT if running.expired and error is not None else result, tools, error)

    def _expire(self, running: RunningCall) -> None:
        if running.answer is None:  # replied in this very tick
            return
        loop = asyncio.get_running_loop()
        left = self._timeout - running.time.used_ns() / 1e9
        if left > LEAST_SECONDS:  # others held the loop meanwhile
            running.timer = loop.call_later(left, self._expire, running)
            return
        running.expired = True
        running.timer = loop.call_later(self._grace, self._abandon, running)
        running.task.cancel()

    def _abandon(self, running: RunningCall) -> None:
        if running.episode is not None and running.episode.running is running:
            self._forget(running.episode)
        running.release = running.time.stays()
        running.reply(_TIMED_OUT, [], f"{self._sentence(running, None)}, and does not end when cancelled")

    # The steps: each returns the result and the tool records of its reply.

    async def _reset(self, running: RunningCall) -> tuple[dict, list]:
        episode = self._new_episode(running)
        env = episode.env
        running.enter("reset")
        messages = as_messages(await running.settle(env.reset(episode.row)), f"{episode.name}.reset")
        schemas = [spec.schema for spec, _ in tools_of(env).values()]
        wrap_up = as_messages(env.wrap_up, f"{episode.name}.wrap_up")
        refuse_too_large(messages, f"{episode.name}.reset")
        recovery = check_recovery(env.recovery, episode.name)
        episode.view = self._new_view(running.call, messages)
        result = {"messages": messages, "tools": schemas, "wrap_up": wrap_up, "recovery": recovery}
        result |= await self._snapshot(running)
        episode.running = None
        return result, []

    async def _restore(self, running: RunningCall) -> tuple[dict, list]:
        """Another instance goes on where one was lost with its process."""
        episode, story = self._new_episode(running), running.call.argument
        episode.view = self._new_view(running.call, story["messages"])
        tell_again(episode.view, story["turns"])
        episode.view.loss_mask_end = story.get("loss_mask_end")
        if episode.env.recovery == "snapshot":
            running.enter("restore")
            await running.settle(episode.env.restore(story["snapshot"]))
        episode.running = None
        return {}, []

    async def _turn(self, running: RunningCall) -> tuple[dict, list]:
        episode = self._open_episode(running, "turn")
        view, argument = episode.view, running.call.argument
        catch_up(view, [*argument.get("unseen", ()), argument])
        view.tool_records = []
        view.running_tools.clear()
        view.rewritten, view.in_turn = False, True
        running.enter("on_turn")
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
            running.enter("reward")
            reward = finite(await running.settle(episode.env.reward(view, episode.row)), "reward")
            result |= mask_end_of(view)
            await self._finish(running)
            result["messages"], result["reward"] = None, reward
        else:
            messages = as_messages(outcome.messages, f"{episode.name}.on_turn")
            messages = [cut_tool_message(message, self._max_tool_chars) for message in messages]
            refuse_too_large(view.messages if view.rewritten else messages, f"{episode.name}.on_turn")
            view.messages.extend(messages)
            result |= mask_end_of(view)
            result["messages"], result["max_turn_tokens"] = messages, outcome.max_turn_tokens
            if view.rewritten:
                result["messages"], result["rewrites"] = list(view.messages), True
            result |= await self._snapshot(running)
            episode.running = None
        return result, tools

    async def _truncate(self, running: RunningCall) -> tuple[dict, list]:
        episode = self._episodes.get((running.call.group, running.call.member))
        if episode is None:
            raise Refused(f"{self._where(running.call, 'truncate')} came when it had no environment")
        interrupted, episode.running = episode.running, running
        running.episode = episode
        if not await self._interrupt(interrupted, "truncate"):
            raise Refused(f"{self._where(running.call, interrupted.method)} does not end when interrupted by truncate")
        if episode.view is None:
            raise Refused(f"{self._where(running.call, 'truncate')} came before its reset had ended")
        running.enter("on_truncated")
        catch_up(episode.view, running.call.argument.get("unseen", ()))
        cause = running.call.argument["cause"]
        reward = finite(await running.settle(episode.env.on_truncated(episode.view, episode.row, cause)), "reward")
        mask_end = mask_end_of(episode.view)
        await self._finish(running)
        return {"reward": reward} | mask_end, []

    async def _drop(self, running: RunningCall) -> tuple[dict, list]:
        """Close without a reward; an environment that is not (or no longer) there is as good as dropped."""
        episode = self._episodes.pop((running.call.group, running.call.member), None)
        if episode is not None:
            await self._interrupt(episode.running, "drop")
            running.enter("close")
            await self._close(episode)
        return {}, []

    def _new_episode(self, running: RunningCall) -> Episode:
        """An instance of its own for a trajectory that has none here."""
        call = running.call
        if (call.group, call.member) in self._episodes:
            raise Refused(
                f"{self._where(call, call.call)} came while its environment is open; close it with drop first"
            )
        episode = running.episode = Episode((call.group, call.member), call.argument["row"], self._name)
        self._episodes[episode.key] = episode
        episode.running = running
        running.enter("__init__")
        make_env = self._make_env
        if isinstance(make_env, Mapping):  # the supervisor has checked that every row names one
            episode.name = episode.row[ENVIRONMENT_KEY]
            make_env = make_env[episode.name]
        env = make_env()
        env.rng = random.Random(call.argument["seed"])
        episode.env = env
        return episode

    def _new_view(self, call: EnvironmentCall, messages: Sequence[ChatMessage]) -> TrajectoryView:
        view = TrajectoryView(call.group, call.member, list(messages))
        view.max_tool_chars = self._max_tool_chars
        return view

    async def _snapshot(self, running: RunningCall) -> dict[str, Any]:
        """An entry of the reply: what the user's `restore` goes on from, if the environment works by snapshots."""
        env = running.episode.env
        if env.recovery != "snapshot":
            return {}
        running.enter("snapshot")
        return {"snapshot": plain_snapshot(await running.settle(env.snapshot()))}

    def _open_episode(self, running: RunningCall, call: str) -> Episode:
        episode = self._episodes.get((running.call.group, running.call.member))
        if episode is None:
            raise Refused(f"{self._where(running.call, call)} came without a reset before it")
        if episode.running is not None:
            raise Refused(f"{self._where(running.call, call)} came while its {episode.running.call.call} is unanswered")
        episode.running = running
        running.episode = episode
        return episode

    async def _interrupt(self, running: RunningCall | None, by: str) -> bool:
        """Cancel a call and wait for its end; False if it does not end within the grace."""
        if running is None:
            return True
        running.interrupted_by = by
        running.task.cancel()
        await asyncio.wait({running.task}, timeout=self._grace)
        return running.task.done()

    async def _finish(self, running: RunningCall) -> None:
        running.enter("close")
        self._forget(running.episode)
        await self._close(running.episode)

    def _forget(self, episode: Episode) -> bool:
        """Make room for a new environment of this trajectory; False if it was no longer known."""
        if self._episodes.get(episode.key) is not episode:
            return False
        del self._episodes[episode.key]
        return True

    async def _close(self, episode: Episode) -> None:
        """Call the user's `close`, if there is one. It comes after the outcome: what it raises is only logged."""
        env, episode.env = episode.env, None
        let_go_of_pipes()
        if env is None or type(env).close is Env.close:
            return
        try:
            async with asyncio.timeout(self._timeout):
                closed = env.close()
                if inspect.isawaitable(closed):
                    await closed
        except asyncio.CancelledError:
            raise
        except BaseException as failure:
            _log.warning("%s.close failed: %s", episode.name, failure_text(failure), exc_info=failure)

    def _where(self, call: EnvironmentCall, method: str, name: str | None = None) -> str:
        return f"{name or self._name}.{method} of trajectory {call.group}.{call.member}"

    def _sentence(self, running: RunningCall, failure: BaseException | None) -> str:
        name = running.episode.name if running.episode is not None else self._name
        where = self._where(running.call, running.method, name)
        if running.method == "on_turn" and running.episode.view.running_tools:
            where += f", in tool {', '.join(running.episode.view.running_tools)},"
        if running.interrupted_by is not None:
            return f"{where} was interrupted by {running.interrupted_by}"
        if running.expired:
            return f"{where} took longer than environment_timeout = {self._timeout:g} s"
        if isinstance(failure, Refused):
            return str(failure)
        line = own_line(failure) if failure is not None else None
        return f"{where} failed with {failure_text(failure)}{f' ({line})' if line is not None else ''}"
