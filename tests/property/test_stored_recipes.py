"""Any recipe and any options: config.json gives back the very configuration that the run was started with."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.small_models import write_small_model
from pipeline.commands.make_run_config import parse
from pipeline.commands.options import OPTIONS
from pipeline.commands.stored_config import run_config_of
from pipeline.commands.workload_config import WorkloadConfig
from pipeline.config import TRUNCATION_CAUSES
from pipeline.errors import ConfigError
from pipeline.losses import NORMALIZATIONS

RECIPES = Path(__file__).parent.parent.parent / "recipes"
COUNTS = st.integers(1, 10**6).map(str)
FEW = st.integers(1, 8).map(str)
SHARES = st.floats(0.0, 1.0, exclude_max=True).map(repr)
POSITIVE = st.floats(1e-300, 1e18).map(repr)
FLAGS = st.sampled_from(["true", "false"])
TEXTS = st.text(st.characters(exclude_characters="\0"), min_size=1).filter(lambda text: text != "none")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(TEXTS | st.just("class"), JSON, max_size=3).map(json.dumps)

# How options that go with any others are drawn; those that are not named here are drawn by their type.
FREE = {
    "seed": st.integers(0, 2**63 - 1).map(str),
    "device": st.sampled_from(["cpu", "auto"]),
    "dtype": st.sampled_from(["float32", "bfloat16"]),
    "run_dir": st.sampled_from(["r", "a/b c", "/tmp/nothing-here/ü"]),
    "init": st.just("model"),
    "kl_coefficient": SHARES,
    "entropy_coefficient": SHARES,
    "log_trajectories": st.integers(0, 1).map(str),
    "priority": st.sampled_from(["fifo", "predicted_length"]),
    "final_answer_reserve": st.just("0"),
    "truncation": st.sampled_from(["zero_reward", "reward"]),
    "truncation_by_cause": st.lists(st.sampled_from(TRUNCATION_CAUSES), unique=True).map(
        lambda causes: ",".join(f"{cause}=reward" for cause in causes) or "turns=reward"
    ),
    "temperature": st.floats(0.01, 100).map(repr),
    "top_p": st.floats(0.0, 1.0, exclude_min=True).map(repr),
    "beta1": SHARES,
    "beta2": SHARES,
    "weight_decay": SHARES,
    "grad_clip_norm": POSITIVE | st.just("none"),
    "lr_floor": SHARES,
    "on_stall": st.sampled_from(["continue", "stop"]),
}
BY_TYPE = {int: FEW, float: POSITIVE, bool: FLAGS}


def fixed(**values):
    return st.fixed_dictionaries({name: st.just(value) for name, value in values.items()})


# Of each of these one line: options that need or exclude each other.
MODEL = {"model": "model"}
ROWS = MODEL | {"data": "train.jsonl"}
FIELDS = st.fixed_dictionaries({}, optional={"answer_field": TEXTS, "id_field": TEXTS}) | st.fixed_dictionaries(
    {"prompt_field": TEXTS, "allow_empty_prompts": FLAGS}
)
HELD = st.sampled_from([{}, {"holdout": "3"}, {"holdout": "0.25"}, {"eval_data": "test.jsonl", "eval_every": "2"}])
CHAT = st.fixed_dictionaries({}, optional={"template_options": st.just("a=true,b=2"), "tool_format": st.just("hermes")})
WORKLOADS = [
    *(fixed(task=task) for task in ("guess", "arithmetic", "search")),
    st.fixed_dictionaries({"task": st.just("search"), "tool_latency": st.just("lognormal:50:1.0")}),
    *(st.tuples(fixed(task=task, **MODEL), CHAT) for task in ("calculator", "arithmetic", "search")),
    st.tuples(fixed(**MODEL), st.fixed_dictionaries({"env": st.just("envs:Search"), "env_arguments": OBJECTS}), CHAT),
    st.tuples(fixed(**ROWS, env="envs.py:Search"), FIELDS, HELD),
    st.tuples(fixed(**ROWS, reward="rewards.py:score"), st.fixed_dictionaries({"system_prompt": TEXTS}), FIELDS, HELD),
    st.tuples(fixed(**ROWS, agent="outside", endpoint_port="8800"), FIELDS, HELD),
    fixed(**MODEL, config="mix.toml"),
]
LOSSES = [
    st.fixed_dictionaries({"loss": st.just("cispo"), "eps_max": POSITIVE}),
    st.fixed_dictionaries({"loss": st.sampled_from(["ppo", "gspo"]), "clip_low": SHARES, "clip_high": SHARES}),
    st.fixed_dictionaries({"loss": st.just("decoupled_ppo"), "max_importance_weight": POSITIVE}),
    fixed(loss="custom", loss_function="bisect:insort"),
    st.fixed_dictionaries({"loss": st.sampled_from(["importance_sampling", "policy_gradient"])}),
    st.fixed_dictionaries({"normalize": st.sampled_from(NORMALIZATIONS)}),
]
ADVANTAGES = st.sampled_from(["group", "group_std", "group_batch_std", "batch", "batch_std"])
SIZES = st.fixed_dictionaries({"groups_per_step": FEW, "group_size": st.integers(2, 8).map(str)})
SAMPLING = [
    st.fixed_dictionaries({}),
    fixed(mode="sync"),
    fixed(max_staleness="0"),
    fixed(mode="sync", overlap_min_sequences="3", advantage="group"),
    fixed(mode="sync", overlap_min_tokens="9", advantage="group"),
    st.fixed_dictionaries({"max_staleness": FEW, "admit_ahead": FEW, "oversample_factor": st.just("1.5")}),
    fixed(batch_order="admission", repeat_dataset="true"),
    fixed(stale_policy="keep", allow_unbounded_staleness="true"),
    fixed(stale_policy="mask_span", allow_trajectory_loss="true"),
    st.fixed_dictionaries({"sampling_policy": st.just("segment"), "kv_max_staleness": FEW}),
    fixed(sampling_policy="segment", kv_on_limit="refill", allow_reprefill="true"),
    fixed(completion="deadline", max_straggler_tokens="0", min_members="2", allow_trajectory_loss="true"),
    fixed(
        completion="deadline",
        max_straggler_tokens="3",
        allow_trajectory_loss="true",
        on_stragglers="discard",
        stale_policy="mask_span",
    ),
    fixed(on_failure="replace"),
    fixed(zero_variance="replace", advantage="group"),
]
EVALUATIONS = st.fixed_dictionaries(
    {"eval_every": st.integers(1, 9).map(str)},
    optional={
        **{"eval_rows": FEW, "eval_group_size": FEW, "eval_final_group_size": st.integers(0, 9).map(str)},
        "keep_best": FEW,
    },
)
MIX = """\
[[environment]]
env = "envs.py:Search"
name = "searching"
weight = 2
arguments = {class = "Adam", size = [1, 2.5]}
data = "train.jsonl"
holdout = 0.25

[[environment]]
reward = "rewards.py:score"
data = "other.jsonl"
system_prompt = "Be brief."
"""


# Options that the lines above draw.
TOGETHER = {
    *("mode", "max_staleness", "admit_ahead", "oversample_factor", "batch_order", "stale_policy"),
    *("allow_unbounded_staleness", "allow_trajectory_loss", "sampling_policy", "kv_max_staleness", "kv_on_limit"),
    *("allow_reprefill", "completion", "min_members", "max_straggler_tokens", "on_stragglers", "on_failure"),
    *("zero_variance", "overlap_min_sequences", "overlap_min_tokens", "groups_per_step", "group_size"),
    *("eval_every", "eval_rows", "eval_group_size", "eval_final_group_size", "keep_best"),
    *("loss", "eps_max", "clip_low", "clip_high", "max_importance_weight", "loss_function", "normalize", "advantage"),
    *("task", "model", "template_options", "tool_format", "tool_latency"),
    *(option.name for option in OPTIONS.values() if option.owner is WorkloadConfig),
}
FREE |= {
    name: BY_TYPE.get(one.type, st.just(str(one.default)))
    for name, one in OPTIONS.items()
    if name not in FREE and name not in TOGETHER
}
FREE = {name: drawn for name, drawn in FREE.items() if name in OPTIONS}


def merged(parts):
    found = {}
    for part in parts:
        found |= merged(part) if isinstance(part, tuple) else part
    return found


@st.composite
def recipes(draw):
    parts = [draw(st.one_of(WORKLOADS)), draw(st.one_of(LOSSES)), {"advantage": draw(ADVANTAGES)}]
    parts.append(draw(st.fixed_dictionaries({}, optional=FREE)))
    parts += [draw(SIZES), draw(st.one_of(SAMPLING))]
    given = merged(tuple(parts))
    if {"task", "holdout", "eval_data", "config"} & given.keys() and (draw(st.booleans()) or "eval_data" in given):
        given |= draw(EVALUATIONS)
    return given


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory):
    """A directory with what the options name: nothing of it is opened but the model's files."""
    directory, before = tmp_path_factory.mktemp("here"), os.getcwd()
    write_small_model(directory / "model")
    (directory / "mix.toml").write_text(MIX)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield directory
    assert os.getcwd() == before


def stored(config):
    return json.loads(json.dumps(config.to_json()))["config"]


@pytest.mark.filterwarnings("ignore::pipeline.user_warnings.ConfigWarning")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(recipes())
def test_stored_configuration_is_read_back_as_it_was(given):
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    try:
        config = parse(arguments)
    except ConfigError:  # two draws that exclude each other
        return
    found = run_config_of(stored(config))
    assert found == config
    assert repr(found) == repr(config)  # a 1 is no 1.0, and a tuple no list
