"""Rollouts, trajectory loops and completion as they are, against a played sampler and played environments on a virtual
clock: a request lasts as long as its tokens, an environment as its script says.

A script is one of `rollout.json`: groups of members with the `turns` the model wants to emit (their token counts, the
last token a stop) and the `tool_ticks` that the environment takes after each.
"""

import asyncio
from types import SimpleNamespace

from pipeline.chat.format import ParsedTurn, Rendered
from pipeline.config import Budget, GroupCompletion, Schedule
from pipeline.processes.environment.environment_client import EnvironmentClient
from pipeline.processes.learner.slot_table import SlotTable
from pipeline.processes.sampler.sampler_client import SegmentResult
from pipeline.rollouts.rollout_log import RolloutLog
from pipeline.rollouts.rollouts import RolloutRules, Rollouts
from pipeline.rollouts.sampling_counters import SamplingCounters
from pipeline.schedule import Admission
from pipeline.trainer_config import EngineConfig
from tests import virtual_clock
from workers.messages import EnvironmentCall, EnvironmentReplies, EnvironmentReply

STOP, WORD = 1, 2
REPLY_TOKENS = 3
MORE = {"role": "user", "content": "more"}


class Chat:
    """A prompt of as many tokens as its message says; every reply takes three."""

    def render_prompt(self, messages, tools):
        return [0] * messages[0]

    def render_reply(self, history, turn, messages, tools):
        return Rendered([0] * REPLY_TOKENS)

    def parse_turn(self, turn_ids):
        return ParsedTurn("", [])


class Sampler:
    """Emits what is left of each member's scripted turn, as far as the request allows."""

    index = 0
    num_waiting = 0  # every request is taken at once

    def __init__(self, script, ticks_per_token):
        self.num_trajectories = 0
        self.requests = {}  # (group, member) -> [start, end, cap, returned]
        self.running = 0
        self.withdrawn = []  # (group, member) of those who were asked for what has not left
        self._ticks = ticks_per_token
        self._script = script
        self._left = {}

    def generate(self, *, priority, group, member, pick, context, max_tokens, generated):
        loop = asyncio.get_running_loop()
        version = pick().version
        if generated == 0:  # its first request, maybe after a new start
            self._left[group, member] = list(self._script[group]["members"][member]["turns"])
        left = self._left[group, member]
        returned = min(max_tokens, left[0])
        left[0] -= returned
        stopped = left[0] == 0
        if stopped:
            left.pop(0)
        tokens = [WORD] * (returned - stopped) + [STOP] * stopped
        seconds = returned * self._ticks
        self.requests.setdefault((group, member), []).append(
            [round(loop.time()), round(loop.time() + seconds), max_tokens, returned]
        )
        future = loop.create_future()
        self.running += 1

        def answer():
            self.running -= 1
            future.set_result(SegmentResult(tokens, [0.0] * returned, version, version, 0, stopped, 0.0, 0.0))

        loop.call_later(seconds, answer)
        return future

    def whereabouts(self, group, member):
        return "ended by sampler 0, which has it"

    def withdraw(self, group, member):
        """Every request leaves at once here."""
        self.withdrawn.append((group, member))

    def release(self, group, member, then):
        then()


class Hosts:
    """In the place of EnvironmentClient's hosts: one environment per trajectory, with its script."""

    def __init__(self, script):
        self.calls = []  # (tick, group, member, call)
        self._script = script
        self._turns = {}
        self._working = {}

    def send(self, client, message):
        for call in message.calls:
            self._take(client, call)

    def _take(self, client, call: EnvironmentCall):
        loop = asyncio.get_running_loop()
        key = (call.group, call.member)
        self.calls.append((round(loop.time()), *key, call.call))
        played = self._script[call.group]["members"][call.member]

        def reply(result, error=None):
            client.receive(EnvironmentReplies([EnvironmentReply(call.request, result, [], 0.0, error)]))

        if call.call == "reset":
            self._turns[key] = 0
            reply({"messages": [self._script[call.group]["prompt"]], "tools": [], "wrap_up": ["answer"]})
        elif call.call == "turn":
            self._turns[key] += 1
            done = self._turns[key] >= len(played["turns"])

            def acted():
                del self._working[key]
                reply(
                    {"messages": None, "reward": played.get("reward", 1.0)}
                    if done
                    else {"messages": [MORE], "max_turn_tokens": None}
                )

            self._working[key] = (loop.call_later(played["tool_ticks"], acted), reply)
        else:
            if key in self._working:
                timer, answer = self._working.pop(key)
                timer.cancel()
                answer({}, "interrupted")
            reply({"reward": 0.0} if call.call == "truncate" else {})


class Events:
    """An audit log that only remembers."""

    def __init__(self):
        self.logged = []

    def log(self, event, **fields):
        self.logged.append({"event": event} | fields)

    def flush(self):
        pass

    def of(self, kind):
        return [event for event in self.logged if event["event"] == kind]


class Log(RolloutLog):
    """Remembers every trajectory that ended, also discarded ones."""

    def __init__(self, events, counters):
        super().__init__(events, counters)
        self.ended = {}  # (group, member) -> the trajectory
        self.discarded_by = {}  # (group, member) -> cause

    def trajectory(self, trajectory):
        self.ended[trajectory.group, trajectory.member] = trajectory
        super().trajectory(trajectory)

    def discarded(self, trajectory, cause):
        self.ended[trajectory.group, trajectory.member] = trajectory
        self.discarded_by[trajectory.group, trajectory.member] = cause
        super().discarded(trajectory, cause)


class Run:
    """What Rollouts need of an ActiveRun."""

    def __init__(self, script, ticks_per_token, max_context_tokens, hosts):
        self.spec = SimpleNamespace(max_context_tokens=max_context_tokens)
        self.samplers = [Sampler(script, ticks_per_token)]
        self.hosts = hosts
        self.endpoint = None
        self.failure = None
        self.environments = EnvironmentClient([lambda message: self.hosts.send(self.environments, message)], self.fail)
        self.slots = SlotTable(2, lambda slot, leases: None, lambda version: None)
        self.slots.published(0, 0)
        self._on_failure = []

    def on_failure(self, callback):
        self._on_failure.append(callback)

    def fail(self, error):
        if self.failure is None:
            self.failure = error
            for callback in self._on_failure:
                callback(error)


class Played:
    """The outcome of one script: `results` in order, (tick, Group or GroupFailed), and the run with what is left."""

    def __init__(
        self,
        script,
        *,
        completion,
        budget,
        concurrency,
        ticks_per_token=10,
        hosts=None,
        events=None,
        schedule=None,
        rows=None,
        second_round=None,
        seed=0,
        max_retries=0,
        trajectory_timeout=None,
        **options,
    ):
        """rows: the dataset row of each group, its own by default. second_round: from this group on they are admitted
        when all before have ended.
        """
        self.results = []
        self.script = script
        context = budget.get("max_context_tokens", Budget().max_context_tokens)
        self.run = Run(script, ticks_per_token, context, hosts or Hosts(script))
        self.sampler = self.run.samplers[0]
        limits = {"max_retries": max_retries, "trajectory_timeout": trajectory_timeout}
        self._config = EngineConfig(budget=Budget(**budget), schedule=schedule or Schedule(), seed=seed, **limits)
        self._rows = rows or list(range(len(script)))
        rounds = [range(second_round or len(script)), range(second_round or len(script), len(script))]
        virtual_clock.run(self._play(completion, concurrency, events, rounds, options))

    async def _play(self, completion, concurrency, events, rounds, options):
        loop = asyncio.get_running_loop()
        self.log = Log(events, SamplingCounters())
        self.rollouts = Rollouts(
            self._config,
            self.run,
            Chat(),
            [{}] * len(self.script),
            len(self.script[0]["members"]),
            self.log,
            RolloutRules(concurrency=concurrency, completion=GroupCompletion(**completion), **options),
        )
        for groups in rounds:
            for group in groups:
                self.rollouts.start([Admission(group, self._rows[group], self.script[group]["priority"])])
            waiting = len(groups)
            while waiting:
                result = await self.rollouts.completed.get()
                if isinstance(result, BaseException):
                    await self.rollouts.stop()
                    raise result
                self.results.append((round(loop.time()), result))
                waiting -= getattr(result, "final", True)
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # tasks that end in the last tick, and the calls they send
