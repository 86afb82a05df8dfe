"""Tool servers of real verifiers tasksets: processes that end with their rollout, their loop, or who started them."""

import asyncio
import glob
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.scripted_endpoint import ScriptedEndpoint, tool_call
from workers.processes.process import ROOT
from workers.processes.sockets import RUN_FILES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        importlib.util.find_spec("verifiers") is None, reason="verifiers isn't installed (make test installs it)"
    ),
]

TASKSETS = str(Path(__file__).parent.parent / "data" / "verifiers")
ALONE = {"task": {"own": {}}}
SHARED = {"task": {"own": None}, "shared": {}}
SECONDS = 300.0
# A process that plays with the config in its arguments, says what it found, and then waits.
PLAYER = """
import asyncio, json, sys
from pipeline.adapters.verifiers import Verifiers
from pipeline.adapters.verifiers_episodes import served

async def main(config, url, number):
    rows = Verifiers.rows(0, taskset="adding", **config)
    environment = await served("adding", config)
    outcomes = [await environment.play(rows[2], url, f"key-{n}") for n in range(number)]
    print(json.dumps([outcome.reward for outcome in outcomes]), flush=True)
    await asyncio.to_thread(sys.stdin.read)

asyncio.run(main(json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
"""


async def played(config, run_files, number, then):
    """The rewards, the requests, and what `then` returns, which is called with the player while it waits."""
    endpoint = ScriptedEndpoint([tool_call("adder_add", a=2, b=40)], "It is 42.")
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([ROOT, TASKSETS]), RUN_FILES: str(run_files)}
    async with endpoint.up() as url, asyncio.timeout(SECONDS):
        player = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PLAYER, json.dumps(config), url, str(number)),
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            rewards = json.loads(await player.stdout.readline())
            return rewards, endpoint.asked, await then(player)
        finally:
            if player.returncode is None:
                player.kill()
                await player.wait()


def servers_of(player):
    return [one for one in psutil.Process(player.pid).children(recursive=True) if "adding_server" in one.cmdline()]


def test_a_tasks_own_server_answers_and_ends_with_its_rollout(tmp_path):
    async def look(player):
        return servers_of(player), [path for path in tmp_path.rglob("*") if path.is_file()]

    before = set(glob.glob("/tmp/vf-port-*"))
    rewards, asked, (servers, files) = asyncio.run(played(ALONE, tmp_path, 1, look))
    assert rewards == [1.0]
    (_, first), (_, second) = asked
    assert [tool["function"]["name"] for tool in first["tools"]] == ["adder_add"]
    assert first["tools"] == second["tools"]
    assert second["messages"][-1] == {"role": "tool", "tool_call_id": "c1", "content": "42"}
    assert servers == [] and files == []
    assert set(glob.glob("/tmp/vf-port-*")) == before  # where verifiers' own runtime leaves one


def test_a_shared_server_serves_all_rollouts_and_ends_with_the_loop(tmp_path):
    async def end(player):
        (server,) = servers_of(player)
        player.stdin.close()
        await player.wait()
        return server

    rewards, asked, server = asyncio.run(played(SHARED, tmp_path, 2, end))
    assert rewards == [1.0, 1.0]
    assert [body["messages"][-1]["content"] for _, body in asked[1::2]] == ["42", "42"]
    assert not server.is_running()


def test_a_killed_process_takes_its_servers_along(tmp_path):
    async def kill(player):
        (server,) = servers_of(player)
        player.send_signal(signal.SIGKILL)
        await player.wait()
        return server, player.pid

    _, _, (server, pid) = asyncio.run(played(SHARED, tmp_path, 1, kill))
    server.wait(SECONDS)
    assert os.listdir(tmp_path) == [f"verifiers-{pid}"]  # which the owner of RUN_FILES removes
