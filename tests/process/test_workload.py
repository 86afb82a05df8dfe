"""What options name is opened: files are read, users' code is asked in a process of its own, rows are held out."""

import json

import pytest

from bench.small_models import write_small_model
from pipeline.commands.make_eval_config import parse_eval
from pipeline.commands.make_run_config import parse
from pipeline.commands.option_values import as_written
from pipeline.commands.workload import open_workload
from pipeline.data.mixed_rows import MixedRows
from pipeline.dataset import rows_digest
from pipeline.errors import ConfigError, ConfigTypeError

ENVS = '''
import pipeline as rl


class Own(rl.Env):
    """Brings its rows along."""

    def __init__(self, size=4):
        pass

    @classmethod
    def rows(cls, seed, /, size=4):
        return [{"n": seed + index} for index in range(size)]

    def reset(self, row):
        return f"say {row['n']}"

    def reward(self, traj, row):
        return 0.0


class Bare(Own):
    """Brings none."""

    @classmethod
    def rows(cls, seed, /, size=4):
        return None


def score(text, row):
    return 1.0


async def two(row, base_url):
    return 1.0


def make():
    return [{"prompt": "made"}, {"prompt": "made, too"}]
'''
ROWS = [{"prompt": f"say {n}", "answer": n, "id": n} for n in range(8)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A user's directory, which is the current one."""
    monkeypatch.chdir(tmp_path)
    write_small_model(tmp_path / "model")
    (tmp_path / "envs.py").write_text(ENVS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "test.jsonl").write_text('{"prompt": "held out"}\n')
    return tmp_path


def opened(*options):
    return open_workload(parse(["--model", "model", "--device", "cpu", *options]).workload)


def refusal(*options):
    with pytest.raises((ConfigError, ConfigTypeError)) as error:
        opened(*options)
    message = as_written(str(error.value), {})
    assert "\n" not in message
    return message


def test_an_environment_brings_its_rows_by_the_seed(here):
    workload = opened("--env", "envs.py:Own", "--env-arguments", '{"size": 3}', "--seed", "5")
    assert workload.train_rows() == [{"n": 5}, {"n": 6}, {"n": 7}]
    assert workload.name == "envs.py:Own" and workload.rows_to_measure(None, "--eval-rows") == []
    assert workload.engine_arguments(1.0) == {"env": f"{here}/envs.py:Own", "env_arguments": {"size": 3}}


def test_data_takes_the_place_of_what_an_environment_brings(here):
    assert opened("--env", "envs.py:Own", "--data", "envs.py:make").train_rows()[0] == {"prompt": "made"}


def test_held_out_rows_are_no_training_rows(here):
    workload = opened("--reward", "envs.py:score", "--data", "rows.jsonl", "--holdout", "0.25")
    held = workload.rows_to_measure(None, "--eval-rows")
    assert len(held) == 2 and sorted([*workload.train_rows(), *held], key=lambda row: row["id"]) == ROWS
    assert workload.rows_to_measure(1, "--eval-rows") == held[:1]
    with pytest.raises(ConfigError, match="--eval-rows is 3, but envs.py:score has 2 rows to measure"):
        workload.rows_to_measure(3, "--eval-rows")
    (found,) = workload.describe().values()
    assert (found["train_rows"], found["holdout_rows"]) == (6, 2)
    assert found["train_digest"] == rows_digest(workload.train_rows()) != rows_digest(workload.train_rows()[:-1])


def test_held_out_rows_may_have_a_file_of_their_own(here):
    own = ("--reward", "envs.py:score", "--data", "rows.jsonl", "--eval-data", "test.jsonl", "--eval-every", "1")
    workload = opened(*own, "--system-prompt", "Hm.")
    assert (len(workload.train_rows()), workload.rows_to_measure(None, "")) == (8, [{"prompt": "held out"}])
    arguments = {"reward": f"{here}/envs.py:score", "prompt_field": "prompt", "system_prompt": "Hm."}
    assert workload.engine_arguments(1.0)["env_arguments"] == arguments


def test_rows_of_the_file_of_held_out_ones_are_never_trained(here):
    """Also those behind the first few that the run itself measures: `headway eval RUN_DIR` takes all of them."""
    (here / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[5:]))
    own = ("--reward", "envs.py:score", "--data", "rows.jsonl", "--eval-data", "test.jsonl", "--eval-every", "1")
    with pytest.warns(UserWarning, match="3 of 8 rows of envs.py:score are held out, too"):
        workload = opened(*own, "--eval-rows", "1")
    assert (workload.train_rows(), workload.rows_to_measure(1, "")) == (ROWS[:5], ROWS[5:6])
    assert workload.describe()["envs.py:score"]["train_rows"] == 5
    (here / "test.jsonl").write_text((here / "rows.jsonl").read_text())
    assert "All rows of 'envs.py:score' are in --eval-data, too" in refusal(*own)


def test_a_mix_names_each_row_and_measures_each_environment_in_turn(here):
    (here / "mix.toml").write_text(
        'holdout = 2\n[[environment]]\nenv = "envs.py:Own"\nweight = 3\n'
        '[[environment]]\nreward = "envs.py:score"\ndata = "rows.jsonl"\n[[environment]]\ntask = "calculator"\n'
    )
    workload = opened("--config", "mix.toml")
    rows = workload.train_rows()
    assert isinstance(rows, MixedRows) and rows.sizes[:2] == (2, 6)
    assert dict(zip(rows.names, rows.weights, strict=True)) == {"Own": 3.0, "score": 1.0, "calculator": 1.0}
    measured = workload.rows_to_measure(5, "--eval-rows")
    assert [row["environment"] for row in measured] == ["Own", "score", "calculator", "Own", "score"]
    assert set(workload.engine_arguments(1.0)["env"]) == set(rows.names)


def test_of_a_model_all_rows_are_measured_unless_some_are_held_out(here):
    def measured(*options):
        config = parse_eval(["model", "--device", "cpu", "--reward", "envs.py:score", "--data", "rows.jsonl", *options])
        workload = open_workload(config.workload)
        return workload.rows_to_measure(config.eval_rows, "--eval-rows", only_holdout=config.only_holdout)

    assert measured("--eval-rows", "5") == ROWS[:5]
    assert len(measured("--holdout", "3")) == 3


def test_where_no_rows_are_held_out_a_number_of_them_is_not_what_is_wrong(here):
    workload = opened("--reward", "envs.py:score", "--data", "rows.jsonl")
    assert workload.rows_to_measure(2, "--eval-rows") == []  # whoever asks says what is wrong


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--env", "envs.py:Bare"], ["--env is /", "brings no rows of its own", "add --data"]),
        (["--env", "envs.py:Owm"], ["envs.py:Owm", "Did you mean Own?"]),
        (["--env", "envs.py:Own", "--env-arguments", '{"sise": 3}'], ["--env-arguments is {'sise': 3}", "(size=4)"]),
        (["--env", "envs.py:Own", "--holdout", "4"], ["--holdout is 4, but there are 4 rows"]),
        (["--reward", "envs.py:score", "--data", "gone.jsonl"], ["gone.jsonl does not exist"]),
        (["--reward", "envs.py:score", "--data", "rows.jsonl", "--prompt-field", "q"], ["rows.jsonl", "line 1", "'q'"]),
        (["--agent", "envs.py:gone", "--data", "rows.jsonl"], ["envs.py:gone", "can't be imported"]),
        (
            ["--agent", "envs.py:two", "--data", "rows.jsonl"],
            ["takes (row, base_url)", "as agent(row, base_url, "],
        ),
    ],
)
def test_what_cannot_be_is_told_before_a_model_is_opened(here, options, parts):
    message = refusal(*options)
    for part in parts:
        assert part in message


def test_rows_for_a_reward_have_prompts_unless_told_otherwise(here):
    (here / "bare.jsonl").write_text('{"prompt": "a"}\n{"prompt": ""}\n{"q": 1}\n')
    message = refusal("--reward", "envs.py:score", "--data", "bare.jsonl")
    assert "line 2 has an empty prompt" in message and "line 3 has no field 'prompt'" in message


def test_in_a_mix_the_environment_at_fault_is_named(here):
    (here / "mix.toml").write_text('[[environment]]\nenv = "envs.py:Own"\n[[environment]]\nenv = "envs.py:Bare"\n')
    assert "The environment 'Bare' brings no rows of its own; add data" in refusal("--config", "mix.toml")
    (here / "mix.toml").write_text('[[environment]]\nenv = "envs.py:Own"\narguments = {size = 2}\nholdout = 2\n')
    assert "The rows of 'Own': holdout is 2, but there are 2 rows" in refusal("--config", "mix.toml")
