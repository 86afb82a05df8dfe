"""Episodes of real verifiers tasksets, asked of a small endpoint in the test: what is sent, scored, and left behind."""

import asyncio
import importlib.util
import os
import sys
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from tests.scripted_endpoint import ScriptedEndpoint, tool_call

if importlib.util.find_spec("verifiers") is None:
    pytest.skip("verifiers isn't installed (make test installs it)", allow_module_level=True)

TASKSETS = Path(__file__).parent.parent / "data" / "verifiers"
TASKSET = "two_questions"
NO_ROOM = {"error": {"message": "No room is left.", "code": "context_length_exceeded"}}
SECONDS = 60.0  # bound on an episode


@pytest.fixture(scope="module")
def adapter():
    """The adapter's module, which takes seconds to import; what it sets in this process is set back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(TASKSETS), *sys.path])
        for name in ("NO_PROXY", "no_proxy", "PYTHONPATH"):
            patch.setenv(name, os.environ.get(name, ""))
        from pipeline.adapters import verifiers

        yield verifiers


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Makes a module on the import path from its source."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(name, source):
        (tmp_path / f"{name}.py").write_text("import verifiers.v1 as vf\n" + source)
        return name

    return make


def play(endpoint, *, taskset=TASKSET, row=None, key="the-key", after=None, **config):
    """One episode; `after` is called with the served environment when it is over."""
    from pipeline.adapters import verifiers_episodes

    async def episode():
        async with endpoint.up() as url:
            environment = await verifiers_episodes.served(taskset, config)
            try:
                async with asyncio.timeout(SECONDS):
                    return await environment.play(row or {"number": 1, "prompt": "What is 1 + 1?"}, url, key)
            finally:
                if after is not None:
                    await after(environment, url)

    return asyncio.run(episode())


def fails(endpoint, **options):
    from pipeline.adapters.verifiers_episodes import EpisodeError

    with pytest.raises(EpisodeError) as raised:
        play(endpoint, **options)
    return str(raised.value)


def test_rows_are_the_tasks_as_plain_values(adapter):
    first, *others = adapter.Verifiers.rows(0, taskset=TASKSET, num_tasks=3)
    assert first == {"idx": 0, "prompt": "What is 0 + 0?", "system_prompt": "Be short.", "number": 0}
    assert [row["number"] for row in others] == [1, 2]
    assert adapter.Verifiers.rows(7, taskset="two-questions", num_rows=1, num_tasks=3) == [first]


def test_an_episode_asks_with_its_rollouts_key_and_gives_reward_and_metrics(adapter):
    endpoint = ScriptedEndpoint("one", "four")
    row = adapter.Verifiers.rows(0, taskset=TASKSET)[3]
    outcome = play(endpoint, row=row)
    assert (outcome.reward, outcome.metrics) == (2.0, {"answers": 2.0, "reward/is_even": 1.0})
    system, asked = {"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 3 + 3?"}
    said, again = {"role": "assistant", "content": "one"}, {"role": "user", "content": "And half of it?"}
    assert endpoint.asked == [
        ("Bearer the-key", {"model": "headway", "messages": [system, asked]}),
        ("Bearer the-key", {"model": "headway", "messages": [system, asked, said, again]}),
    ]
    assert play(ScriptedEndpoint("one", "two"), row=row).reward == 0.0


def test_concurrent_rollouts_keep_their_keys_and_leave_nothing_open(adapter):
    from pipeline.adapters.verifiers_runtime import process_directory

    endpoint = ScriptedEndpoint("a")
    descriptors = []

    async def many(environment, url):
        for _ in range(2):
            rows = [{"number": number, "prompt": f"{number}?"} for number in range(12)]
            await asyncio.gather(*(environment.play(row, url, f"key-{row['number']}") for row in rows))
            descriptors.append(len(os.listdir("/proc/self/fd")))
        assert environment._endpoints.places == {}

    play(endpoint, after=many)
    assert len(endpoint.asked) == 2 + 2 * 24
    for key, body in endpoint.asked[2:]:
        assert body["messages"][0]["content"] == f"{key.removeprefix('Bearer key-')}?"
    assert descriptors[1] <= descriptors[0] + 2
    assert list(process_directory().iterdir()) == []


def test_an_episode_without_room_for_another_turn_is_scored_as_it_is(adapter):
    assert play(ScriptedEndpoint("even", NO_ROOM)).metrics == {"answers": 1.0, "reward/is_even": 1.0}


def test_no_proxy_stands_between_an_episode_and_this_machine(adapter, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert play(ScriptedEndpoint("one", "two")).metrics["answers"] == 2.0


def test_a_harness_that_a_taskset_brings_is_used(adapter, module):
    endpoint = ScriptedEndpoint("one")
    play(endpoint, taskset=module("brings_one", BRINGS_ONE), row={"prompt": "Hello"})
    ((_, body),) = endpoint.asked
    assert body["messages"] == [{"role": "user", "content": "Hello, says another harness"}]


def test_other_refusals_fail_the_episode(adapter):
    said = fails(ScriptedEndpoint("one", {"error": {"message": "The token is spent.", "code": "token_spent"}}))
    assert said.startswith("the episode failed: ProviderError: upstream 400") and "The token is spent." in said


def test_a_scorer_that_raises_fails_the_episode(adapter):
    assert "no scorer for 1" in fails(ScriptedEndpoint("one"), task={"fails": True})


def test_a_task_out_of_time_fails_the_episode(adapter):
    row = {"number": 1, "prompt": "What is 1 + 1?", "timeout": {"agent": 0.2}}
    assert fails(ScriptedEndpoint("one", None), row=row) == (
        "the episode ran out of the time that its task gives it (agent_timeout)"
    )


def test_a_cancelled_episode_leaves_nothing_behind(adapter):
    from pipeline.adapters.verifiers_runtime import process_directory

    endpoint = ScriptedEndpoint("one", "two", None)

    async def cancel(environment, url):
        task = asyncio.ensure_future(environment.play({"number": 1, "prompt": "?"}, url, "other"))
        async with asyncio.timeout(SECONDS):
            while len(endpoint.asked) < 3:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert environment._endpoints.places == {}

    play(endpoint, after=cancel)
    assert list(process_directory().iterdir()) == []


def test_tools_of_a_task_that_the_model_names_wrong_are_answered(adapter):
    call = tool_call("missing")
    endpoint = ScriptedEndpoint([call], "two", "four")
    assert play(endpoint).metrics["answers"] == 3.0
    *_, said, result = endpoint.asked[1][1]["messages"]
    assert said == {"role": "assistant", "tool_calls": [call]}
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "error: there is no tool 'missing'"}


def test_a_run_program_is_in_the_processs_directory_and_ends_with_the_episode(adapter):
    from verifiers.v1.runtimes import SubprocessConfig, make_runtime

    from pipeline.adapters.verifiers_runtime import process_directory

    async def run():
        runtime = make_runtime(SubprocessConfig(), "a-trace")
        await runtime.start()
        found = await runtime.run(["sh", "-c", 'pwd; echo "$0 $GIVEN"; exit 3', "name"], {"GIVEN": "value"})
        missing = await runtime.run(["there-is-no-such-program"], {})
        await runtime.stop()
        return found, missing

    found, missing = asyncio.run(run())
    assert (found.exit_code, found.stdout) == (3, f"{process_directory()}/a-trace\nname value\n")
    assert missing.exit_code == 1 and "there-is-no-such-program can't be run" in missing.stderr
    assert not (process_directory() / "a-trace").exists()


BRINGS_ONE = """
from pipeline.adapters.verifiers_harness import ChatHarness
__all__ = ["Brings", "Another"]
class Brings(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        return []
class Another(ChatHarness):
    def _opening(self, data):
        return [{"role": "user", "content": data.prompt + ", says another harness"}]
"""
ENDLESS = """
__all__ = ["Endless"]
class Endless(vf.Taskset[vf.Task, vf.TasksetConfig]):
    INFINITE = True
    def load(self):
        while True:
            yield vf.Task(vf.TaskData(prompt="?"), self.config.task)
"""
CONTAINED = """
__all__ = ["Contained"]
class Boxed(vf.Task[vf.TaskData]):
    NEEDS_CONTAINER = True
class Contained(vf.Taskset[Boxed, vf.TasksetConfig]):
    def load(self):
        return []
"""
EMPTY = CONTAINED.replace("True", "False").replace("Contained", "Empty")
PAIR = """
__all__ = ["Pair", "PairEnv"]
class Pair(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        return []
class PairConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()
class PairEnv(vf.Env[PairConfig]):
    async def run(self, task, agents):
        await agents.solver.run(task)
"""
TWICE = """
__all__ = ["Twice", "TwiceEnv"]
class Twice(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        return []
class TwiceConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
class TwiceEnv(vf.Env[TwiceConfig]):
    async def run(self, task, agents):
        await agents.agent.run(task)
        await agents.agent.run(task)
"""


@pytest.mark.parametrize(
    ("name", "source", "arguments", "sentence"),
    [
        ("endless", ENDLESS, {}, "'endless' never ends; give num_rows"),
        ("contained", CONTAINED, {}, "'contained' need a container"),
        ("empty", EMPTY, {}, "'empty' has no tasks"),
        ("pair", PAIR, {}, "an environment for 2 agents (solver, judge), but a rollout trains one"),
        ("broken", "raise KeyError('x')", {}, "'broken' can't be loaded: KeyError: 'x'. Its module"),
        ("plain", "", {}, "'plain' can't be loaded: AttributeError: taskset module 'plain' defines no"),
        ("two_questions", None, {"num_task": 3}, "made with {'num_task': 3} (taskset.num_task: Extra inputs are"),
        ("two_questions", None, {"num_rows": 0}, "is 0; it counts tasks, from 1"),
        ("there_is_none", None, {}, "There is no verifiers taskset 'there_is_none': no module there_is_none is"),
        ("package.tasks", None, {}, "is 'package.tasks'; it is the name of an installed taskset"),
    ],
)
def test_what_cant_be_trained_on_is_refused(adapter, module, name, source, arguments, sentence):
    if source is not None:
        module(name, source)
    with pytest.raises(ConfigError) as raised:
        adapter.Verifiers.rows(0, taskset=name, **arguments)
    assert sentence in str(raised.value)


def test_the_first_tasks_of_an_endless_taskset_are_rows(adapter, module):
    name = module("endless_too", ENDLESS.replace("Endless", "EndlessToo"))
    rows = adapter.Verifiers.rows(0, taskset=name, num_rows=2)
    assert rows == [{"idx": 0, "prompt": "?"}, {"idx": 1, "prompt": "?"}]


def test_an_episode_with_two_rewards_fails(adapter, module):
    said = fails(ScriptedEndpoint("a"), taskset=module("twice", TWICE), row={"prompt": "?"})
    assert said == "the episode has 2 traces, each with a reward; a rollout trains one"
