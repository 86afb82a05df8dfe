"""One trajectory loop with a played sampler and a played environment, and what came of it."""

import asyncio

from pipeline.chat.format import ParsedTurn, Rendered
from pipeline.config import Budget
from pipeline.processes.sampler.sampler_client import SegmentResult
from pipeline.rollouts.sampled_turns import SampledTurns
from pipeline.rollouts.trajectory_loop import TrajectoryLoop
from pipeline.trajectory import Trajectory
from workers.messages import EnvironmentReply, ToolRecord

STOP = 0
PROMPT = [100, 101, 102]
FRAMING = [200, 201]
MORE = {"role": "user", "content": "more"}


class Chat:
    """Ids that say what they are: PROMPT, then FRAMING after each turn; a turn that holds a 9 calls a tool."""

    def __init__(self):
        self.rendered = []
        self.histories = []  # of each reply
        self.rewrites = False  # what replies say of themselves

    def render_prompt(self, messages, tools):
        self.rendered.append(("prompt", messages, tools))
        return list(PROMPT)

    def render_reply(self, history, turn, messages, tools):
        self.rendered.append(("reply", messages, list(turn.ids)))
        self.histories.append(list(history))
        return Rendered(list(FRAMING), self.rewrites)

    def cut(self, text, max_tokens, already):
        return f"{text[:max_tokens]}~" if already or len(text) > max_tokens else text

    def parse_turn(self, turn_ids):
        calls = [{"name": "look", "arguments": {}, "error": None}] if 9 in turn_ids else []
        return ParsedTurn(" ".join(map(str, turn_ids)), calls)


class Environment:
    """Answers turns with `replies`, then with a reward of 0.5; a truncation with -1."""

    def __init__(self, replies=(), reset=None):
        self.calls = []
        self._replies = list(replies)
        self._reset = reset or {"messages": ["?"], "tools": ["look"], "wrap_up": ["now!"]}

    async def call(self, call, argument):
        self.calls.append((call, argument))
        if call == "reset":
            result = self._reset
        elif call == "truncate":
            result = {"reward": -1.0, "metrics": {"cut": 1.0}}
        else:
            result = self._replies.pop(0) if self._replies else {"messages": None, "reward": 0.5}
        if isinstance(result, Exception):
            raise result
        return EnvironmentReply(1, result, [ToolRecord("look", 0.25, None)] if call == "turn" else [], 0.5, None)


def go_on(max_turn_tokens=None, **metrics):
    return {"messages": [MORE], "max_turn_tokens": max_turn_tokens} | ({"metrics": metrics} if metrics else {})


def segment(*tokens, stopped=None, version=5):
    stopped = bool(tokens) and tokens[-1] == STOP if stopped is None else stopped
    return SegmentResult(list(tokens), [-float(token) for token in tokens], version, version, 0, stopped, 0.1, 0.0)


class Played:
    """A loop that was run to its end, and what happened."""

    def __init__(self, segments, environment=None, chat=None, **budget):
        self.trajectory = Trajectory(4, 2, 0)
        self.environment = environment or Environment()
        self.chat = chat or Chat()
        self.requests = []  # (context, max_tokens, generated)
        self.noted = []  # (tokens, length of their context)
        self.tools = []
        self.num_cut = 0
        self.begun = 0
        self._segments = list(segments)
        turns = SampledTurns(
            self.trajectory,
            Budget(**budget),
            self.chat,
            self._begin,
            lambda segment, context: self.noted.append((segment.tokens, context)),
        )
        self.loop = TrajectoryLoop(
            turns, self.environment, lambda reply: self.tools.extend(reply.tools), self._note_cut
        )

    def _begin(self):
        assert [call for call, _ in self.environment.calls] == ["reset"], "pinned before its first request"
        self.begun += 1
        return self._generate

    def _generate(self, context, max_tokens, generated):
        self.requests.append((list(context), max_tokens, generated))
        future = asyncio.get_running_loop().create_future()
        future.set_result(self._segments.pop(0))
        return future

    def _note_cut(self):
        self.num_cut += 1

    def run(self):
        asyncio.run(self.loop.run({"number": 3}, 77))
        assert self.begun == 1 and self._segments == [], "not everything that was played was asked for"
        return self

    @property
    def tokens(self):
        return [(span.kind, span.tokens) for span in self.trajectory.spans]

    @property
    def outcome(self):
        return self.trajectory.truncated, self.trajectory.reward

    @property
    def calls(self):
        return [call for call, _ in self.environment.calls]
