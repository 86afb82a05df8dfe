"""One trajectory from its environment's reset to its reward: requests, turns, tools, budgets (`semantics`: the
trajectory loop).

Everything it records is exact: spans hold the sampled ids and the log-probs they were sampled with; text exists only
for the environment. Nothing here decides when a trajectory starts or which version it is pinned to; `rollouts.py`
does.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pipeline.budget import next_request_tokens
from pipeline.config import Budget
from pipeline.environment_client import EnvironmentHandle
from pipeline.rendering import ChatFormat
from pipeline.sampler_client import SegmentResult
from pipeline.trajectory import Span, Trajectory
from workers.messages import EnvironmentReply

# generate(context, max_tokens, generated so far) -> the segment
Generate = Callable[[list[int], int, int], asyncio.Future[SegmentResult]]


@dataclass(slots=True)
class TrajectoryLoop:
    """State of one running trajectory. `doing` says what it waits for, for whoever waits for it in turn."""

    trajectory: Trajectory
    budget: Budget
    chat: ChatFormat
    environment: EnvironmentHandle
    begin: Callable[[], Generate]  # pins the version: called once, right before the first request
    on_segment: Callable[[SegmentResult, int], None]  # the segment and the length of its context
    on_tools: Callable[[EnvironmentReply], None]
    doing: str = "queue"  # queue, sampling, tool, reward
    _context: list[int] = field(default_factory=list)  # of the current conditioning run
    _generated: int = 0

    async def run(self, row: dict[str, Any], seed: int) -> None:
        """To the end: reward, truncation cause and spans are then in the trajectory. Raises TrajectoryError."""
        self.doing = "tool"
        reply = await self.environment.call("reset", {"row": row, "seed": seed})
        self._append("prompt", self.chat.render_prompt(reply.result["messages"], reply.result["tools"]))
        generate = self.begin()
        turn_cap = None
        while True:
            self.trajectory.num_turns += 1
            turn, stopped, cause = await self._sample_turn(generate, turn_cap)
            if cause is not None:
                return await self._truncate(cause)
            text, calls = self.chat.parse_turn(turn)
            if calls and self.trajectory.num_turns >= self.budget.max_turns:
                return await self._truncate("turns")  # its calls would be answered to nobody
            argument = {"text": text, "tool_calls": calls, "num_tokens": len(turn), "stopped": stopped}
            self.doing = "tool" if calls else "reward"  # the call that ends an episode brings its reward
            reply = await self.environment.call("turn", argument)
            self.on_tools(reply)
            self._add_metrics(reply)
            messages = reply.result["messages"]
            if messages is None:
                self.trajectory.reward = reply.result["reward"]
                return
            if self.trajectory.num_turns >= self.budget.max_turns:
                return await self._truncate("turns")
            framing = self.chat.render_reply(messages, turn)
            if len(self._context) + len(framing) >= self.budget.max_context_tokens:
                return await self._truncate("context")
            self._append("framing", framing)
            turn_cap = reply.result["max_turn_tokens"]

    async def _sample_turn(self, generate: Generate, turn_cap: int | None) -> tuple[list[int], bool, str | None]:
        """(ids of the turn, whether a stop id ended it, cause of a truncation): as many requests as it takes."""
        turn: list[int] = []
        cap = self.budget.max_turn_tokens if turn_cap is None else turn_cap
        while True:
            max_tokens = next_request_tokens(
                self.budget,
                generated_tokens=self._generated,
                context_tokens=len(self._context),
                turn_tokens=len(turn),
                wrapped_up=False,
                turn_cap=turn_cap,
            )
            if max_tokens <= 0:
                spent = self._generated >= self.budget.max_generated_tokens
                return turn, False, "generated_tokens" if spent else "context"
            self.doing = "sampling"
            segment = await generate(self._context, max_tokens, self._generated)
            if not segment.tokens:
                return turn, False, "empty_sample"
            self.on_segment(segment, len(self._context))
            self.trajectory.spans.append(
                Span("generated", segment.tokens, segment.version, segment.kv_version, segment.logprobs)
            )
            self._context += segment.tokens
            self._generated += len(segment.tokens)
            turn += segment.tokens
            if segment.stopped:
                return turn, True, None
            if cap is not None and len(turn) >= cap:
                return turn, False, None

    async def _truncate(self, cause: str) -> None:
        self.doing = "reward"
        reply = await self.environment.call("truncate", {"cause": cause})
        self._add_metrics(reply)
        self.trajectory.truncated = cause
        self.trajectory.reward = reply.result["reward"]

    def _append(self, kind: Any, tokens: list[int]) -> None:
        self.trajectory.spans.append(Span(kind, tokens))
        self._context += tokens

    def _add_metrics(self, reply: EnvironmentReply) -> None:
        for name, value in reply.result.get("metrics", {}).items():
            self.trajectory.metrics[name] = self.trajectory.metrics.get(name, 0.0) + value
