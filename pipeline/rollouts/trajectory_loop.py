"""One trajectory from its environment's reset to its reward: requests, turns, tools, budgets.

Everything it records is exact: spans hold the sampled ids and the log-probs they were sampled with; text exists only
for the environment. Nothing here decides when a trajectory starts, which version it is pinned to or when its group
closes; `rollouts.py` does.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.chat.format import ChatFormat, ModelTurn, Rendered, assistant_message
from pipeline.config import Budget
from pipeline.environments.client import Dropped, EnvironmentHandle
from pipeline.errors import TrajectoryError
from pipeline.processes.sampler_client import SegmentResult
from pipeline.rollouts.budget import next_request_tokens, tokens_left
from pipeline.trajectory import Span, Trajectory
from workers.messages import EnvironmentReply

# generate(context, max_tokens, generated so far) -> the segment
GenerateSegment = Callable[[list[int], int, int], Awaitable[SegmentResult]]

# How a turn ended: TURN goes to the environment, CUT to the wrap-up request; anything else is a cause of truncation.
TURN = "turn"
CUT = "cut"


@dataclass(slots=True)
class TrajectoryLoop:
    """State of one running trajectory. `doing` says what it waits for, for whoever waits for it in turn."""

    trajectory: Trajectory
    budget: Budget
    chat: ChatFormat
    environment: EnvironmentHandle
    begin: Callable[[], GenerateSegment]  # pins the version: called once, right before the first request
    on_segment: Callable[[SegmentResult, int], None]  # the segment and the length of its context
    on_tools: Callable[[EnvironmentReply], None]
    doing: str = "queue"  # queue, sampling, tool, reward
    stopped_by: str | None = None  # the cause given to `stop`
    discarded: bool = False  # stopped, and it leaves nothing behind
    _begun: bool = False  # its first request is made
    _tools: list[dict] = field(default_factory=list)
    _wrap_up: list[dict] = field(default_factory=list)  # the messages that ask for the final answer
    _wrapped_up: bool = False
    _context: list[int] = field(default_factory=list)  # of the current conditioning run
    _history: list[Mapping[str, Any]] = field(default_factory=list)  # the conversation before the open turn
    _num_calls: int = 0  # tool calls so far: each has an id of its own
    _generated: int = 0
    _run: int = 0  # the current conditioning run
    # What the model wrote or read without the environment's knowledge, in order: turns, and {"messages": …}.
    _unseen: list[dict] = field(default_factory=list)

    async def run(self, row: dict[str, Any], seed: int) -> None:
        """To the end: reward, truncation cause and spans are then in the trajectory. Raises TrajectoryError.

        A discarded trajectory just ends: it has no reward.
        """
        try:
            await self._roll_out(row, seed)
        except (Dropped, TrajectoryError):
            if not self.discarded:
                raise

    def stop(self, cause: str, *, discard: bool = False) -> None:
        """End with `cause` when the running request is done; a wait for a tool ends now. discard: without a reward, as
        does a trajectory that has made no request yet.
        """
        self.stopped_by, self.discarded = cause, discard or not self._begun
        if self.doing == "sampling":
            return
        if self.discarded:
            self.environment.drop()
        else:
            self.environment.interrupt(cause)

    async def _roll_out(self, row: dict[str, Any], seed: int) -> None:
        if self.discarded:  # before its first step
            return
        self.doing = "tool"
        reply = await self.environment.call("reset", {"row": row, "seed": seed})
        if self.discarded:  # in the tick of the reply
            return
        self._tools, self._wrap_up = reply.result["tools"], reply.result["wrap_up"]
        self._history = list(reply.result["messages"])
        self._append("prompt", self.chat.render_prompt(self._history, self._tools))
        self._begun = True
        generate = self.begin()
        turn_cap = None
        while True:
            ids, stopped, end = await self._sample_turn(generate, turn_cap)
            turn = self._parse(ids)
            turn_cap, cause = None, None
            if end == TURN:
                cause, turn_cap = await self._act(turn, stopped)
                if self.trajectory.reward is not None:
                    return
            else:
                if ids:
                    self._unseen.append(_argument(turn, stopped))
                cause = self._append_reply(self._wrap_up, turn, asks=True) if end == CUT else end
            if cause is not None:
                return await self._truncate(cause)

    async def _sample_turn(self, generate: GenerateSegment, turn_cap: int | None) -> tuple[list[int], bool, str]:
        """(ids of the turn, whether a stop id ended it, how it ended): as many requests as it takes."""
        turn: list[int] = []
        cap = self.budget.max_turn_tokens if turn_cap is None else turn_cap
        while True:
            if self.stopped_by is not None:
                return turn, False, self.stopped_by
            max_tokens = next_request_tokens(
                self.budget,
                generated_tokens=self._generated,
                context_tokens=len(self._context),
                turn_tokens=len(turn),
                wrapped_up=self._wrapped_up,
                turn_cap=turn_cap,
            )
            if max_tokens <= 0:
                spent = self._generated >= self.budget.max_generated_tokens
                return turn, False, "generated_tokens" if spent else "context"
            if not turn:
                self.trajectory.num_turns += 1
            self.doing = "sampling"
            segment = await generate(self._context, max_tokens, self._generated)
            if not segment.tokens:
                return turn, False, "empty_sample" if self.stopped_by is None else self.stopped_by
            self.on_segment(segment, len(self._context))
            self.trajectory.spans.append(
                Span("generated", segment.tokens, segment.version, segment.kv_version, segment.logprobs, self._run)
            )
            self._context += segment.tokens
            self._generated += len(segment.tokens)
            turn += segment.tokens
            if self.stopped_by is not None:  # at the end of a turn too, no environment follows
                return turn, segment.stopped, self.stopped_by
            if segment.stopped or (cap is not None and len(turn) >= cap):
                return turn, segment.stopped, TURN
            # In the last turn no answer can be asked for: the model writes on in this one, into its reserve.
            if self._wants_answer(self.budget.final_answer_reserve, len(self._context)) and not self._is_last_turn:
                return turn, False, CUT

    async def _act(self, turn: ModelTurn, stopped: bool) -> tuple[str | None, int | None]:
        """The environment's part of a turn: (cause of a truncation, cap of the next turn). At the end it sets the
        reward.
        """
        argument, calls = _argument(turn, stopped), turn.tool_calls
        if calls and self._no_turn_follows:  # they would be answered to nobody
            self._unseen.append(argument)
            return self._no_turn_follows, None
        if self._unseen:
            argument["unseen"], self._unseen = self._unseen, []
        self.doing = "tool" if calls else "reward"  # the call that ends an episode brings its reward
        reply = await self.environment.call("turn", argument)
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
        if reply.result.get("rewrites", False):
            return self._start_again(messages), reply.result["max_turn_tokens"]
        return self._append_reply(messages, turn), reply.result["max_turn_tokens"]

    def _append_reply(self, messages: list[dict], turn: ModelTurn, *, asks: bool = False) -> str | None:
        """Put the messages, and if it is time the wrap-up request, behind the turn. asks: they are that request.

        Returns a cause, and appends nothing, if that leaves no room to answer.
        """

        def render(messages: list[dict]) -> Rendered:
            return self.chat.render_reply(self._history, turn, messages, self._tools)

        before = [*self._history, assistant_message(turn.text, turn.tool_calls)]
        return self._go_on(before, messages, render, asks)

    def _start_again(self, messages: list[dict]) -> str | None:
        """The same with all that was replaced by the messages."""

        def render(messages: list[dict]) -> Rendered:
            return Rendered(self.chat.render_prompt(messages, self._tools), rewrites=True)

        return self._go_on([], messages, render, asks=False)

    def _go_on(
        self, before: list[Mapping], messages: list[dict], render: Callable[[list[dict]], Rendered], asks: bool
    ) -> str | None:
        """The conversation is now `before` and the messages, the context what these render to."""
        rendered = render(messages)
        reserve = self.budget.final_answer_reserve + self.budget.segment_tokens
        if not asks and self._wants_answer(reserve, self._length_with(rendered)):
            asks, messages = True, [*messages, *self._wrap_up]
            rendered = render(messages)
        if self._length_with(rendered) >= self.budget.max_context_tokens:
            return "context"
        if rendered.rewrites:
            self._run += 1
            self._context = []
        self._history = [*before, *messages]
        self._append("prompt" if rendered.rewrites else "framing", rendered.tokens)
        if asks:
            self._note_wrap_up()
        return None

    def _length_with(self, rendered: Rendered) -> int:
        """Tokens of the context that it would give."""
        return len(rendered.tokens) + (0 if rendered.rewrites else len(self._context))

    def _note_wrap_up(self) -> None:
        self._wrapped_up = True
        self._unseen.append({"messages": self._wrap_up})

    def _wants_answer(self, within: int, context_tokens: int) -> bool:
        """Whether it is time to ask for the final answer: no more than `within` tokens are left."""
        if self._wrapped_up or not self.budget.final_answer_reserve:
            return False
        return tokens_left(self.budget, self._generated, context_tokens) <= within

    @property
    def _is_last_turn(self) -> bool:
        return self.trajectory.num_turns >= self.budget.max_turns

    @property
    def _no_turn_follows(self) -> str | None:
        """The cause for a turn that asks for another one where none can follow."""
        if self._wrapped_up:
            return "final_answer"
        return "turns" if self._is_last_turn else None

    async def _truncate(self, cause: str) -> None:
        """The end by a limit."""
        self.trajectory.truncated = cause
        if self.discarded:
            return
        self.doing = "reward"
        unseen = {"unseen": self._unseen} if self._unseen else {}
        reply = await self.environment.call("truncate", {"cause": cause} | unseen)
        self._take_notes(reply)
        self.trajectory.reward = reply.result["reward"]

    def _parse(self, ids: Sequence[int]) -> ModelTurn:
        """The turn with its calls, each of which gets the id that its result will name."""
        if not ids:
            return ModelTurn(ids, "", [])
        text, calls = self.chat.parse_turn(ids)
        numbered = [call | {"id": f"call{self._num_calls + index:05d}"} for index, call in enumerate(calls, start=1)]
        self._num_calls += len(calls)
        return ModelTurn(ids, text, numbered)

    def _cut(self, message: dict) -> dict:
        """A tool's result within its budget. cut: the environment's process had to cut it already."""
        text = self.chat.cut(message["content"], self.budget.tool_output_tokens, message.get("cut", False))
        return message | {"content": text}

    def _append(self, kind: Any, tokens: list[int]) -> None:
        self.trajectory.spans.append(Span(kind, tokens, run=self._run))
        self._context += tokens

    def _take_notes(self, reply: EnvironmentReply) -> None:
        """What the environment says beside its answer."""
        for name, value in reply.result.get("metrics", {}).items():
            self.trajectory.metrics[name] = self.trajectory.metrics.get(name, 0.0) + value
        if "loss_mask_end" in reply.result:
            self.trajectory.loss_mask_end = reply.result["loss_mask_end"]


def _argument(turn: ModelTurn, stopped: bool) -> dict[str, Any]:
    """The turn as the environment is told of it."""
    return {"text": turn.text, "tool_calls": turn.tool_calls, "num_tokens": len(turn.ids), "stopped": stopped}
