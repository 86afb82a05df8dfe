"""OpenAIEndpoint's options: each mistake is one sentence, before anything is started."""

import importlib.util
import subprocess
import sys

import pytest

import pipeline as rl


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"agent": len}, "an agent runs in a process of its own, so it is named: module:function"),
        ({"agent": "my_agents"}, "The agent is 'my_agents'. It is named as module:name or as path/to/file.py:name"),
        ({"agent": "__main__:solve"}, "can import the script itself; put it into a module of its own."),
        ({"agent": "not_there.py:solve"}, "not_there.py is not there"),
        ({"port": 65536}, "OpenAIEndpoint.port is 65536"),
        ({"port": -1}, "OpenAIEndpoint.port is -1"),
        ({"idle_timeout": 0}, "OpenAIEndpoint.idle_timeout is 0"),
        ({"api_key": "short"}, "api_key is no text of at least 16 ASCII characters"),
        ({"api_key": "long enough, but nö"}, "api_key is no text of at least 16 ASCII characters"),
        ({"api_key": "x" * 20, "agent": "my_agents:solve"}, "leave one of them out"),
        ({"model_name": ""}, "OpenAIEndpoint.model_name is ''"),
    ],
)
def test_a_mistake_is_one_sentence(options, says):
    with pytest.raises(rl.HeadwayError) as error:
        rl.OpenAIEndpoint(**options)
    assert says in str(error.value) and isinstance(error.value, (ValueError, TypeError))
    assert "short" not in str(error.value) and "long enough" not in str(error.value), "no key is printed"


def test_without_its_package_it_names_the_extra(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "aiohttp" else find_spec(name))
    with pytest.raises(rl.ConfigError, match=r"pip install -e '\.\[endpoint\]'"):
        rl.OpenAIEndpoint()


def test_limits_that_an_agent_makes_meaningless_are_refused():
    model = rl.Supervisor()
    for budget, name in (
        (rl.Budget(final_answer_reserve=8), "final_answer_reserve"),
        (rl.Budget(tool_output_tokens=8), "tool_output_tokens"),
    ):
        with pytest.raises(rl.ConfigError, match=f"Budget.{name} is 8, but with an OpenAIEndpoint"):
            rl.RolloutEngine(model, env=rl.OpenAIEndpoint(), budget=budget)
    with pytest.raises(rl.ConfigError, match="env_arguments is given"):
        rl.RolloutEngine(model, env=rl.OpenAIEndpoint(), env_arguments={"a": 1})
    assert rl.RolloutEngine(model, env=rl.OpenAIEndpoint()).env.url is None


def test_keys_are_made_anew_and_an_agents_path_is_whole(tmp_path, monkeypatch):
    assert rl.OpenAIEndpoint().api_key != rl.OpenAIEndpoint().api_key
    assert len(rl.OpenAIEndpoint().api_key) >= 40 and rl.OpenAIEndpoint(api_key="k" * 16).api_key == "k" * 16
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    (part,) = rl.OpenAIEndpoint("mine.py:solve").parts.values()
    assert part.arguments == {"agent": f"{tmp_path}/mine.py:solve"}


def test_nothing_of_aiohttp_is_loaded_before_it_is_used():
    code = "import sys, pipeline; pipeline.OpenAIEndpoint(); print({'aiohttp', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_an_agents_one_call_is_bound_by_idle_timeout_alone():
    endpoint = rl.OpenAIEndpoint("my_agents:solve", idle_timeout=70.0)
    assert endpoint.call_timeout(5.0) > 1e6 and endpoint.start_config(5.0, None)["environment_timeout"] > 1e6
    assert 5.0 < endpoint.silence_timeout(5.0) <= 70.0
