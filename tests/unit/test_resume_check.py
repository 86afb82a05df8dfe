"""A run goes on with its own recipe and its own rows; what differs is named."""

import copy
import json
import warnings

import pytest

from pipeline.config import Adam, Checkpointing, GroupCompletion
from pipeline.dataset import rows_digest
from pipeline.errors import ConfigError
from pipeline.losses import CISPO, PPO
from pipeline.run_dir.config_json import config_json
from pipeline.run_dir.resume_check import refuse_changed, warn_of_versions
from pipeline.run_dir.run_directory import make_run_dir, refuse_other_place
from pipeline.trainer_config import EngineConfig, TrainerConfig
from pipeline.training.resumption import find_run
from pipeline.user_warnings import RunWarning
from tests.complete_checkpoints import complete

ROWS = [{"id": 1, "x": [1, 2]}, {"id": 2, "x": "é"}]


def describe(rows=ROWS, seed=3, engine=None, **options):
    made = {"optimizer": Adam(lr=0.1), "loss": CISPO(normalize="token"), "groups_per_step": 2} | options
    config = TrainerConfig(engine=engine or EngineConfig(), completion=GroupCompletion(mode="wait"), **made)
    return config_json(config, seed=seed) | {
        "rows": {"number": len(rows), "digest": rows_digest(rows)},
        "model": {"directory": None, "template_options": {"a": (1, 2)}},
    }


def stored(**options):
    """As config.json has it."""
    return json.loads(json.dumps(describe(**options)))


def refusal(now, before=None):
    with pytest.raises(ConfigError) as error:
        refuse_changed(before if before is not None else stored(), now)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_same_recipe_goes_on():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refuse_changed(stored(), describe())
        elsewhere = Checkpointing(run_dir="moved/run")
        refuse_changed(stored(), describe(checkpointing=elsewhere) | {"steps": 9, "max_minutes": 3.0})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"optimizer": Adam(lr=0.2)}, "Adam.lr was 0.1 when the run began, and is 0.2 now"),
        ({"optimizer": Adam(lr=0.1, grad_clip_norm=1.0)}, "Adam.grad_clip_norm was None"),
        ({"engine": EngineConfig(seed=4)}, "EngineConfig.seed was 0 when the run began, and is 4 now"),
        ({"max_staleness": 1}, "TrainerConfig.max_staleness was 2"),
        ({"group_size": 8}, "TrainerConfig.group_size was 16"),
        ({"loss": PPO(normalize="token")}, "TrainerConfig.loss was CISPO when the run began, and is PPO now"),
        ({"seed": 4}, "seed was 3 when the run began, and is 4 now"),
        ({"checkpointing": Checkpointing(keep=3)}, "Checkpointing.keep was 2"),
        ({"rows": ROWS[:1]}, "training rows are not those that the run began with (rows.number was 2 and is 1)"),
        ({"rows": ROWS[::-1]}, "training rows are not those that the run began with (rows.digest was"),
    ],
)
def test_a_change_is_named(change, named):
    assert named in refusal(describe(**change))


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        (
            "train_rows",
            3,
            "The training rows of sums.py:slow are not those that the run began with (number was 2 and is 3)",
        ),
        ("holdout_digest", "b", "The held-out rows of sums.py:slow are not those that the run began with (digest was"),
    ],
)
def test_a_changed_data_file_is_called_by_its_rows(field, value, named):
    rows = {"env": "sums", "train_rows": 2, "holdout_digest": "a"}
    before, now = ({"workload": {"sums.py:slow": one}} for one in (rows, rows | {field: value}))
    with pytest.raises(ConfigError) as error:
        refuse_changed(before, now)
    assert named in str(error.value)


def test_every_single_value_counts():
    """Whatever is in a description, by whatever name, may not change; the lists above would miss what comes later."""
    before = stored()

    def places(value, path=()):
        for key, inner in value.items():
            yield from places(inner, (*path, key)) if isinstance(inner, dict) else [(*path, key)]

    found = list(places(before))
    assert len(found) > 60
    for path in found:
        if path[-1] in ("steps", "max_minutes", "run_dir") or path[0] in ("headway", "python", "torch"):
            continue
        changed = copy.deepcopy(before)
        inner = changed
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = "another"
        refusal(changed, before)
        del inner[path[-1]]
        refusal(changed, before)  # a value that is no longer there
        refusal(before, changed)  # or was not


def test_true_is_not_1_and_1_is_not_1_0():
    assert "TrainerConfig.shuffle" in refusal(stored() | {"config": stored()["config"] | {"shuffle": 0}})


@pytest.mark.parametrize("name", ["headway", "python", "torch"])
def test_another_version_is_a_warning(name):
    with pytest.warns(RunWarning, match=f"began with {name} 0.0.1 and goes on with"):
        warn_of_versions(stored() | {name: "0.0.1"}, describe())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refuse_changed(stored() | {name: "0.0.1"}, describe())
        warn_of_versions(stored(), describe())


def test_a_changed_version_is_told_once(tmp_path):
    """Though the recipe is compared with config.json and with what the checkpoint tells."""
    make_run_dir(str(tmp_path / "run"), stored() | {"torch": "0.0.1"})
    (tmp_path / "run" / "events.jsonl").touch()
    checkpoint = tmp_path / "run" / "checkpoints" / "version-3"
    checkpoint.mkdir(parents=True)
    complete(checkpoint, recipe=json.dumps(describe() | {"torch": "0.0.2"}))
    with pytest.warns(RunWarning) as caught:
        assert find_run(tmp_path / "run", describe()) == tmp_path / "run"
    (told,) = [str(warning.message) for warning in caught]
    assert "began with torch 0.0.1 and goes on with" in told


@pytest.mark.parametrize(("resume", "given"), [("a", "b"), ("a", "a/b"), ("./a/../b", "a")])
def test_a_run_does_not_go_on_in_another_directory(tmp_path, monkeypatch, resume, given):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"resume is {resume}, and run_dir {given}; a run goes on in its own"):
        refuse_other_place(resume, given)


def test_its_own_directory_may_have_another_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    for given in ("a", "./a/", str(tmp_path / "a"), "link", None):
        refuse_other_place("a", given)
        refuse_other_place(tmp_path / "a", given)
