"""`headway eval`: what it takes from its options, what from the run that it measures, and what it refuses."""

import json
import warnings
from dataclasses import replace

import pytest

from bench.small_models import write_small_model
from pipeline.commands.eval_config import EVAL_OPTIONS, eval_help
from pipeline.commands.evaluate import warn_of_changed_data
from pipeline.commands.make_eval_config import parse_eval
from pipeline.commands.make_run_config import parse
from pipeline.commands.shared_config import parse_template_options
from pipeline.commands.workload import Part, Workload
from pipeline.dataset import rows_digest
from pipeline.errors import ConfigError
from pipeline.tasks import TASKS
from pipeline.user_warnings import ConfigWarning
from tests.complete_checkpoints import complete


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield tmp_path


def write_run(path, *options):
    """As a run of the tiny model with these options leaves it; its weights are nobody's business here."""
    checkpoint = path / "checkpoints" / "version-7"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    complete(checkpoint)
    (path / "events.jsonl").touch()
    (path / "config.json").write_text(json.dumps(parse([*options, "--device", "cpu"]).to_json()))
    return str(path)


def refusal(*arguments):
    with pytest.raises(ConfigError) as error:
        parse_eval(arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.filterwarnings("ignore::pipeline.user_warnings.ConfigWarning")
def test_a_run_is_measured_as_it_ran_but_for_its_machine(tmp_path):
    options = ["--seed", "5", "--temperature", "0.8", "--max-turns", "3", "--max-context-tokens", "48", "--top-k", "9"]
    run = write_run(tmp_path / "run", *options, "--dtype", "bfloat16", "--tool-latency", "fixed:1", "--samplers", "2")
    found = parse_eval([run])
    assert (found.model, found.weights, found.version, found.workload.task) == ("tiny", run, 7, "guess")
    engine = found.engine
    assert (found.seed, engine.sampling.seed, engine.temperature, engine.top_k) == (5, 5, 0.8, 9)
    assert (engine.budget.max_turns, engine.budget.max_context_tokens) == (3, 48)
    assert (found.dtype, found.workload.tool_latency, found.samplers) == ("bfloat16", "fixed:1", 1)
    assert engine.schedule.concurrency == 256 and found.run_dir is None
    own = parse_eval([run, "--seed", "6", "--temperature", "1", "--max-turns", "4", "--dtype", "float32"])
    assert (own.seed, own.engine.temperature, own.engine.budget.max_turns, own.dtype) == (6, 1.0, 4, "float32")
    assert own.engine.budget.max_context_tokens == 48


def test_a_model_directory_is_measured_on_the_calculator(tmp_path):
    found = parse_eval([str(write_small_model(tmp_path / "model"))])
    assert (found.model, found.version, found.workload.task) == (str(tmp_path / "model"), 0, "calculator")
    assert found.engine.budget.max_turn_tokens == TASKS["calculator"].budget["text"]["max_turn_tokens"]
    assert (found.eval_rows, found.eval_group_size) == (None, 4)


@pytest.fixture
def own_run(tmp_path):
    """A run on data and a reward of one's own, in `run`; `make(*options)` with other options."""

    def make(*options):
        model = write_small_model(tmp_path / "model")
        complete(write_small_model(tmp_path / "run" / "checkpoints" / "version-7"))
        (tmp_path / "run" / "events.jsonl").touch()
        config = parse(["--model", str(model), "--device", "cpu", "--seed", "4", *options]).to_json()
        found = {"score": {"holdout_digest": "sha256:1"}}
        (tmp_path / "run" / "config.json").write_text(json.dumps(config | {"workload": found}))
        return "run"

    return make


REWARD = ("--data", "d.jsonl", "--reward", "m:score", "--prompt-field", "question", "--holdout", "3")


def test_of_a_run_on_rows_of_its_own_the_held_out_ones_are_measured(own_run, tmp_path):
    found = parse_eval([own_run(*REWARD), "--seed", "9"])
    workload = found.workload
    assert (workload.data, workload.reward, workload.holdout) == (str(tmp_path / "d.jsonl"), "m:score", 3)
    assert (workload.prompt_field, workload.rows_seed, found.seed) == ("question", 4, 9)  # other rows would be trained
    assert found.only_holdout and found.holdout_digests == {"score": "sha256:1"}


def test_data_that_has_changed_since_the_run_is_told(own_run):
    config = parse_eval([own_run(*REWARD)])
    rows = [{"question": "?"}]
    part = Part(name="score", env="m:score", arguments={}, train_rows=[], holdout_rows=rows)
    workload = Workload(parts=(part,), is_mix=False)
    with pytest.warns(ConfigWarning, match="held-out rows of score are not those of the run any more"):
        warn_of_changed_data(config, workload)
    with warnings.catch_warnings(action="error"):
        warn_of_changed_data(replace(config, holdout_digests={"score": rows_digest(rows)}), workload)


def test_other_rows_take_the_place_of_a_runs_own(own_run, tmp_path):
    found = parse_eval([own_run(*REWARD), "--data", "other.jsonl", "--seed", "9"])
    assert (found.workload.data, found.workload.holdout) == (str(tmp_path / "other.jsonl"), None)
    assert (found.workload.reward, found.workload.prompt_field) == ("m:score", "question")
    assert not found.only_holdout and not found.holdout_digests


def test_another_environment_is_measured_on_a_runs_held_out_rows(own_run):
    found = parse_eval([own_run(*REWARD, "--system-prompt", "Be brief."), "--env", "e:Other"])
    assert (found.workload.env, found.workload.reward, found.workload.system_prompt) == ("e:Other", None, None)
    assert (found.workload.holdout, found.only_holdout) == (3, True)


def test_a_task_takes_the_place_of_all_that_a_run_rolled_out(own_run):
    found = parse_eval([own_run(*REWARD), "--task", "calculator"])
    assert (found.workload.task, found.workload.data, found.only_holdout) == ("calculator", None, False)
    assert found.engine.budget.max_turns == TASKS["calculator"].budget["text"]["max_turns"]


def test_a_mix_is_measured_as_it_was_trained(own_run, tmp_path):
    tables = '[[environment]]\nenv = "e:A"\nholdout = 2\narguments = {n = 1}\n[[environment]]\ntask = "calculator"\n'
    (tmp_path / "mix.toml").write_text("steps = 3\nlr = 1e-5\ntemperature = 0.5\n" + tables)
    run = own_run("--config", "mix.toml")
    found = parse_eval([run])
    first, second = found.workload.environments
    assert (first.called, first.holdout, first.env_arguments, second.task) == ("A", 2, {"n": 1}, "calculator")
    assert found.only_holdout and found.engine.temperature == 0.5
    of_model = parse_eval(["model", "--config", "mix.toml"])  # what of the file trains is passed over
    assert of_model.workload.environments == found.workload.environments
    assert (of_model.only_holdout, of_model.engine.temperature) == (False, 0.5)
    own = parse_eval([run, "--env", "e:B"])
    assert (own.workload.environments, own.workload.env, own.only_holdout) == ((), "e:B", False)


def test_a_model_is_measured_on_rows_of_ones_own(tmp_path):
    model = str(write_small_model(tmp_path / "model"))
    found = parse_eval([model, "--data", "d.jsonl", "--reward", "m:score"])
    assert (found.workload.task, found.workload.holdout, found.only_holdout) == (None, None, False)
    assert found.engine.budget.max_turn_tokens == 1024
    assert parse_eval([model, "--data", "d.jsonl", "--reward", "m:score", "--holdout", "0.5"]).workload.holdout == 0.5


def test_a_model_without_its_tokenizer_is_not_taken_for_the_tiny_one(tmp_path):
    directory = write_small_model(tmp_path / "model")
    (directory / "tokenizer.json").unlink()
    assert parse_eval([str(directory)]).model == str(directory)  # which is then refused for what it lacks


def write_python_run(path, **model):
    """As a run of the Python API leaves it: the trainer's options, and beside them what the model was opened with."""
    complete(write_small_model(path / "checkpoints" / "version-2"))
    (path / "events.jsonl").touch()
    record = {"seed": 5, "config": {"class": "TrainerConfig"}, "model": model}
    (path / "config.json").write_text(json.dumps(record))
    return str(path)


def test_a_run_of_the_python_api_is_measured_with_its_seed_and_template_options(tmp_path):
    options = {"enable_thinking": False, "level": 2, "style": "dry", "extra": None}
    run = write_python_run(tmp_path / "run", template_options=options, tool_format="llama3", compute_dtype="bfloat16")
    found = parse_eval([run])
    assert found.dtype == "bfloat16"
    assert parse_template_options(found.template_options) == options
    assert (found.tool_format, found.seed, found.engine.sampling.seed) == ("llama3", 5, 5)
    own = parse_eval([run, "--template-options", "level=3", "--seed", "6"])
    assert (own.template_options, own.seed, own.tool_format) == ("level=3", 6, "llama3")


def test_template_options_that_are_no_text_are_not_left_out_unseen(tmp_path):
    run = write_python_run(tmp_path / "run", template_options={"names": ["a", "b"]}, tool_format="auto")
    assert "config.json has template options that a command line can't name" in refusal(run)


def test_at_temperature_0_one_trajectory_a_row_says_all(tmp_path):
    run = write_run(tmp_path / "run")
    assert parse_eval([run, "--temperature", "0"]).eval_group_size == 1
    assert parse_eval([run, "--temperature", "0", "--eval-group-size", "2"]).eval_group_size == 2


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["needs a model directory or a run"]),
        (["--seed", "1"], ["needs a model directory or a run"]),
        (["nosuch"], ["is 'nosuch'", "no directory"]),
        (["."], ["neither a run directory nor a model directory"]),
        (["run", "--lr", "1"], ["--lr has no effect in headway eval"]),
        (["run", "--steps", "5"], ["--steps has no effect in headway eval"]),
        (["run", "--groups-per-step=5"], ["--groups-per-step has no effect in headway eval"]),
        (["run", "--eval-row", "5"], ["Did you mean --eval-rows?"]),
        (["run", "--env", "m:C"], ["--env is given, but the model tiny"]),
        (["run", "--data", "x"], ["--data is /", "add --env, --reward or --agent"]),
        (["run", "--holdout", "5"], ["--holdout has no effect on a run's own rows"]),
        (["run", "x"], ["'x' is not an option"]),
        (["run", "--task", "gess"], ["--task is 'gess'", "Did you mean guess?"]),
        (["run", "--task", "calculator"], ["--task is 'calculator'", "plain text"]),
        (["run", "--eval-rows", "257"], ["--eval-rows is 257", "256 held-out rows"]),
        (["run", "--eval-group-size", "0"], ["--eval-group-size is 0"]),
        (["run", "--temperature", "-1"], ["--temperature is -1.0"]),
        (["run", "--max-turns", "0"], ["--max-turns is 0"]),
        (["run", "--device", "cuda"], ["--device is cuda", "no NVIDIA GPU"]),
        (["run", "--run-dir", "run"], ["--run-dir is run, which holds a run already"]),
        (["run", "--template-options", "a=1"], ["--template-options is 'a=1'", "no chat template"]),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(arguments, parts, tmp_path):
    write_run(tmp_path / "run")
    message = refusal(*arguments)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("text", ["", "{", "[]", '{"config": 3}', "{}"])
def test_a_run_with_a_broken_configuration_is_refused(text, tmp_path):
    run = write_run(tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(text)
    if text == '{"config": 3}':  # of the Python API: it has no task, and all is left to the options
        assert parse_eval([run]).workload.task == "guess"
    else:
        assert "config.json is no configuration of a run" in refusal(run)


def test_help_names_every_option():
    text = eval_help()
    for option in EVAL_OPTIONS.values():
        assert f"  {option.flag} " in text and option.meaning in text


def test_help_shows_the_defaults_of_the_tasks():
    text = eval_help()
    assert "model turns of one trajectory (default: 8, calculator 4" in text
    assert "prompt, generated and framing together (default: guess 64, calculator 1536, " in text
