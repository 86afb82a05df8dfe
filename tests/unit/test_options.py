"""Options of run.py: where values come from, what is refused, and how the refusal reads."""

import dataclasses
import json
import re
import time
from pathlib import Path

import pytest

from pipeline.commands.launch import make_evaluator
from pipeline.commands.make_run_config import parse
from pipeline.commands.options import OPTIONS, help_text, options_table
from pipeline.commands.run_config import COMMON, MODES, RECIPES, task_defaults
from pipeline.commands.stored_config import run_config_of
from pipeline.commands.workload import open_workload
from pipeline.commands.workload_config import WorkloadConfig
from pipeline.config import Budget, ForwardBackwardBatch, GroupCompletion, KVCache, Sampling, Schedule
from pipeline.errors import ConfigError
from pipeline.run_dir.config_json import plain
from pipeline.run_dir.run_directory import make_default_run_dir, make_run_dir
from pipeline.tasks import TASKS
from pipeline.trainer_config import EngineConfig

CASE = Path(__file__).parent.parent / "data" / "cases" / "HR80"


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield tmp_path


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse(arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_modes_differ_in_staleness_and_concurrency_only():
    asynchronous, synchronous = plain(parse(["--run-dir", "r"])), plain(parse(["--mode", "sync", "--run-dir", "r"]))
    trainer = asynchronous["trainer"]
    assert (trainer["max_staleness"], trainer["engine"]["schedule"]["concurrency"]) == (2, 192)
    assert trainer["groups_per_step"] * trainer["group_size"] == 64
    assert trainer["engine"]["schedule"]["admit_ahead"] == 2
    trainer = synchronous["trainer"]
    assert (trainer["max_staleness"], trainer["engine"]["schedule"]["concurrency"]) == (0, 64)
    for config in (asynchronous, synchronous):
        del config["mode"], config["trainer"]["max_staleness"], config["trainer"]["engine"]["schedule"]["concurrency"]
    assert asynchronous == synchronous


def test_command_line_wins_over_file_and_file_over_mode(empty_directory):
    (empty_directory / "recipe.toml").write_bytes(b"\xef\xbb\xbfmax_staleness = 3\nlr = 1\nmax_turns = 5\n")
    config = parse(["--config", "recipe.toml", "--max-turns=7", "--steps", "9"])
    assert (config.trainer.max_staleness, config.trainer.engine.budget.max_turns, config.steps) == (3, 7, 9)
    assert (config.trainer.optimizer.lr, type(config.trainer.optimizer.lr)) == (1.0, float)


def test_seed_reaches_sampling():
    config = parse(["--seed", "5"])
    assert (config.seed, config.trainer.engine.sampling.seed) == (5, 5)


def test_evaluations_are_off_unless_asked_for():
    config = parse([])
    assert make_evaluator(config, open_workload(config.workload)) is None
    config = parse(["--eval-every", "25", "--eval-rows", "32", "--eval-final-group-size", "0"])
    evaluator = make_evaluator(config, open_workload(config.workload))
    assert evaluator.holdout == TASKS["guess"].holdout_rows()[:32]
    assert (evaluator.every, evaluator.group_size, evaluator.final_group_size) == (25, 4, 0)


def test_none_stands_for_no_limit():
    assert parse(["--grad-clip-norm", "none"]).trainer.optimizer.grad_clip_norm is None


def test_cpu_starts_one_sampler_unless_asked():
    assert (parse([]).device, parse([]).samplers) == ("cpu", 1)
    assert parse(["--samplers", "2", "--device", "cpu"]).samplers == 2


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--max-stalenes", "2"], ["--max-stalenes ", "Did you mean --max-staleness?"]),
        (["--max_staleness", "2"], ["--max_staleness", "Did you mean --max-staleness?"]),
        (["--steps"], ["--steps needs a value"]),
        (["--steps", "--seed", "1"], ["--steps needs a value"]),
        (["--steps="], ["--steps is empty"]),
        (["--steps", "1", "--steps", "2"], ["--steps is given twice", "'1'", "'2'"]),
        (["steps", "1"], ["'steps' is not an option"]),
        (["--steps", "1_0"], ["--steps is '1_0'", "whole number"]),
        (["--steps", "2.0"], ["--steps is '2.0'", "whole number"]),
        (["--steps", "9" * 25], ["--steps is", "whole number"]),
        (["--steps", "0"], ["--steps is 0", "at least 1"]),
        (["--max-staleness", "-1"], ["--max-staleness is -1", "optimizer updates", "at least 0"]),
        (["--lr", "nan"], ["--lr is 'nan'"]),
        (["--lr", "0"], ["--lr is 0.0", "above 0"]),
        (["--lr", "1e999"], ["--lr is '1e999'"]),
        (["--adam-eps", "0"], ["--adam-eps is 0.0"]),
        (["--top-p", "1.5"], ["--top-p is 1.5"]),
        (["--temperature", "0"], ["--temperature is 0"]),
        (["--temperature", "1e-320"], ["--temperature is", "at least 0.0001"]),
        (["--concurrency", str(10**14)], ["--concurrency is 100000000000000", "at most 2,147,483,647"]),
        (["--truncation-by-cause", "turns"], ["--truncation-by-cause has '' for 'turns'", "zero_reward"]),
        (["--truncation-by-cause", "tuns=drop"], ["--truncation-by-cause names the cause 'tuns'", "group_deadline"]),
        (["--mode", "asynk"], ["--mode is 'asynk'", "Did you mean async?"]),
        (["--task", "gess"], ["--task is 'gess'", "Did you mean guess?"]),
        (["--mode", "sync", "--max-staleness", "2"], ["--max-staleness is 2", "sync"]),
        (["--mode", "sync", "--admit-ahead", "1"], ["--admit-ahead has no effect", "sync"]),
        (["--mode", "sync", "--oversample-factor", "2"], ["--oversample-factor is 2.0", "max_staleness"]),
        (["--tool-latency", "lognormal:50"], ["--tool-latency is 'lognormal:50'", "lognormal:50:1.0"]),
        (["--tool-latency", "fixed:-1"], ["--tool-latency is 'fixed:-1'"]),
        (["--model", "missing"], ["--model is 'missing'", "neither", "directory"]),
        (["--model", "Qwen/Qwen3-0.6B"], ["--model is 'Qwen/Qwen3-0.6B'", "nothing is downloaded", "--local-dir"]),
        (["--model", "/dev/null"], ["--model is '/dev/null'", "no directory"]),
        (["--model", ".", "--task", "guess"], ["--task is 'guess'", "the model tiny", "but --model is /"]),
        (["--init", "."], ["neither a run directory nor a model directory"]),
        (["--init", "missing"], ["--init is 'missing'", "no directory"]),
        (["--template-options", "a=true"], ["--template-options is 'a=true'", "no chat template"]),
        (["--template-options", "a"], ["--template-options is 'a'", "NAME=VALUE"]),
        (["--tool-format", "hermes"], ["--tool-format is 'hermes'", "the model tiny"]),
        (["--tool-format", "xml"], ["--tool-format is 'xml'", '"hermes"']),
        (["--kv-gib", "0"], ["--kv-gib is 0.0", "above 0"]),
        (["--slots", "0"], ["--slots is 0", "at least 1"]),
        (["--max-minutes", "0"], ["--max-minutes is 0.0", "above 0"]),
        (["--device", "tpu"], ["--device is 'tpu'"]),
        (["--device", "cuda"], ["--device is cuda", "no NVIDIA GPU"]),
        (["--samplers", "0"], ["--samplers is 0"]),
        (["--eval-every", "-1"], ["--eval-every is -1", "at least 0"]),
        (["--eval-every", "5", "--eval-rows", "0"], ["--eval-rows is 0"]),
        (["--eval-every", "5", "--eval-rows", "257"], ["--eval-rows is 257", "'guess' has 256"]),
        (["--eval-rows", "8"], ["--eval-rows has no effect without --eval-every"]),
        (["--eval-final-group-size", "8"], ["--eval-final-group-size has no effect without --eval-every"]),
        (["--eval-every", "0", "--eval-group-size", "2"], ["--eval-group-size has no effect without an --eval-every"]),
        (
            ["--eval-every", "0", "--eval-final-group-size", "0"],
            ["--eval-every and --eval-final-group-size are both 0"],
        ),
        (["--config", "missing.toml"], ["missing.toml", "No such file"]),
        (["--config", "/dev/zero"], ["/dev/zero is no file"]),
    ],
)
def test_bad_option_is_refused_in_one_sentence(arguments, parts):
    message = refusal(*arguments)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (b"max_stalenes = 2", ["max_stalenes in recipe.toml", "Did you mean max_staleness?"]),
        (b"[schedule]\nconcurrency = 2", ["recipe.toml", "[schedule]"]),
        (b"steps = 1.5", ["steps (in recipe.toml) is 1.5", "whole number"]),
        (b"steps = true", ["steps (in recipe.toml) is True"]),
        (b"mode = ['sync']", ["mode (in recipe.toml)"]),
        (b"lr = inf", ["lr (in recipe.toml) is inf"]),
        (b"lr = 1" + b"0" * 400, ["lr (in recipe.toml)"]),
        (b"\nsteps = = 3", ["recipe.toml is not valid TOML", "line 2"]),
        (b"task = '\xff'", ["recipe.toml is not UTF-8"]),
        (b'run_dir = "a\\u0000b"', ["run_dir (in recipe.toml)"]),
        (b"resume = 'r'", ["resume in recipe.toml is no option"]),
        (b"config = 'other.toml'", ["config in recipe.toml is no option"]),
        (b"concurrency = 0", ["concurrency (in recipe.toml) is 0"]),
    ],
)
def test_bad_file_is_refused_naming_file_and_key(empty_directory, text, parts):
    (empty_directory / "recipe.toml").write_bytes(text)
    message = refusal("--config", "recipe.toml")
    for part in parts:
        assert part in message


def test_tool_latency_without_a_tool_is_refused(monkeypatch):
    monkeypatch.setitem(TASKS, "riddle", dataclasses.replace(TASKS["guess"], name="riddle", options={}))
    monkeypatch.setitem(RECIPES, "riddle", {"steps": 1, "lr": 1.0})
    assert "'riddle' has no tool" in refusal("--task", "riddle", "--tool-latency", "fixed:5")
    assert parse(["--task", "riddle"]).steps == 1


@pytest.mark.parametrize("name", ["config.json", "events.jsonl"])
def test_directory_that_holds_a_run_is_refused(empty_directory, name):
    (empty_directory / "old").mkdir()
    (empty_directory / "old" / name).write_text("")
    assert "holds a run already" in refusal("--run-dir", "old")


def test_file_as_run_directory_is_refused(empty_directory):
    (empty_directory / "file").write_text("")
    assert "not a directory" in refusal("--run-dir", "file/below")


def test_parsing_makes_no_files(empty_directory):
    parse(["--run-dir", "new"])
    parse([])
    assert list(empty_directory.iterdir()) == []


def test_run_directory_records_the_resolved_configuration(empty_directory):
    config = parse(["--run-dir", "new/run", "--seed", "3"])
    path = make_run_dir(config.run_dir, config.to_json())
    record = json.loads((path / "config.json").read_text())
    assert record["seed"] == 3 and record["headway"] and record["python"] and record["torch"]
    assert record["config"]["trainer"]["engine"]["schedule"]["concurrency"] == 192
    assert (path / "logs").is_dir()
    with pytest.raises(ConfigError, match="holds a run already"):
        make_run_dir(config.run_dir, {})


def test_default_run_directories_of_one_second_differ(empty_directory):
    now = time.struct_time((2030, 1, 2, 3, 4, 5, 0, 0, 0))
    assert parse([]).run_dir is None  # chosen only when it is made, so that nobody else can choose it in between
    made = [make_default_run_dir("async", now, {"run": number}) for number in (1, 2, 3)]
    assert [str(path) for path in made] == [f"runs/20300102-030405-async{end}" for end in ("", "-2", "-3")]
    assert [json.loads((path / "config.json").read_text())["run"] for path in made] == [1, 2, 3]


def test_default_run_directory_beside_a_file_named_runs_is_refused(empty_directory):
    (empty_directory / "runs").write_text("")
    with pytest.raises(ConfigError, match="runs is not a directory"):
        make_default_run_dir("async", time.localtime(), {})


def test_help_lists_every_option_with_default_and_meaning():
    text = help_text()
    for option in OPTIONS.values():
        assert re.search(
            rf"^  {option.flag} .*\n      {re.escape(option.meaning)} \(default: .+\)$", text, re.MULTILINE
        )
    assert "async 192, sync 64" in text


def test_a_default_that_tasks_change_is_shown_beside_the_general_one():
    shown = {name: OPTIONS[name].default_text() for name in ("max_turns", "max_context_tokens", "steps", "concurrency")}
    assert shown == {
        "max_turns": "8, calculator 4, arithmetic 2, arithmetic in text 2, search in text 6",
        "max_context_tokens": "guess 64, calculator 1536, arithmetic 16, search 64, arithmetic in text 512, "
        "search in text 2560, own 4096",
        "steps": "guess 900, calculator 200, arithmetic 900, search 300, arithmetic in text 200, search in text 200, "
        "own 200",
        "concurrency": "async 192, sync 64",
    }


# Options whose value can't be just any number, and what they need beside them.
SETTINGS = {
    "mode": ["--mode", "sync"],
    "tool_latency": ["--tool-latency", "fixed:3"],
    "run_dir": ["--run-dir", "elsewhere"],
    "advantage": ["--advantage", "batch"],
    "eval_rows": ["--eval-every", "7", "--eval-rows", "3"],
    "eval_group_size": ["--eval-every", "7", "--eval-group-size", "3"],
    "eval_final_group_size": ["--eval-every", "7", "--eval-final-group-size", "3"],
    "stale_policy": ["--stale-policy", "keep", "--allow-unbounded-staleness"],
    "batch_order": ["--batch-order", "admission"],
    "repeat_dataset": ["--repeat-dataset", "false"],
    "on_failure": ["--on-failure", "replace"],
    "on_stall": ["--on-stall", "stop"],
    "zero_variance": ["--zero-variance", "replace"],
    "priority": ["--priority", "predicted_length"],
    "oversample_factor": ["--oversample-factor", "1.5"],
    "overlap_min_sequences": ["--mode", "sync", "--overlap-min-sequences", "3"],
    "overlap_min_tokens": ["--mode", "sync", "--overlap-min-tokens", "3"],
    "completion": ["--completion", "deadline", "--max-straggler-tokens", "3", "--allow-trajectory-loss"],
    "max_straggler_tokens": ["--completion", "deadline", "--max-straggler-tokens", "3", "--allow-trajectory-loss"],
    "on_stragglers": [
        *("--completion", "deadline", "--max-straggler-tokens", "3", "--allow-trajectory-loss"),
        *("--on-stragglers", "discard", "--stale-policy", "mask_span"),
    ],
    "truncation": ["--truncation", "reward"],
    "truncation_by_cause": ["--truncation-by-cause", "turns=reward"],
    "top_p": ["--top-p", "0.5"],
    "dtype": ["--dtype", "bfloat16"],
    "loss": ["--loss", "ppo"],
    "clip_low": ["--loss", "ppo", "--clip-low", "0.1"],
    "clip_high": ["--loss", "ppo", "--clip-high", "0.1"],
    "max_importance_weight": ["--loss", "decoupled_ppo", "--max-importance-weight", "3"],
    "loss_function": ["--loss", "custom", "--loss-function", "bisect:insort"],
    "normalize": ["--normalize", "sum"],
    "sampling_policy": ["--sampling-policy", "segment", "--kv-max-staleness", "1"],
    "kv_max_staleness": ["--sampling-policy", "segment", "--kv-max-staleness", "1"],
    "kv_on_limit": ["--sampling-policy", "segment", "--kv-on-limit", "refill", "--allow-reprefill"],
    "allow_reprefill": ["--allow-reprefill"],
    "keep_best": ["--keep-best", "2", "--eval-every", "7"],
}


@pytest.mark.filterwarnings("ignore::pipeline.user_warnings.ConfigWarning")
def test_every_option_changes_the_configuration():
    """An option that nothing reads would be a lie: each one, set to another value, changes what comes out, and what a
    resume reads of config.json.
    """
    base = plain(parse(["--run-dir", "r"]))
    needed = (["--loss", "ppo"], ["--loss", "decoupled_ppo"], ["--eval-every", "7"])  # by options that others need
    with_needed = [plain(parse(["--run-dir", "r", *options])) for options in needed]
    others = {int: "3", float: "0.25", bool: "true"}
    for option in OPTIONS.values():
        if option.name == "device":  # with only one choice here
            continue
        if option.owner is WorkloadConfig and option.name != "tool_latency":  # test_workload_options.py
            continue
        if option.name in (
            "model",
            "init",
            "template_options",
            "tool_format",
        ):  # need a model directory: test_model_directory.py
            continue
        given = SETTINGS.get(option.name) or [option.flag, others[option.type]]
        given = given + ([] if option.name == "run_dir" else ["--run-dir", "r"])
        config = parse(given)
        found = plain(config)
        assert run_config_of(json.loads(json.dumps(found))) == config, option.flag
        assert found != base and (found not in with_needed or option.name == "loss"), option.flag


def test_flag_stands_alone_or_with_true_or_false():
    for given, wanted in (([], True), (["false"], False), (["true"], True)):
        assert parse(["--repeat-dataset", *given, "--steps", "1"]).trainer.repeat_dataset is wanted
    assert parse(["--repeat-dataset=false", "--steps", "1"]).trainer.repeat_dataset is False
    assert "--repeat-dataset is 'no'; it must be true or false" in refusal("--repeat-dataset", "no")


def test_max_staleness_0_is_the_mode_sync():
    assert parse(["--max-staleness", "0"]).mode == "sync"
    assert "--max-staleness is 0, but --mode is 'async'" in refusal("--mode", "async", "--max-staleness", "0")


def test_config_fields_are_options_or_known_to_be_none():
    """A new field of these configs must become an option."""
    for owner in (Schedule, Budget, Sampling, GroupCompletion, KVCache, ForwardBackwardBatch):
        exposed = {option.field for option in OPTIONS.values() if option.owner is owner}
        names = {field.name for field in dataclasses.fields(owner)} - {"seed"}  # one seed for everything: --seed
        assert names <= exposed
    assert {field.name for field in dataclasses.fields(Sampling)} <= {f.name for f in dataclasses.fields(EngineConfig)}


def test_every_task_has_a_recipe():
    assert RECIPES.keys() == TASKS.keys()


def test_modes_and_recipes_name_existing_options():
    for values in (*MODES.values(), *map(task_defaults, TASKS), COMMON):
        assert values.keys() <= OPTIONS.keys()


def test_table_has_a_row_per_option():
    assert options_table().count("\n") == len(OPTIONS) + 1


def test_groups_of_one_member_can_be_asked_for():
    config = parse(["--group-size", "1", "--run-dir", "r"])
    assert (config.trainer.group_size, config.trainer.completion.min_members) == (1, 1)


def as_toml(name, renamed):
    """A case's file, whose lines are `key: value`, with our names for its keys."""
    lines = [line.strip().split(": ") for line in (CASE / name).read_text().splitlines() if not line.endswith(":")]
    return "".join(f"{renamed.get(key, key)} = {value}\n" for key, value in lines)


def test_all_mistyped_names_are_told_at_once_with_the_nearest_real_ones(empty_directory):
    """HR80: in a file, and on the command line."""
    pairs = {"max_stalenes": "max_staleness", "concurency": "concurrency", "temperture": "temperature"}
    (empty_directory / "typo.toml").write_text(as_toml("typo.yaml", {}))
    message = refusal("--config", "typo.toml")
    for wrong, right in pairs.items():
        assert f"{wrong} in typo.toml is no option. Did you mean {right}?" in message
    message = refusal("--max-stalenes", "2", "--concurency=16", "--temperture", "0.7", "--steps", "3")
    for wrong, right in pairs.items():
        dashed = [name.replace("_", "-") for name in (wrong, right)]
        assert f"--{dashed[0]} is no option. Did you mean --{dashed[1]}?" in message


def test_chunk_sizes_do_not_go_with_a_bound_above_0(empty_directory):
    """HR80: an option that is valid in the other mode only."""
    names = {"min_sequences": "overlap_min_sequences", "min_tokens": "overlap_min_tokens"}
    (empty_directory / "mixed.toml").write_text(as_toml("mixed_mode.yaml", names))
    assert "but max_staleness is 1; leave" in refusal("--config", "mixed.toml")
