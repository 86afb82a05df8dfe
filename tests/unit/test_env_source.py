"""What a user gives as `env`: a class, a path, or a mix by name; found wrong before anything starts."""

import asyncio
import sys

import pytest
from environment_session import less_line

import pipeline as rl
from pipeline.environments.host import EnvironmentHost
from pipeline.tasks.guess import Guess
from pipeline.user_code.load import load_env_makers
from pipeline.user_code.source import EnvSource
from workers.messages import EnvironmentCall

GUESS = "pipeline.tasks.guess:Guess"


class Echo(rl.Env):
    def __init__(self, word="", times=1):
        self.word = word * times

    def reset(self, row):
        return self.word + row["prompt"]

    def reward(self, traj, row):
        raise KeyError("answer")


def test_class_is_named_for_other_processes():
    source = EnvSource(Guess, {})
    assert not source.runs_in_thread and source.parts[""].env_class is Guess
    config = source.start_config(600.0, None)
    assert (config["environment"], config["arguments"]) == (GUESS, {})


def test_file_is_told_to_other_processes_by_its_whole_path(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    config = EnvSource("mine.py:Search", {"a": 1}).start_config(600.0, None)
    assert config["environment"] == f"{tmp_path}/mine.py:Search" and config["arguments"] == {"a": 1}
    assert str(tmp_path) in config["sys_path"]


def test_class_of_a_functions_inside_runs_in_a_thread():
    class Inside(Echo):
        pass

    source = EnvSource(Inside, {"word": "say "})
    assert source.runs_in_thread
    make_env, name = source.load_makers()
    assert make_env().word == "say " and name.endswith("Inside")


def test_mix_has_the_arguments_of_each_by_name():
    source = EnvSource({"guess": Guess, "echo": "test_env_source:Echo"}, {"echo": {"word": "x"}})
    assert not source.runs_in_thread
    assert {name: part.env_class for name, part in source.parts.items()} == {"guess": Guess, "echo": None}
    config = source.start_config(600.0, None)
    assert config["environment"] == {"guess": GUESS, "echo": "test_env_source:Echo"}
    assert config["arguments"] == {"guess": {}, "echo": {"word": "x"}}
    for makers, _ in (load_env_makers(config["environment"], config["arguments"]), source.load_makers()):
        assert list(makers) == ["guess", "echo"] and makers["echo"]().word == "x"


def test_mix_runs_in_a_thread_if_one_of_it_must():
    class Inside(Echo):
        pass

    source = EnvSource({"inside": Inside, "guess": GUESS}, {})
    assert source.runs_in_thread
    makers, _ = source.load_makers()
    assert isinstance(makers["guess"](), Guess) and isinstance(makers["inside"](), Inside)


def test_each_row_of_a_mix_gets_its_environment_which_names_its_failures():
    makers = {"one": lambda: Echo("1: "), "two": lambda: Echo("2: ")}

    async def run():
        host = EnvironmentHost(makers, timeout=60.0, name="one, two")
        replies = []
        for member, name in enumerate(("one", "two")):
            row = {"prompt": "go", "environment": name}
            replies.append(await host.handle(EnvironmentCall(member, 5, member, "reset", {"row": row, "seed": 0})))
        turn = {"text": "", "tool_calls": [], "num_tokens": 1, "stopped": True}
        replies.append(await host.handle(EnvironmentCall(2, 5, 1, "turn", turn)))
        await host.close()
        return replies

    first, second, failed = asyncio.run(run())
    assert [reply.result["messages"][0]["content"] for reply in (first, second)] == ["1: go", "2: go"]
    assert less_line(failed.error, __file__) == "two.reward of trajectory 5.1 failed with KeyError: 'answer'"


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"prompt": "x"}, 'Row 1 has no \'environment\'; .* one of "guess", "echo"'),
        ({"environment": "gess"}, "Row 1 has 'gess' as its 'environment'; .* Did you mean guess?"),
        ({"environment": 3}, "Row 1 has 3 as its 'environment'"),
    ],
)
def test_row_of_a_mix_that_names_none_of_it_is_refused(row, fault):
    source = EnvSource({"guess": Guess, "echo": Echo}, {})
    source.check_rows([{"environment": "guess"}, {"environment": "echo"}])
    with pytest.raises(rl.ConfigError, match=fault):
        source.check_rows([{"environment": "guess"}, row])
    EnvSource(Guess, {}).check_rows([row])  # for one environment it is data like any other


def test_trainer_refuses_such_rows_before_anything_starts(tmp_path):
    engine = rl.RolloutEngine(rl.Supervisor(), env={"guess": Guess, "echo": Echo})
    options = {
        "optimizer": rl.Adam(lr=1e-3),
        "loss": rl.CISPO(normalize="token"),
        "completion": rl.GroupCompletion(mode="wait"),
        "groups_per_step": 1,
    }
    trainer = rl.AsyncTrainer(engine=engine, run_dir=str(tmp_path / "run"), **options)
    with pytest.raises(rl.ConfigError, match="Row 0 has no 'environment'"):
        trainer.check([{"number": 3}], 1)
    held_out = rl.Evaluator(holdout=[{"number": 4, "environment": "other"}])
    trainer = rl.AsyncTrainer(engine=engine, evaluator=held_out, **options)
    with pytest.raises(rl.ConfigError, match="Holdout row 0 has 'other'"):
        trainer.check([{"number": 3, "environment": "guess"}], 1)


@pytest.mark.parametrize(
    ("env", "arguments", "fault"),
    [
        ("Search", {}, "The environment is 'Search'. It is named as module:name"),
        ("no/such.py:Search", {}, "the file .*/no/such.py is not there"),
        ("__main__:Search", {}, "no other process can import the script itself"),
        ({}, {}, "env is an empty mapping"),
        ({"a": "Search"}, {}, "The environment is 'Search'"),
        ({"a": GUESS}, {"b": {}}, "env_arguments has 'b', but the environments are \"a\""),
        (GUESS, {"word": {1, 2}}, "env_arguments is .* holds plain values only"),
        ({"a": GUESS}, {"a": {"word": object}}, "env_arguments 'a' is .* holds plain values only"),
    ],
)
def test_what_can_be_no_environment_is_refused(env, arguments, fault):
    with pytest.raises(rl.ConfigError, match=fault):
        EnvSource(env, arguments)


@pytest.mark.parametrize(
    ("env", "arguments", "fault"),
    [
        (sys, {}, "It must be a class derived from Env"),
        ({"a": object}, {}, "It must be a class derived from Env"),
        ({3: GUESS}, {}, "env is {3: .*; give a mapping from names to environments"),
        (GUESS, [1], r"env_arguments is \[1\]; give a dict"),
        ({"a": GUESS}, {"a": 7}, r"env_arguments\['a'\] is 7; give a dict"),
    ],
)
def test_what_is_of_the_wrong_kind_is_refused(env, arguments, fault):
    with pytest.raises(rl.ConfigTypeError, match=fault):
        EnvSource(env, arguments)
