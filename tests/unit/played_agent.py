"""One rollout that an agent drives, with a played sampler, on a virtual clock: what the agent is given, and what of it
is recorded.
"""

import asyncio

from pipeline.chat.format import ParsedTurn, Rendered
from pipeline.config import Budget
from pipeline.endpoint.chat_request import ChatRequest
from pipeline.endpoint.sessions import Sessions
from pipeline.errors import TemplateError
from pipeline.rollouts.agent_loop import AgentLoop
from pipeline.rollouts.sampled_turns import SampledTurns
from pipeline.trajectory import Trajectory
from tests import virtual_clock
from tests.unit.played_trajectory import segment

IDLE = 60.0
SECONDS_A_REQUEST = 10.0


class LetterChat:
    """A message is 100 and an id per letter, what follows is written behind 50. 0 ends a turn, a 9 in it is a call."""

    OPENING = 50

    def render_prompt(self, messages, tools):
        return [60] * len(tools) + self._rendered(messages)

    def render_reply(self, history, turn, messages, tools):
        return Rendered(self._rendered(messages))

    def parse_turn(self, turn_ids):
        calls = [{"name": "look", "arguments": {"n": 1}, "error": None}] if 9 in turn_ids else []
        return ParsedTurn(self.decode(turn_ids), calls)

    def decode(self, ids):
        return " ".join(map(str, ids))

    def _rendered(self, messages):
        if any("!" in message["content"] for message in messages):
            raise TemplateError("The template refuses this.")
        return [*(index for message in messages for index in letters(message)), self.OPENING]


def letters(message):
    return [100, *map(ord, message["content"])]


class PlayedAgent:
    """`loop` with a sampler that answers each request after SECONDS_A_REQUEST with the next of `segments`."""

    def __init__(self, segments, *, chat=None, environment=None, offer_taken=True, **budget):
        self.trajectory = Trajectory(4, 2, 0)
        self.requests = []  # (context, max_tokens)
        self.begun = 0
        self.sessions = Sessions(asyncio.get_running_loop().time)
        self._segments = list(segments)
        turns = SampledTurns(
            self.trajectory, Budget(**budget), chat or LetterChat(), self._begin, lambda segment, context: None
        )
        self.loop = AgentLoop(turns, self.sessions, environment, "http://here/v1", IDLE)
        self.running = None
        self.token = None
        self._offer_taken = offer_taken

    def _begin(self):
        self.begun += 1
        return self._generate

    async def _generate(self, context, max_tokens, generated):
        self.requests.append((list(context), max_tokens))
        await asyncio.sleep(SECONDS_A_REQUEST)
        return self._segments.pop(0)

    async def start(self):
        """Run the loop, and take the rollout as a harness does."""
        self.running = asyncio.ensure_future(self.loop.run({"n": 5}, 77))
        await asyncio.sleep(0)
        if self._offer_taken:
            _, self.token = await self.sessions.take(0.0)
        return self

    async def ask(self, *messages, tools=(), **more):
        return await self.loop.complete(ChatRequest(list(messages), list(tools), **more))

    def post(self, reward, metrics=None):
        self.loop.score(reward, metrics)

    async def end(self):
        await self.running
        return self.trajectory.truncated, self.trajectory.reward

    @property
    def spans(self):
        return [(span.run, span.kind, span.tokens) for span in self.trajectory.spans]


def said(answer):
    """The answer as the agent sends it back."""
    calls = [
        {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        for call in answer.turn.tool_calls
        if call["error"] is None
    ]
    return {"role": "assistant", "content": answer.turn.text} | ({"tool_calls": calls} if calls else {})


def user(text):
    return {"role": "user", "content": text}


A, B, C = user("a"), user("b"), user("c")


def refused(error):
    """Of what pytest.raises(Refusal) has caught."""
    return error.value.status, error.value.code


def play(segments, script, **options):
    """What `await script(agent)` gives of a started agent."""

    async def whole():
        agent = PlayedAgent([segment(*ids) for ids in segments], **options)
        return await script(await agent.start())

    return virtual_clock.run(whole())
