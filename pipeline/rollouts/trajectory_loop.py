"""One trajectory from its environment's reset to its reward: turns of the model, tools, the end.

Text exists only for the environment; `sampled_turns.py` keeps the exact ids. Nothing here decides when a trajectory
starts, which version it is pinned to or when its group closes; `rollouts.py` does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.chat.format import ModelTurn
from pipeline.errors import TrajectoryError
from pipeline.processes.environment.environment_handle import Dropped, EnvironmentHandle, EnvironmentLost
from pipeline.rollouts.doing import Doing, acting, in_line
from pipeline.rollouts.sampled_turns import CUT, TURN, SampledTurns
from pipeline.trajectory import Trajectory
from workers.messages import EnvironmentReply

ENVIRONMENT_LOST = "environment_lost"  # why sampling stops: nobody could act on the turn
TRAJECTORY_TIMEOUT = "trajectory_timeout"  # the cause of one that has used its own time up


@dataclass(slots=True)
class TrajectoryLoop:
    """State of one running trajectory. on_tools: told of each answered turn; on_cut: of each tool's result that the
    model reads cut.
    """

    turns: SampledTurns
    environment: EnvironmentHandle
    on_tools: Callable[[EnvironmentReply], None]
    on_cut: Callable[[], None]
    discarded: bool = False  # stopped, and it leaves nothing behind
    _doing: Doing = field(default_factory=in_line)  # while the model does not sample
    # What the model wrote or read without the environment's knowledge, in order: turns, and {"messages": …}.
    _unseen: list[dict] = field(default_factory=list)
    _turn_cap: int | None = None  # of the turn that is being sampled
    # The turn that was sampled last, while nothing has followed it, with how it ended.
    _sampled: tuple[ModelTurn, bool, str] | None = None

    @property
    def trajectory(self) -> Trajectory:
        return self.turns.trajectory

    @property
    def doing(self) -> Doing:
        """What it waits for, for whoever waits for it in turn."""
        return self._doing if self.turns.sampling is None else self.turns.sampling

    @property
    def stopped_by(self) -> str | None:
        """The cause given to `stop`."""
        return self.turns.stopped_by

    async def run(self, row: dict[str, Any], seed: int) -> None:
        """To the end: reward, truncation cause and spans are then in the trajectory. Raises TrajectoryError, and
        EnvironmentLost when it is to start again from nothing.

        A discarded trajectory just ends: it has no reward. So does one that its group stopped before its environment
        was lost: nobody is left to score it.
        """
        try:
            await self._roll_out(row, seed)
        except EnvironmentLost:
            if self.turns.stopped_by in (None, ENVIRONMENT_LOST, TRAJECTORY_TIMEOUT):
                raise
            self.discarded = True
        except (Dropped, TrajectoryError):
            if not self.discarded:
                raise

    def stop(self, cause: str, *, discard: bool = False) -> None:
        """End with `cause` when the running request is done; a wait for a tool ends now. discard: without a reward, as
        does a trajectory that has made no request yet.
        """
        self.turns.stopped_by, self.discarded = cause, discard or not self.turns.begun
        if self.turns.sampling:
            return
        if self.discarded:
            self.environment.drop()
        else:
            self.environment.interrupt(cause)

    def close(self) -> None:
        """Nothing of it goes on."""
        self.environment.drop()

    def lose_environment(self) -> None:
        """What the model writes from now on leads nowhere: no further request is made."""
        if self.turns.stopped_by is None:
            self.turns.stopped_by = ENVIRONMENT_LOST

    def saved(self) -> dict[str, Any] | None:
        """What `resume` goes on from, beside the trajectory, as plain values; None if it can only start again."""
        story = self.environment.story
        if story is None or self.discarded or self.turns.stopped_by is not None:
            return None
        turns, sampled = self.turns.saved(), None
        if self._sampled is not None:
            turn, stopped, end = self._sampled
            sampled = [list(turn.ids), stopped, end]
            turns["num_calls"] -= len(turn.tool_calls)  # they are numbered when the turn is read again
        return {
            "turns": turns,
            "sampled": sampled,
            "turn_cap": self._turn_cap,
            "unseen": list(self._unseen),
            "story": story,
        }

    def resume(self, saved: Mapping[str, Any]) -> None:
        """`run` will go on where an earlier run stood."""
        self.environment.resume(saved["story"])
        self.turns.resume(saved["turns"])
        self._unseen, self._turn_cap = list(saved["unseen"]), saved["turn_cap"]
        if saved["sampled"] is not None:
            ids, stopped, end = saved["sampled"]
            self._sampled = self.turns.reopen(ids), stopped, end

    async def _roll_out(self, row: dict[str, Any], seed: int) -> None:
        if self.discarded:  # before its first step
            return
        if not self.turns.begun:
            self._doing = Doing("tool", "reset of its environment")
            reply = await self.environment.call("reset", {"row": row, "seed": seed})
            if self.discarded:  # in the tick of the reply
                return
            self.turns.wrap_up = reply.result["wrap_up"]
            self.turns.open(reply.result["messages"], reply.result["tools"])
        while self.trajectory.truncated is None:
            if self._sampled is None:
                self._sampled = await self.turns.sample(self._turn_cap)
            turn, stopped, end = self._sampled
            cause, turn_cap = None, None
            if end == TURN:
                cause, turn_cap = await self._act(turn, stopped)
                if self.trajectory.reward is not None:
                    return
            else:
                if turn.ids:
                    self._unseen.append(_argument(turn, stopped))
                cause = self._reply(turn, self.turns.wrap_up, asks=True) if end == CUT else end
            self.trajectory.truncated = cause
            if cause is None:
                self._sampled, self._turn_cap = None, turn_cap
        await self._truncate(self.trajectory.truncated)

    async def _act(self, turn: ModelTurn, stopped: bool) -> tuple[str | None, int | None]:
        """The environment's part of a turn: (cause of a truncation, cap of the next turn). At the end it sets the
        reward.
        """
        argument, calls = _argument(turn, stopped), turn.tool_calls
        if calls and self._no_turn_follows:  # they would be answered to nobody
            self._unseen.append(argument)
            return self._no_turn_follows, None
        if self._unseen:
            argument["unseen"] = self._unseen
        self._doing = acting(calls)
        reply = await self.environment.call("turn", argument)
        self._unseen = []
        self.on_tools(reply)
        self._take_notes(reply)
        if "messages" not in reply.result:  # `stop` interrupted it
            self.trajectory.truncated, self.trajectory.reward = self.stopped_by, reply.result["reward"]
            return None, None
        messages = reply.result["messages"]
        if messages is None:
            self.trajectory.reward = reply.result["reward"]
            return None, None
        if self._no_turn_follows:
            return self._no_turn_follows, None
        messages = [self._cut(message) if message["role"] == "tool" else message for message in messages]
        return self._reply(turn, messages, rewrites=reply.result.get("rewrites", False)), reply.result[
            "max_turn_tokens"
        ]

    def _reply(
        self, turn: ModelTurn, messages: list[dict], *, asks: bool = False, rewrites: bool = False
    ) -> str | None:
        """What the model reads next: behind the turn, or (rewrites) in place of all so far. Returns a cause if there is
        no room for it.
        """
        had_asked = self.turns.wrapped_up
        cause = self.turns.start_again(messages) if rewrites else self.turns.reply(turn, messages, asks=asks)
        if self.turns.wrapped_up and not had_asked:
            self._unseen.append({"messages": self.turns.wrap_up})
        return cause

    @property
    def _no_turn_follows(self) -> str | None:
        """The cause for a turn that asks for another one where none can follow."""
        if self.turns.wrapped_up:
            return "final_answer"
        return "turns" if self.turns.is_last_turn else None

    async def _truncate(self, cause: str) -> None:
        """The end by a limit."""
        if self.discarded:
            return
        self._doing = Doing("reward", f"on_truncated ({cause})")
        unseen = {"unseen": self._unseen} if self._unseen else {}
        reply = await self.environment.call("truncate", {"cause": cause} | unseen)
        self._take_notes(reply)
        self.trajectory.reward = reply.result["reward"]

    def _cut(self, message: dict) -> dict:
        """A tool's result within its budget. cut: the environment's process had to cut it already."""
        turns = self.turns
        text = turns.chat.cut(message["content"], turns.budget.tool_output_tokens, message.get("cut", False))
        if message.get("cut", False) or text != message["content"]:
            self.on_cut()
        return message | {"content": text}

    def _take_notes(self, reply: EnvironmentReply) -> None:
        """What the environment says beside its answer."""
        for name, value in reply.result.get("metrics", {}).items():
            self.trajectory.metrics[name] = self.trajectory.metrics.get(name, 0.0) + value
        if "loss_mask_end" in reply.result:
            self.trajectory.loss_mask_end = reply.result["loss_mask_end"]


def _argument(turn: ModelTurn, stopped: bool) -> dict[str, Any]:
    """The turn as the environment is told of it."""
    return {"text": turn.text, "tool_calls": turn.tool_calls, "num_tokens": len(turn.ids), "stopped": stopped}
