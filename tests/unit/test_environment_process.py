"""The environment process's core on a link without a process: batching, the descriptor's edges, its end."""

import asyncio
import contextlib
import os
import sys
from collections import deque

import pytest
from open_environments import num_episodes

from pipeline.env import WRAP_UP
from pipeline.environments.activity import NUM_BYTES, ActivityBoard
from pipeline.environments.host import EnvironmentHost
from pipeline.environments.process import Server, serve
from pipeline.errors import ConfigError, ConfigTypeError, RunError
from pipeline.tasks.guess import Guess
from pipeline.user_code.load import load_env_class, make_first
from shm.block import Block
from workers.messages import (
    Consumed,
    EndRun,
    EnvironmentCall,
    EnvironmentReplies,
    Environments,
    Ready,
    RunEnded,
    Start,
    Stop,
)


class EdgeLink:
    """Like ZeroMQ's descriptor: readable once per arrival at an *empty* queue, and a send swallows that edge."""

    incarnation = 0

    def __init__(self):
        self._event = os.eventfd(0, os.EFD_NONBLOCK)
        self._arrived = deque()
        self.sent = []
        self.on_send = lambda message: None

    def fileno(self):
        return self._event

    def arrive(self, *messages):
        if not self._arrived:
            os.eventfd_write(self._event, 1)
        self._arrived.extend(messages)

    def receive(self, timeout_seconds):
        self._swallow_edge()
        return self._arrived.popleft() if self._arrived else None

    def send(self, message):
        self.sent.append(message)
        self.on_send(message)
        self._swallow_edge()

    def _swallow_edge(self):
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            pass

    def close(self):
        os.close(self._event)


@pytest.fixture
def link():
    link = EdgeLink()
    yield link
    link.close()


def resets(first, count):
    return Environments(
        [
            EnvironmentCall(first + i, first + i, 0, "reset", {"row": {"number": 7, "seed": 0}, "seed": i})
            for i in range(count)
        ]
    )


def run_server(link):
    async def run():
        host = EnvironmentHost(Guess, timeout=60.0, name="Guess")
        config = await asyncio.wait_for(Server(link, host).run(), 30)
        return config, num_episodes(host)

    return asyncio.run(run())


def test_calls_that_arrived_together_are_answered_in_one_message(link):
    link.arrive(resets(0, 3), resets(3, 2))
    link.on_send = lambda message: link.arrive(Stop())
    assert run_server(link) == (Stop(), 0)
    assert len(link.sent) == 1 and isinstance(link.sent[0], EnvironmentReplies)
    assert [reply.request for reply in link.sent[0].replies] == [0, 1, 2, 3, 4]
    assert all(reply.error is None for reply in link.sent[0].replies)


def test_what_arrives_while_sending_is_not_overlooked(link):
    """The edge of the second message is swallowed by the first reply's send."""
    link.arrive(resets(0, 1))
    waves = iter([resets(1, 1), resets(2, 1), Stop()])
    link.on_send = lambda message: link.arrive(next(waves))
    run_server(link)
    assert [[reply.request for reply in message.replies] for message in link.sent] == [[0], [1], [2]]


@pytest.mark.parametrize("ending", [Start({"environment": "next"}), EndRun(), Stop()])
def test_what_ends_a_run_closes_its_environments_and_leaves_what_follows_unread(link, ending):
    link.arrive(resets(0, 2), ending, Start({"environment": "later"}))
    assert run_server(link) == (ending, 0)
    assert link.receive(0) == Start({"environment": "later"})


def test_an_unknown_message_and_a_broken_link_end_the_run_with_the_error(link):
    link.arrive(Consumed(3))
    with pytest.raises(RunError, match="got Consumed"):
        run_server(link)

    def broken(message):
        raise OSError("gone")

    link.on_send = broken
    link.arrive(resets(0, 1))
    with pytest.raises(OSError, match="gone"):
        run_server(link)


def test_a_run_imports_the_class_from_the_users_directories(link, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "users_envs_module.py").write_text(
        "import pipeline.env as rl\n"
        "class Outer:\n"
        "    class Echo(rl.Env):\n"
        "        def __init__(self, word): self.word = word\n"
        "        def reset(self, row): return self.word\n"
        "        def reward(self, traj, row): return 1\n"
    )
    link.arrive(resets(0, 1))
    answers = {EnvironmentReplies: EndRun(), RunEnded: Start({"environment": "next"})}
    link.on_send = lambda message: link.arrive(answers[type(message)]) if type(message) in answers else None
    with started(tmp_path, "users_envs_module:Outer.Echo", word="hello") as (config, board):
        assert serve(link, config) == {"environment": "next"}
        assert board.row.read().pid == os.getpid() and board.look().everyone == []
    ready, replies, ended = link.sent
    assert isinstance(ready, Ready) and isinstance(ended, RunEnded)
    assert replies.replies[0].result == {
        "messages": [{"role": "user", "content": "hello"}],
        "tools": [],
        "wrap_up": [{"role": "user", "content": WRAP_UP}],
        "recovery": "drop",
    }


def test_a_class_that_cannot_be_made_is_told_before_the_process_is_ready(link, tmp_path):
    with started(tmp_path, "pipeline.tasks.guess:Guess", latency="long") as (config, _):
        with pytest.raises(ConfigError, match="The environment Guess can't be made: ConfigError: .*'long'"):
            serve(link, config)
    assert link.sent == []


def test_the_instance_that_was_tried_is_the_first_one_used():
    made = []

    def make_env():
        made.append(Guess())
        return made[-1]

    make = make_first(make_env, "m:C")
    assert [make(), make()] == made and len(made) == 2


@contextlib.contextmanager
def started(directory, path, **arguments):
    """(config of a run of this class, the board that its process writes)."""
    with Block.create("activity", NUM_BYTES) as block:
        board = ActivityBoard(block.view)
        board.format()
        config = {
            "sys_path": [str(directory)],
            "environment": path,
            "arguments": arguments,
            "environment_timeout": 60.0,
            "max_tool_chars": None,
            "activity": {"path": block.path, "num_bytes": block.num_bytes},
            "try_first": True,
        }
        yield config, board


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("Guess", "named as module:name or as path/to/file.py:name"),
        (":Guess", "named as module:name or as path/to/file.py:name"),
        ("no_such_module:Guess", "there is no module no_such_module"),
        ("pipeline.tasks.guess:Gess", "has no 'Gess'. Did you mean Guess"),
    ],
)
def test_a_class_that_cannot_be_imported_is_one_sentence(path, fault):
    with pytest.raises(ConfigError, match=fault):
        load_env_class(path)


def test_a_module_that_raises_on_import_is_named_with_its_error(tmp_path, monkeypatch):
    (tmp_path / "users_broken_module.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError, match="'users_broken_module:X' can't be imported: .*py line 1: ZeroDivisionError: division"
    ):
        load_env_class("users_broken_module:X")


def test_a_class_that_is_no_environment_is_refused():
    with pytest.raises(ConfigTypeError, match="derived from Env"):
        load_env_class("pathlib:Path")
