"""The options that name a model: what they become, and what does not go together."""

import shutil

import pytest

from bench.small_models import write_small_model
from pipeline.commands.launch import make_supervisor
from pipeline.commands.make_run_config import parse
from pipeline.commands.run_config import RECIPES, TEXT_RECIPE
from pipeline.commands.workload import open_workload
from pipeline.errors import ConfigError
from pipeline.tasks import TASKS
from tests.complete_checkpoints import complete


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_small_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def run(directory, tmp_path):
    """A run of that model, with a checkpoint."""
    complete(shutil.copytree(directory, tmp_path / "run" / "checkpoints" / "version-4"))
    (tmp_path / "run" / "events.jsonl").touch()
    return tmp_path / "run"


def parse_here(*arguments):
    return parse([*map(str, arguments), "--device", "cpu"])


def test_a_directory_becomes_absolute_and_trains_the_calculator(directory, monkeypatch):
    monkeypatch.chdir(directory.parent)
    config = parse_here("--model", "model")
    assert (config.model, config.init, config.workload.task) == (str(directory), None, "calculator")
    assert config.trainer.engine.budget.max_turn_tokens == 96


def test_init_alone_names_the_model_too(directory, run):
    """The checkpoint, not the run, which may have a newer one when this run is resumed."""
    checkpoint = str(run / "checkpoints" / "version-4")
    assert (parse_here("--init", run).model, parse_here("--init", run).init) == (checkpoint, checkpoint)
    assert parse_here("--init", directory).model == str(directory)
    both = parse_here("--init", run, "--model", directory)
    assert (both.model, both.init) == (str(directory), checkpoint)
    assert make_supervisor(both).source.weights == checkpoint


def test_init_of_a_tiny_run_leaves_the_model_tiny(run):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (run / "checkpoints" / "version-4" / name).unlink()
    complete(run / "checkpoints" / "version-4")
    config = parse_here("--init", run)
    assert (config.model, config.workload.task) == ("tiny", "guess")


def test_template_options_and_tool_format_reach_the_model(directory, tmp_path):
    directory = shutil.copytree(directory, tmp_path / "model")
    with open(directory / "chat_template.jinja", "a") as template:
        template.write("{% if a %}{{ b }}{{ c }}{% endif %}")
    config = parse_here("--model", directory, "--template-options", "a=false,b=2,c=x", "--tool-format", "llama3")
    source = make_supervisor(config).source
    assert source.template_options == {"a": False, "b": 2, "c": "x"} and source.tool_format == "llama3"
    model = make_supervisor(parse_here("--model", directory, "--kv-gib", "0.5", "--slots", "9"))
    assert (model.kv_gib, model.slots) == (0.5, 9)
    model = make_supervisor(parse_here("--model", directory, "--worker-timeout", "7.5", "--max-restarts", "0"))
    assert (model.worker_timeout, model.max_restarts) == (7.5, 0)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--task", "guess"], ["--task is 'guess'", "few words of the model tiny", "use the task calculator"]),
        (["--template-options", "a=1,a=2"], ["--template-options is 'a=1,a=2'", "each name once"]),
        (["--template-options", "=1"], ["--template-options is '=1'", "NAME=VALUE"]),
        (["--eval-every", "1", "--eval-rows", "999"], ["--eval-rows is 999", "'calculator' has 256"]),
    ],
)
def test_what_does_not_go_together_is_refused(arguments, parts, directory):
    with pytest.raises(ConfigError) as error:
        parse_here("--model", directory, *arguments)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("task", ["search", "arithmetic"])
def test_a_task_of_two_languages_starts_from_the_recipe_of_its_models(task, directory):
    for model, language, recipe in (([], "tiny", RECIPES[task]), (["--model", str(directory)], "text", TEXT_RECIPE)):
        config = parse(["--task", task, "--device", "cpu", *model])
        assert open_workload(config.workload).parts[0].arguments["language"] == language
        assert config.trainer.optimizer.lr == recipe["lr"] and config.steps == recipe["steps"]
        budget = TASKS[task].budget[language]
        assert {name: getattr(config.trainer.engine.budget, name) for name in budget} == budget
