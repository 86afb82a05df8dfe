"""The model's half of a trajectory: what it reads and writes, as exact token ids, within its budget.

Everything recorded is exact: spans hold the sampled ids and the log-probs they were sampled with, and what is appended
is rendered once. Whoever leads the conversation (an environment: `trajectory_loop.py`) says what the model reads, and
when it writes.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.chat.format import ChatFormat, ModelTurn, Rendered, assistant_message
from pipeline.config import Budget
from pipeline.processes.sampler.sampler_client import SegmentResult
from pipeline.rollouts.budget import next_request_tokens, tokens_left
from pipeline.rollouts.doing import Doing
from pipeline.trajectory import Span, Trajectory

# generate(context, max_tokens, generated so far) -> the segment
GenerateSegment = Callable[[list[int], int, int], Awaitable[SegmentResult]]

# How a turn ended: TURN is the other side's turn, CUT asks for the final answer; anything else is a cause of
# truncation.
TURN = "turn"
CUT = "cut"


@dataclass(slots=True)
class SampledTurns:
    """A conversation with the model: `open` it, then `sample` a turn and `reply` to it, in turns.

    wrap_up: the messages that ask for the final answer when little more than `Budget.final_answer_reserve` is left;
    None: nobody asks. stopped_by: the cause with which the trajectory is to end; no request follows.
    """

    trajectory: Trajectory
    budget: Budget
    chat: ChatFormat
    begin: Callable[[], GenerateSegment]  # pins the version: called once, right before the first request
    on_segment: Callable[[SegmentResult, int], None]  # the segment and the length of its context
    wrap_up: list[dict] | None = None
    stopped_by: str | None = None
    wrapped_up: bool = False  # the final answer has been asked for
    begun: bool = False  # its first request is made, or about to be
    sampling: Doing | None = None  # the request that is under way
    history: list[Mapping[str, Any]] = field(default_factory=list)  # the conversation before the open turn
    tools: Sequence[Mapping[str, Any]] = ()
    context: list[int] = field(default_factory=list)  # ids of the current conditioning run
    generated: int = 0  # tokens, over all runs
    segments: list[SegmentResult] = field(default_factory=list)  # of the turn sampled last
    _ids: list[int] = field(default_factory=list)  # of the turn that is being sampled
    _open: ModelTurn | None = None  # the turn sampled last, while the history lacks it
    _generate: GenerateSegment | None = None
    _num_calls: int = 0  # tool calls so far: each has an id of its own
    _run: int = 0  # the current conditioning run

    @property
    def is_last_turn(self) -> bool:
        return self.trajectory.num_turns >= self.budget.max_turns

    @property
    def conversation(self) -> list[Mapping[str, Any]]:
        """What the model last read, and what it wrote then, as messages."""
        if self._open is None or not self._open.ids:
            return list(self.history)
        return [*self.history, assistant_message(self._open.text, self._open.tool_calls)]

    def open(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> None:
        """What the model reads first."""
        self.tools = tools
        self.history = list(messages)
        self._append("prompt", self.chat.render_prompt(self.history, tools))
        self.begun = True
        self._generate = self.begin()

    async def sample(self, turn_cap: int | None = None) -> tuple[ModelTurn, bool, str]:
        """(the turn, whether a stop id ended it, how it ended): as many requests as it takes.

        turn_cap: most tokens of this turn, in place of the budget's.
        """
        assert self._generate is not None, "a turn is sampled after `open`"
        self.segments = []
        stopped, end = await self._sample_into(self._ids, self._generate, turn_cap)
        return self.reopen(self._ids), stopped, end

    def reopen(self, ids: list[int]) -> ModelTurn:
        """The turn of these ids is the one sampled last."""
        self._open, self._ids = self._parse(ids), []
        return self._open

    def saved(self) -> dict[str, Any]:
        """What `resume` goes on from beside the trajectory, as plain values: as if no request were under way."""
        unanswered_turn = self.sampling is not None and not self._ids
        return {
            "history": [dict(message) for message in self.history],
            "tools": [dict(tool) for tool in self.tools],
            "wrap_up": self.wrap_up,
            "wrapped_up": self.wrapped_up,
            "num_calls": self._num_calls,
            "num_turns": self.trajectory.num_turns - int(unanswered_turn),
            "ids": list(self._ids),
        }

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Go on where an earlier run stood; its trajectory is here already."""
        self.history, self.tools = list(saved["history"]), list(saved["tools"])
        self.wrap_up, self.wrapped_up = saved["wrap_up"], saved["wrapped_up"]
        self._num_calls, self.trajectory.num_turns = saved["num_calls"], saved["num_turns"]
        self._ids, self._run = list(saved["ids"]), self.trajectory.run
        self.context, self.generated = self.trajectory.run_tokens(), self.trajectory.generated_tokens
        self.begun = True
        self._generate = self.begin()

    def reply(self, turn: ModelTurn, messages: list[dict], *, asks: bool = False) -> str | None:
        """Put the messages, and if it is time the wrap-up request, behind the turn. asks: they are that request.

        Returns a cause of truncation, and appends nothing, if that leaves no room to answer.
        """

        def render(messages: list[dict]) -> Rendered:
            return self.chat.render_reply(self.history, turn, messages, self.tools)

        return self._go_on([*self.history, assistant_message(turn.text, turn.tool_calls)], messages, render, asks)

    def start_again(self, messages: list[dict], tools: Sequence[Mapping[str, Any]] | None = None) -> str | None:
        """The same with all that was replaced by the messages: a new conditioning run. tools: None for those so far."""
        tools = self.tools if tools is None else tools

        def render(messages: list[dict]) -> Rendered:
            return Rendered(self.chat.render_prompt(messages, tools), rewrites=True)

        return self._go_on([], messages, render, asks=False, tools=tools)

    def branch(
        self,
        ids: list[int],
        history: Sequence[Mapping[str, Any]],
        turn: ModelTurn | None,
        messages: list[dict],
        tools: Sequence[Mapping[str, Any]],
    ) -> str | None:
        """The same behind what an earlier context had: a new conditioning run that begins with its exact ids.

        ids: up to the end of `turn`, before which the history stood; or, without one, all that the history became.
        """
        if turn is None:
            assert not messages, "what follows a prompt is the model's turn"
            before = list(history)
        else:
            before = [*history, assistant_message(turn.text, turn.tool_calls)]

        def render(messages: list[dict]) -> Rendered:
            if turn is None:
                return Rendered(ids, rewrites=True)
            follows = self.chat.render_reply(history, turn, messages, tools)
            return follows if follows.rewrites else Rendered([*ids, *follows.tokens], rewrites=True)

        return self._go_on(before, messages, render, asks=False, tools=tools)

    async def _sample_into(self, turn: list[int], generate: GenerateSegment, turn_cap: int | None) -> tuple[bool, str]:
        """Sample the ids of a turn into `turn`; (whether a stop id ended it, how it ended)."""
        cap = self.budget.max_turn_tokens if turn_cap is None else turn_cap
        while True:
            if self.stopped_by is not None:
                return False, self.stopped_by
            max_tokens = next_request_tokens(
                self.budget,
                generated_tokens=self.generated,
                context_tokens=len(self.context),
                turn_tokens=len(turn),
                wrapped_up=self.wrapped_up,
                turn_cap=turn_cap,
            )
            if max_tokens <= 0:
                spent = self.generated >= self.budget.max_generated_tokens
                return False, "generated_tokens" if spent else "context"
            if not turn:
                self.trajectory.num_turns += 1
            segment = await self._request(generate, max_tokens)
            if not segment.tokens:
                return False, "empty_sample" if self.stopped_by is None else self.stopped_by
            self.on_segment(segment, len(self.context))
            self.segments.append(segment)
            self.trajectory.spans.append(
                Span("generated", segment.tokens, segment.version, segment.kv_version, segment.logprobs, self._run)
            )
            self.context += segment.tokens
            self.generated += len(segment.tokens)
            turn += segment.tokens
            if self.stopped_by is not None:  # at the end of a turn too, nothing follows
                return segment.stopped, self.stopped_by
            if segment.stopped or (cap is not None and len(turn) >= cap):
                return segment.stopped, TURN
            # In the last turn no answer can be asked for: the model writes on in this one, into its reserve.
            if self._wants_answer(self.budget.final_answer_reserve, len(self.context)) and not self.is_last_turn:
                return False, CUT

    async def _request(self, generate: GenerateSegment, max_tokens: int) -> SegmentResult:
        self.sampling = Doing("sampling", f"sampling of turn {self.trajectory.num_turns}, at most {max_tokens} tokens,")
        try:
            return await generate(self.context, max_tokens, self.generated)
        finally:
            self.sampling = None

    def _go_on(
        self,
        before: list[Mapping],
        messages: list[dict],
        render: Callable[[list[dict]], Rendered],
        asks: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str | None:
        """The conversation is now `before` and the messages, the context what these render to."""
        rendered = render(messages)
        reserve = self.budget.final_answer_reserve + self.budget.segment_tokens
        if not asks and self._wants_answer(reserve, self._length_with(rendered)):
            asks, messages = True, [*messages, *self.wrap_up]
            rendered = render(messages)
        if self._length_with(rendered) >= self.budget.max_context_tokens:
            return "context"
        if rendered.rewrites:
            self._run += 1
            self.context = []
        if tools is not None:
            self.tools = tools
        self.history, self._open = [*before, *messages], None
        self._append("prompt" if rendered.rewrites else "framing", rendered.tokens)
        self.wrapped_up |= asks
        return None

    def _length_with(self, rendered: Rendered) -> int:
        """Tokens of the context that it would give."""
        return len(rendered.tokens) + (0 if rendered.rewrites else len(self.context))

    def _wants_answer(self, within: int, context_tokens: int) -> bool:
        """Whether it is time to ask for the final answer: no more than `within` tokens are left."""
        if self.wrap_up is None or self.wrapped_up or not self.budget.final_answer_reserve:
            return False
        return tokens_left(self.budget, self.generated, context_tokens) <= within

    def _parse(self, ids: Sequence[int]) -> ModelTurn:
        """The turn with its calls, each of which gets the id that its result will name."""
        if not ids:
            return ModelTurn(ids, "", [])
        text, calls = self.chat.parse_turn(ids)
        numbered = [call | {"id": f"call{self._num_calls + index:05d}"} for index, call in enumerate(calls, start=1)]
        self._num_calls += len(calls)
        return ModelTurn(ids, text, numbered)

    def _append(self, kind: Any, tokens: list[int]) -> None:
        self.trajectory.spans.append(Span(kind, tokens, run=self._run))
        self.context += tokens
