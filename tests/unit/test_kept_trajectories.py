"""A trajectory that is saved at any moment and goes on in another run comes to the same tokens, calls and reward."""

import asyncio

import pytest

from pipeline.config import Budget
from pipeline.processes.sampler.sampler_client import SegmentResult
from pipeline.rollouts.kept_members import (
    KeptMembers,
    RunningMember,
    pack_file,
    pack_unfinished,
    read_kept,
)
from pipeline.rollouts.sampled_turns import SampledTurns
from pipeline.rollouts.trajectory_loop import TrajectoryLoop
from pipeline.run_dir.run_files import ROLLOUTS
from pipeline.trajectory import Span, Trajectory
from tests.unit.played_trajectory import STOP, Chat
from workers.messages import EnvironmentReply, ToolRecord

# Two calls of a tool (9), a turn of several segments, and an answer.
SCRIPT = [9, 5, STOP, 4, 4, 4, 4, 4, STOP, 9, 7, STOP, 6, STOP]
ROW, SEED = {"number": 3}, 77


class Moments:
    """Every await of a loop stands still here until the test lets it go on."""

    def __init__(self):
        self.waiting = []

    async def wait(self):
        future = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        await future

    def go_on(self):
        self.waiting.pop(0).set_result(None)


class Environment:
    """An environment of which another process can go on: what it answers depends on the turns so far alone."""

    def __init__(self, moments, recovery, num_turns):
        self.moments = moments
        self.calls = []
        self.story = None
        self._recovery = recovery
        self._num_turns = num_turns

    async def call(self, call, argument):
        self.calls.append((call, argument))
        await self.moments.wait()
        if call == "reset":
            result = {"messages": [{"role": "user", "content": "?"}], "tools": [{"name": "look"}]}
            result["wrap_up"] = [{"role": "user", "content": "now!"}]
            if self._recovery != "drop":
                self.story = argument | {"messages": result["messages"], "turns": []}
        elif call == "truncate":
            result = {"reward": -1.0, "metrics": {"cut": 1.0}}
        else:
            turns = len(self.story["turns"]) if self.story is not None else 0
            messages = [{"role": "user", "content": f"more {turns}"}] if turns + 1 < self._num_turns else None
            result = {"messages": messages, "metrics": {"turns": 1.0}}
            result |= {"max_turn_tokens": 6 if turns == 0 else None} if messages else {"reward": 0.25 * (turns + 1)}
            if self.story is not None and messages:
                self.story["turns"].append({"turn": argument, "messages": messages, "rewrites": False})
        return EnvironmentReply(1, result, [ToolRecord("look", 0.25, None)] if call == "turn" else [], 0.5, None)

    def resume(self, story):
        self.story = story

    def interrupt(self, cause):
        raise AssertionError("nothing is interrupted here")

    def drop(self):
        pass


class Play:
    """A loop under way. trajectory: what an earlier one had come to."""

    def __init__(self, trajectory=None, *, recovery="stateless", num_turns=4, **budget):
        self.moments = Moments()
        self.environment = Environment(self.moments, recovery, num_turns)
        self.started = 0
        self.budget = {"segment_tokens": 2, **budget}
        self.options = {"recovery": recovery, "num_turns": num_turns, **budget}
        turns = SampledTurns(
            Trajectory(4, 2, 0) if trajectory is None else trajectory,
            Budget(**self.budget),
            Chat(),
            self._begin,
            lambda segment, context: None,
        )
        self.loop = TrajectoryLoop(turns, self.environment, lambda reply: None, lambda: None)

    def _begin(self):
        self.started += 1
        return self._generate

    async def _generate(self, context, max_tokens, generated):
        await self.moments.wait()
        tokens = []
        while len(tokens) < max_tokens and not tokens[-1:] == [STOP]:
            tokens.append(SCRIPT[(generated + len(tokens)) % len(SCRIPT)])
        logprobs = [-0.5 * (generated + place) for place in range(len(tokens))]
        return SegmentResult(tokens, logprobs, 5, 5, 0, tokens[-1] == STOP, 0.1, 0.0)

    async def run(self, moments=10_000):
        """Up to its end, or up to the given number of moments. Returns whether it has ended."""
        self.task = asyncio.ensure_future(self.loop.run(ROW, SEED))
        for _ in range(moments):
            await asyncio.sleep(0)
            if self.task.done():
                break
            if self.moments.waiting:
                self.moments.go_on()
        await asyncio.sleep(0)
        return self.task.done()

    async def interrupt(self, directory):
        """What a resumed run reads of it; None if it starts again."""
        await asyncio.sleep(0)
        state = self.loop.saved()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        if state is None:
            return None
        (directory / "journal").mkdir(exist_ok=True)
        running = [RunningMember(self.loop.trajectory, 5, state)]
        (directory / ROLLOUTS).write_bytes(pack_file([pack_unfinished(4, [], running)]))
        return read_kept(directory)[4].running[2]


OPTIONS = {
    "several turns": {},
    "a limit of tokens": {"max_generated_tokens": 8},
    "a limit of turns": {"max_turns": 2},
    "an answer asked for": {"max_generated_tokens": 12, "final_answer_reserve": 4},
    "a turn's limit": {"max_turn_tokens": 3},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_saved_at_any_moment_it_comes_to_the_same_end(tmp_path, name):
    async def compare():
        whole = Play(**OPTIONS[name])
        assert await whole.run()
        went_on = 0
        for moment in range(1, 200):
            first = Play(**OPTIONS[name])
            if await first.run(moment):
                break
            saved = await first.interrupt(tmp_path)
            if saved is None:
                continue
            went_on += 1
            second = Play(saved.trajectory, **OPTIONS[name])
            second.loop.resume(saved.state)
            assert second.started == 1, "its version must be leased at once"
            assert await second.run()
            await second.task
            assert second.loop.trajectory == whole.loop.trajectory, f"saved at moment {moment}"
            assert second.loop.turns.conversation == whole.loop.turns.conversation
            assert "reset" not in [call for call, _ in second.environment.calls]
            before = first.environment.calls[: len(whole.environment.calls) - len(second.environment.calls)]
            assert before + second.environment.calls == whole.environment.calls
        assert went_on > 6

    asyncio.run(compare())


def test_one_whose_environment_is_dropped_starts_again(tmp_path):
    async def interrupted():
        play = Play(recovery="drop")
        await play.run(5)
        return await play.interrupt(tmp_path)

    assert asyncio.run(interrupted()) is None


def test_one_that_is_stopped_is_not_kept(tmp_path):
    async def interrupted():
        play = Play()
        await play.run(4)
        play.loop.turns.stopped_by = "trajectory_timeout"
        return await play.interrupt(tmp_path)

    assert asyncio.run(interrupted()) is None


def ended(member):
    spans = [Span("prompt", [1, 2]), Span("generated", [3, 4], 7, 6, [-0.25, -0.5])]
    return Trajectory(9, member, 3, spans, 0.5, None, None, 1, {"won": 1.0})


def write(directory, contents):
    (directory / "journal").mkdir(exist_ok=True)
    (directory / ROLLOUTS).write_bytes(contents)


def test_members_that_have_ended_come_back_as_they_were(tmp_path):
    write(tmp_path, pack_file([pack_unfinished(9, [ended(0), ended(3)], [], {3: 2})]))
    assert read_kept(tmp_path) == {9: KeptMembers(ended={0: ended(0), 3: ended(3)}, attempts={3: 2})}


def test_what_no_message_can_carry_starts_again(tmp_path):
    state = {"turns": {"history": [{"role": "user", "content": 1 << 70}]}}
    write(tmp_path, pack_file([pack_unfinished(9, [ended(0)], [RunningMember(ended(1), 7, state)])]))
    assert read_kept(tmp_path) == {9: KeptMembers(ended={0: ended(0)})}


def test_no_file_keeps_nothing(tmp_path):
    assert read_kept(tmp_path) == {}


def test_a_broken_file_is_passed_over_with_a_warning(tmp_path):
    whole = pack_file([pack_unfinished(9, [ended(0)], [])])
    flipped = bytes([*whole[:40], whole[40] ^ 1, *whole[41:]])
    for broken in (b"", whole[:-5], flipped, b"\x93\x01\x02", b"\xc1" * 40, b"\xdf\xff\xff\xff\xff", b"\x80"):
        write(tmp_path, broken)
        with pytest.warns(UserWarning, match=r"rollouts\.msgpack can't be used .*start again"):
            assert read_kept(tmp_path) == {}
