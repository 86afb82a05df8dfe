"""Options that say what is rolled out: data, environments, rewards, agents, and tables that mix several."""

import json

import pytest

from bench.small_models import write_small_model
from pipeline.commands.make_run_config import parse
from pipeline.commands.options import OPTIONS
from pipeline.commands.run_config import OWN_BUDGET, OWN_RECIPE
from pipeline.commands.stored_config import run_config_of
from pipeline.commands.workload_config import EnvironmentConfig, EnvironmentTable, WorkloadConfig
from pipeline.errors import ConfigError
from pipeline.run_dir.config_json import plain

ENV = ("--env", "my_envs:Search")
DATA = ("--data", "train.jsonl")
REWARD = (*DATA, "--reward", "rewards.py:score")
AGENT = (*DATA, "--agent", "my_agent:solve")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two model directories, of which one has few positions."""
    directory = tmp_path_factory.mktemp("models")
    write_small_model(directory / "model")
    write_small_model(directory / "short", max_position_embeddings=512)
    return directory


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield tmp_path


@pytest.fixture
def parsed(models):
    """parse(…) of options on a model directory."""
    return lambda *options: parse(["--model", str(models / "model"), "--run-dir", "r", *options])


@pytest.fixture
def refusal(models):
    def refused(*options):
        with pytest.raises(ConfigError) as error:
            parse([*([] if "--model" in options else ["--model", str(models / "model")]), *options])
        assert "\n" not in str(error.value)
        return str(error.value)

    return refused


def test_paths_become_absolute_and_modules_stay(parsed, here):
    found = parsed(*ENV, *DATA).workload
    assert (found.task, found.env, found.data) == (None, "my_envs:Search", str(here / "train.jsonl"))
    found = parsed("--data", "rows.py:make", "--reward", "../rewards.py:score").workload
    assert (found.data, found.reward) == (f"{here}/rows.py:make", f"{here.parent}/rewards.py:score")
    assert parsed("--data", "rows:make", *REWARD[2:]).workload.data == "rows:make"
    assert parsed("--env", "reasoning_gym:chain_sum").workload.env == "reasoning_gym:chain_sum"
    (here / "odd:name").write_text("")
    assert parsed("--data", "odd:name", *REWARD[2:]).workload.data == str(here / "odd:name")
    assert parsed("--data", "saved#train", *REWARD[2:]).workload.data == str(here / "saved#train")


def test_without_a_recipe_the_common_defaults_count(parsed, models):
    config = parsed(*ENV)
    budget = config.trainer.engine.budget
    assert (config.steps, config.trainer.optimizer.lr) == (OWN_RECIPE["steps"], OWN_RECIPE["lr"])
    assert (budget.max_turn_tokens, budget.max_context_tokens) == (1024, OWN_BUDGET["max_context_tokens"])
    assert config.eval_rows is None
    config = parse(["--model", str(models / "short"), *ENV])
    assert config.trainer.engine.budget.max_context_tokens == 512  # as many positions as the model has
    asked = parse(["--model", str(models / "short"), *ENV, "--max-context-tokens", "600"])
    assert asked.trainer.engine.budget.max_context_tokens == 600  # the user's own number is kept, or refused later


def test_arguments_are_a_json_object(parsed, here):
    wanted = {"size": 500, "max_terms": 4, "nested": {"a": [1, None]}}
    assert parsed(*ENV, "--env-arguments", json.dumps(wanted)).workload.env_arguments == wanted
    (here / "recipe.toml").write_text('env = "my_envs:Search"\nenv_arguments = {size = 500, words = ["a"]}\n')
    assert parsed("--config", "recipe.toml").workload.env_arguments == {"size": 500, "words": ["a"]}


def test_holdout_is_a_number_or_a_share(parsed):
    for text, wanted in (("64", 64), ("0.1", 0.1), ("1", 1)):
        found = parsed(*REWARD, "--holdout", text).workload.holdout
        assert (found, type(found)) == (wanted, type(wanted))


def test_configuration_records_what_is_rolled_out(parsed, here):
    record = plain(parsed(*REWARD, "--system-prompt", "Be brief.", "--holdout", "0.5"))["workload"]
    assert record["class"] == "WorkloadConfig"
    assert (record["data"], record["reward"]) == (f"{here}/train.jsonl", f"{here}/rewards.py:score")
    assert (record["system_prompt"], record["holdout"], record["env"]) == ("Be brief.", 0.5, None)


NEEDS = {
    "task": ["--task", "calculator"],
    "env": [*ENV],
    "env_arguments": [*ENV, "--env-arguments", '{"a": 1}'],
    "data": [*ENV, *DATA],
    "reward": [*REWARD],
    "agent": [*AGENT],
    "prompt_field": [*REWARD, "--prompt-field", "question"],
    "answer_field": [*REWARD, "--answer-field", "answer"],
    "id_field": [*REWARD, "--id-field", "key"],
    "allow_empty_prompts": [*REWARD, "--allow-empty-prompts"],
    "system_prompt": [*REWARD, "--system-prompt", "Be brief."],
    "holdout": [*REWARD, "--holdout", "3"],
    "eval_data": [*REWARD, "--eval-data", "test.jsonl", "--eval-every", "2"],
    "endpoint_port": [*AGENT, "--endpoint-port", "8800"],
    "tool_latency": ["--task", "calculator", "--tool-latency", "fixed:3"],
}


def test_every_option_reaches_its_field(parsed):
    assert NEEDS.keys() == {option.name for option in OPTIONS.values() if option.owner is WorkloadConfig}
    for name, options in NEEDS.items():
        default = WorkloadConfig.__dataclass_fields__[name].default
        config = parsed(*options)
        assert getattr(config.workload, name) not in (default, {}), name
        assert run_config_of(json.loads(json.dumps(plain(config)))) == config, name


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--task", "calculator", *ENV], ["--task and --env are both given", "[[environment]]"]),
        ([*ENV, *REWARD], ["--env and --reward are both given", "keep one"]),
        ([*REWARD, "--agent", "m:f"], ["--reward and --agent are both given"]),
        ([*DATA], ["--data is /", "train.jsonl", "add --env, --reward or --agent"]),
        (["--reward", "m:f"], ["--reward is 'm:f'", "no rows", "add --data"]),
        (["--agent", "outside"], ["--agent is 'outside'", "no rows", "add --data"]),
        (["--task", "calculator", *DATA], ["--data has no effect", "'calculator'", "rows of its own"]),
        (["--task", "calculator", "--holdout", "3"], ["--holdout has no effect", "rows of its own"]),
        (["--holdout", "3"], ["--holdout has no effect", "'calculator'"]),
        (["--task", "calculator", "--prompt-field", "p"], ["--prompt-field has no effect"]),
        (
            ["--env", "reasoning_gym:chain_sum", *DATA],
            ["--data has no effect with reasoning_gym:chain_sum", "own rows"],
        ),
        (["--env", "verifiers:gsm8k", *DATA], ["--data has no effect with verifiers:gsm8k"]),
        ([*ENV, "--prompt-field", "p"], ["--prompt-field has no effect without --data"]),
        ([*ENV, "--answer-field", "p"], ["--answer-field has no effect without --data"]),
        ([*ENV, "--id-field", "p"], ["--id-field has no effect without --data"]),
        ([*ENV, *DATA, "--allow-empty-prompts"], ["--allow-empty-prompts has no effect without --prompt-field"]),
        ([*ENV, *DATA, "--system-prompt", "x"], ["--system-prompt has no effect without --reward"]),
        ([*AGENT, "--system-prompt", "x"], ["--system-prompt has no effect without --reward"]),
        ([*REWARD, "--env-arguments", "{}"], None),
        ([*REWARD, "--env-arguments", '{"a": 1}'], ["--env-arguments has no effect without --env"]),
        ([*ENV, "--env-arguments", "a=1"], ["--env-arguments is 'a=1'", "JSON"]),
        ([*ENV, "--env-arguments", "[1]"], ["--env-arguments is [1]", "JSON object"]),
        ([*ENV, "--env-arguments", '{"a": 1, "a": 2}'], ["--env-arguments", "stands twice"]),
        ([*ENV, "--env-arguments", '{"a": NaN}'], ["--env-arguments", "NaN"]),
        ([*ENV, "--tool-latency", "fixed:5"], ["--tool-latency is 'fixed:5'", "built-in tasks"]),
        ([*ENV, "--endpoint-port", "80"], ["--endpoint-port has no effect without --agent"]),
        ([*AGENT, "--endpoint-port", "65536"], ["--endpoint-port is 65536"]),
        ([*REWARD, "--holdout", "0"], ["--holdout is 0", "share"]),
        ([*REWARD, "--holdout", "-3"], ["--holdout is -3"]),
        ([*REWARD, "--holdout", "1.5"], ["--holdout is 1.5", "a number of rows"]),
        ([*REWARD, "--holdout", "ten"], ["--holdout is 'ten'", "a number"]),
        (
            [*REWARD, "--holdout", "3", "--eval-data", "t.jsonl", "--eval-every", "1"],
            ["--holdout", "--eval-data"],
        ),
        ([*REWARD, "--eval-data", "t.jsonl"], ["--eval-data has no effect without --eval-every"]),
        ([*REWARD, "--eval-every", "5"], ["--eval-every is given", "add --holdout", "--eval-data"]),
        ([*ENV, "--eval-every", "5"], ["no rows are held out"]),
        (["--model", "tiny", *ENV], ["--env is given, but the model tiny", "--model", "TinyChat"]),
        (["--model", "tiny", *REWARD], ["--reward is given, but the model tiny"]),
        ([*ENV, "--reward", "none"], None),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(refusal, parsed, options, parts):
    if parts is None:  # an option that says nothing does no harm
        assert parsed(*options)
        return
    message = refusal(*options)
    for part in parts:
        assert part in message


MIX = """
[[environment]]
name = "sums"
env = "reasoning_gym:chain_sum"
arguments = {size = 500}
weight = 3

[[environment]]
data = "train.jsonl"
reward = "rewards.py:score"
prompt_field = "question"
eval_data = "test.jsonl"
"""


def test_tables_are_a_mix(parsed, here):
    (here / "mix.toml").write_text("steps = 7\nholdout = 0.1\n" + MIX)
    config = parsed("--config", "mix.toml", "--eval-every", "5")
    assert (config.steps, config.workload.task, config.workload.holdout) == (7, None, None)
    sums, score = config.workload.environments
    assert (sums.called, sums.weight, sums.env_arguments, sums.holdout) == ("sums", 3.0, {"size": 500}, 0.1)
    assert (score.called, score.weight, score.holdout) == ("score", 1.0, None)  # it has held-out rows of its own
    assert (score.data, score.eval_data) == (f"{here}/train.jsonl", f"{here}/test.jsonl")
    record = plain(config)["workload"]["environments"]
    assert [EnvironmentTable(**{k: v for k, v in table.items() if k != "class"}) for table in record] == [sums, score]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('[environment]\nenv = "m:C"', ["environment in mix.toml is no table", "[[environment]]"]),
        ("environment = 3", ["environment in mix.toml is no table"]),
        ("environment = []", ["environment in mix.toml is no table"]),
        ("[[environment]]", ["[[environment]] 1 of mix.toml", "is missing"]),
        ('[[environment]]\nenvv = "m:C"', ["envv in [[environment]] 1 of mix.toml", "Did you mean env?"]),
        ('[[environment]]\nagent = "m:f"', ["agent in [[environment]] 1 of mix.toml is no key"]),
        (
            '[[environment]]\nenv = "m:C"\nreward = "m:f"',
            ["env in [[environment]] 1", "and reward", "keep"],
        ),
        ('[[environment]]\ndata = "d.jsonl"', ["data in [[environment]] 1", "add env or reward"]),
        ('[[environment]]\nenv = "m:C"\nweight = 0', ["weight in [[environment]] 1 of mix.toml is 0"]),
        ('[[environment]]\nenv = "m:C"\nweight = "x"', ["weight in [[environment]] 1 of mix.toml is 'x'"]),
        ('[[environment]]\nenv = "m:C"\narguments = 3', ["arguments in [[environment]] 1 of mix.toml is 3"]),
        (
            '[[environment]]\nenv = "m:C"\narguments = {a = nan}',
            ["arguments in [[environment]]", "plain"],
        ),
        ('[[environment]]\ntask = "gess"', ["task in [[environment]] 1 of mix.toml is 'gess'"]),
        (
            '[[environment]]\nenv = "m:C"\n[[environment]]\nenv = "n:C"',
            ["[[environment]] 1 and 2 of mix.toml are both called 'C'", "another name"],
        ),
        ('data = "d.jsonl"\n[[environment]]\nenv = "m:C"', ["data (in mix.toml) has no effect beside [[environment]]"]),
        ('task = "calculator"\n[[environment]]\nenv = "m:C"', ["task (in mix.toml) has no effect beside"]),
        ('eval_every = 2\n[[environment]]\nenv = "m:C"', ["eval_every (in mix.toml) is given", "no rows are held out"]),
        ("environments = 3", ["environments in mix.toml is no option", "Did you mean environment?"]),
    ],
)
def test_bad_tables_are_refused_naming_table_and_key(refusal, here, text, parts):
    (here / "mix.toml").write_text(text)
    message = refusal("--config", "mix.toml")
    for part in parts:
        assert part in message


def test_an_option_beside_tables_is_refused(refusal, here):
    (here / "mix.toml").write_text(MIX)
    assert "--data has no effect beside [[environment]] tables" in refusal("--config", "mix.toml", *DATA)
    assert "--environment is no option" in refusal("--environment", "x")


def test_tasks_of_a_mix_speak_the_models_language(refusal, here):
    (here / "mix.toml").write_text('[[environment]]\ntask = "guess"\n[[environment]]\ntask = "calculator"')
    message = refusal("--config", "mix.toml")
    assert message.startswith("The task of an environment is 'guess'") and "few words of the model tiny" in message


def test_a_mix_is_not_for_the_tiny_model(here):
    (here / "mix.toml").write_text('[[environment]]\ntask = "guess"')
    with pytest.raises(ConfigError, match="A mix is given, but the model tiny"):
        parse(["--config", "mix.toml"])


def test_tables_have_every_field(here):
    from pipeline.commands.environment_tables import TABLE_OPTIONS

    fields = {option.field for option in TABLE_OPTIONS.values()}
    assert fields == set(EnvironmentTable.__dataclass_fields__)
    assert set(EnvironmentConfig.__dataclass_fields__) < fields
