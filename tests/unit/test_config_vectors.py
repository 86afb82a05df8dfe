"""The configs accept and refuse what the validation vectors say, with the class of error that they have."""

import warnings

import pytest

from pipeline.advantages import Batchwise, GroupCentered
from pipeline.config import (
    Adam,
    Budget,
    Checkpointing,
    Cosine,
    ForwardBackwardBatch,
    GroupCompletion,
    KVCache,
    Schedule,
    Truncation,
)
from pipeline.env import TurnResult
from pipeline.losses import CISPO, PPO, DecoupledPPO, ImportanceSampling, PolicyGradient
from pipeline.trainer_config import EngineConfig, TrainerConfig
from pipeline.user_warnings import ConfigWarning
from tests import vectors

VECTORS = vectors.load("validation")

CLASSES = {
    cls.__name__: cls
    for cls in (
        Adam,
        Batchwise,
        Budget,
        CISPO,
        Checkpointing,
        DecoupledPPO,
        ForwardBackwardBatch,
        GroupCentered,
        Cosine,
        GroupCompletion,
        ImportanceSampling,
        KVCache,
        PPO,
        PolicyGradient,
        Schedule,
        Truncation,
        TurnResult,
    )
}
# Classes of the user's system that Headway does not have yet, or that another test file covers.
NOT_HERE: set[str] = set()


def build(value):
    """A vector's value as Python: {"$type": X, ...} is an object of ours, {"$float": "nan"} a number."""
    if isinstance(value, dict) and "$float" in value:
        return float(value["$float"])
    if isinstance(value, dict) and "$type" in value:
        return CLASSES[value["$type"]](**{key: build(item) for key, item in value.items() if key != "$type"})
    if isinstance(value, dict):
        return {key: build(item) for key, item in value.items()}
    return value


def build_target(vector) -> None:
    kwargs = {key: build(item) for key, item in vector.get("kwargs", {}).items()}
    target = vector["target"]
    if target == "RolloutEngine":
        EngineConfig(**build(vector["engine"]), **kwargs)
    elif target in ("AsyncTrainer", "AsyncTrainer.run"):
        run = vector.get("run")
        defaults = {
            "optimizer": Adam(lr=1e-4),
            "completion": GroupCompletion(mode="wait"),
            "loss": CISPO(normalize="token"),
            "groups_per_step": 2,
            "group_size": 2 if run else 4,
        }
        trainer = TrainerConfig(engine=EngineConfig(**build(vector["engine"])), **(defaults | kwargs))
        if run:
            trainer.check_run(**run)
    else:
        CLASSES[target](**kwargs)


def used_types(value) -> set[str]:
    if not isinstance(value, dict):
        return set()
    return {value["$type"]} if "$type" in value else set().union(*map(used_types, value.values()), set())


@pytest.mark.parametrize("vector", VECTORS)
def test_config_is_accepted_or_refused_as_recorded(vector):
    missing = ({vector["target"]} | used_types(vector.get("kwargs")) | used_types(vector.get("engine"))) & NOT_HERE
    if missing:
        pytest.skip(f"not built yet, or tested elsewhere: {sorted(missing)}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if vector["expected"] == "ok":
            build_target(vector)
        else:
            with pytest.raises({"ValueError": ValueError, "TypeError": TypeError}[vector["expected"]]) as error:
                build_target(vector)
            assert not isinstance(error.value, TypeError) or vector["expected"] == "TypeError"
    if vector["expected"] == "ok":
        assert any(issubclass(w.category, ConfigWarning) for w in caught) == vector["risk_warning"]


def test_skipped_targets_are_only_those_named():
    targets = {vector["target"] for parameter in VECTORS for vector in parameter.values if vector is not None}
    assert targets - CLASSES.keys() - {"RolloutEngine", "AsyncTrainer", "AsyncTrainer.run"} <= NOT_HERE


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: Schedule(concurrency=0), ["Schedule.concurrency", "0", "at least 1"]),
        (lambda: Schedule(oversample_factor=float("inf")), ["Schedule.oversample_factor", "inf", "at least 1"]),
        (
            lambda: Budget(final_answer_reserve=10, max_context_tokens=10),
            ["final_answer_reserve", "max_context_tokens"],
        ),
        (lambda: GroupCompletion(mode="wait", on_stragglers="carry_over"), ["on_stragglers", "carry_over", "wait"]),
        (lambda: Truncation(by_cause={"turn": "drop"}), ["'turn'", '"turns"']),
        (lambda: ForwardBackwardBatch(min_sequences=None, min_tokens=None), ["neither"]),
        (lambda: Adam(lr=True), ["Adam.lr", "True", "above 0"]),
        (lambda: Adam(lr=1e300), ["Adam.lr", "1e+300", "at most"]),  # beyond float32, which the learner has
        (lambda: PPO(normalize="sum", clip_low=10**30), ["PPO.clip_low", "at most"]),  # no message carries it
        (lambda: EngineConfig(environment_timeout=10**300), ["RolloutEngine.environment_timeout", "at most"]),
        (lambda: EngineConfig(environment_processes=1025), ["RolloutEngine.environment_processes", "at most 1,024"]),
        (lambda: Adam(lr=10**400), ["Adam.lr", "finite number above 0"]),  # beyond every float
        (lambda: GroupCentered(eps=10**400), ["GroupCentered.eps", "finite number above 0"]),
        (lambda: Schedule(concurrency=10**5000), ["Schedule.concurrency", "a number of 16610 bits", "at most"]),
        (lambda: EngineConfig(schedule=3), ["RolloutEngine.schedule", "rl.Schedule(...)"]),
    ],
)
def test_refusal_names_option_value_and_rule(make, names):
    with pytest.raises((ValueError, TypeError)) as error:
        make()
    for name in names:
        assert name in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400
