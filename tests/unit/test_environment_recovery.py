"""What a host gives for another one to go on from, and how that one goes on."""

import asyncio
import re

import pytest
from environment_session import ROW, Quiz, less_line, session, turn
from open_environments import num_episodes

from pipeline.env import Env, TurnResult, check_env_class
from pipeline.environments.host import EnvironmentHost
from pipeline.environments.values import MAX_SNAPSHOT_BYTES
from pipeline.errors import ConfigTypeError
from pipeline.processes.environment.environment_client import EnvironmentClient
from workers.messages import EnvironmentReplies


class Counter(Quiz):
    """Counts turns in itself; the third ends the episode. Rewrites in the second, which sets a mask's end, too."""

    recovery = "snapshot"
    count = 0
    made = 0

    def __init__(self):
        type(self).made += 1

    def on_turn(self, traj):
        self.count += 1
        if self.count == 3:
            return None
        if self.count == 2:
            traj.rewrite("anew")
            traj.loss_mask_end = 4
        return TurnResult(f"turn {self.count}")

    def reward(self, traj, row):
        seen = [(message["role"], message["content"]) for message in traj.messages]
        self.seen.append((self.count, seen, traj.num_turns, traj.num_generated_tokens, traj.loss_mask_end))
        return float(self.count)

    def snapshot(self):
        return {"count": self.count}

    async def restore(self, state):
        await asyncio.sleep(0)
        self.count = state["count"]


class Watching(Counter):
    """Needs nothing but the view."""

    recovery = "stateless"

    def on_turn(self, traj):
        self.count = traj.num_turns - 1
        return super().on_turn(traj)


def play(env_class, lose_after):
    """A whole episode over two hosts, the first of which is lost after so many turns; what `reward` saw."""
    env_class.closed, env_class.seen, env_class.made = [], [], 0

    async def run():
        hosts = [EnvironmentHost(env_class, timeout=60.0, name="Counter") for _ in range(2)]
        client = EnvironmentClient([serve(hosts, 0), serve(hosts, 1)], None)
        hosts.append(client)
        environment = client.open(4, 2)
        reply = await environment.call("reset", {"row": ROW, "seed": 3})
        for number in range(3):
            if number == lose_after:
                client.lost(0, "it died", {})
            reply = await environment.call("turn", turn(text=f"say {number}", num_tokens=2))
        for host in hosts[:2]:
            await host.close()
        return reply.result["reward"]

    assert asyncio.run(run()) == 3.0
    (seen,) = env_class.seen
    return seen


def serve(hosts, at):
    def send(message):
        for call in message.calls:
            hosts[at].start(call, lambda reply: hosts[2].receive(EnvironmentReplies([reply])))

    return send


@pytest.mark.parametrize("env_class", [Counter, Watching])
@pytest.mark.parametrize("lose_after", [0, 1, 2])
def test_an_environment_that_goes_on_elsewhere_sees_what_it_would_have_seen(env_class, lose_after):
    undisturbed = play(env_class, lose_after=None)
    assert env_class.made == 1
    assert play(env_class, lose_after) == undisturbed
    assert env_class.made == 2


def reply_of(env_class, call="reset"):
    async def steps(ask, host):
        first = await ask("reset", row=ROW, seed=1)
        return first if call == "reset" else await ask(call)

    return session(env_class, steps)


def test_only_environments_with_snapshots_are_asked_for_them():
    class Stateless(Quiz):
        recovery = "stateless"

        def snapshot(self):
            raise AssertionError

    assert "snapshot" not in reply_of(Stateless).result and reply_of(Stateless).result["recovery"] == "stateless"


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"f": open}, "Bad.snapshot of trajectory 4.2 failed with TypeError: snapshot gave .* can't be sent"),
        (b"x" * MAX_SNAPSHOT_BYTES, "failed with ValueError: snapshot gave 1,048,581 bytes; .* 1,048,576 at most"),
    ],
)
def test_a_snapshot_that_cannot_travel_fails_the_trajectory_by_name(state, sentence):
    class Bad(Quiz):
        recovery = "snapshot"

        def snapshot(self):
            return state

        def restore(self, state):
            raise AssertionError

    reply = reply_of(Bad)
    assert re.search(sentence, reply.error), reply.error
    assert len(Bad.closed) == 1


def test_a_restore_that_raises_fails_the_trajectory_by_name():
    class Bad(Counter):
        def restore(self, state):
            return 1 / 0

    async def steps(ask, host):
        story = {"messages": [], "turns": [], "snapshot": {}}
        return await ask("restore", row=ROW, seed=1, **story), num_episodes(host)

    reply, num_left = session(Bad, steps)
    sentence = less_line(reply.error, __file__)
    assert sentence == "Bad.restore of trajectory 4.2 failed with ZeroDivisionError: division by zero"
    assert num_left == 0 and len(Bad.closed) == 1


def test_a_recovery_that_there_is_not_fails_the_trajectory():
    class Odd(Quiz):
        def reset(self, row):
            self.recovery = "hope"
            return ""

    assert "Odd.recovery is 'hope'. It must be one of drop, stateless, snapshot" in reply_of(Odd).error


@pytest.mark.parametrize("missing", ["snapshot", "restore"])
def test_snapshots_need_both_methods(missing):
    class Half(Env):
        recovery = "snapshot"

        def reset(self, row):
            return ""

        def reward(self, traj, row):
            return 0.0

        def snapshot(self):
            return {}

        def restore(self, state):
            pass

    check_env_class(Half)
    delattr(Half, missing)
    with pytest.raises(ConfigTypeError, match=rf"Half has no {missing}\(\)"):
        check_env_class(Half)
