"""What is valid but not built yet is refused in one sentence when a run starts."""

import warnings

import pytest

from pipeline.config import Adam, Budget, ForwardBackwardBatch, GroupCompletion, KVCache, Schedule, Truncation
from pipeline.env import Env
from pipeline.errors import ConfigError
from pipeline.losses import CISPO
from pipeline.trainer_config import EngineConfig, TrainerConfig
from pipeline.unsupported import refuse_unbuilt, refuse_unbuilt_env


def config(engine=None, **options):
    defaults = {
        "optimizer": Adam(lr=1e-4),
        "completion": GroupCompletion(mode="wait"),
        "loss": CISPO(normalize="token"),
        "groups_per_step": 2,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TrainerConfig(engine=EngineConfig(**(engine or {})), **(defaults | options))


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("Schedule.priority", lambda: config({"schedule": Schedule(priority="predicted_length")})),
        ("Budget.tool_output_tokens", lambda: config({"budget": Budget(tool_output_tokens=9)})),
    ],
)
def test_setting_that_is_not_built_is_refused(name, make):
    with pytest.raises(ConfigError, match=rf"^{name}=.* isn't built yet"):
        refuse_unbuilt(make())


def test_what_is_built_passes():
    refuse_unbuilt(config())
    refuse_unbuilt(config({"sampling_policy": "segment", "kv_cache": KVCache(max_staleness=1)}))
    refuse_unbuilt(config(stale_policy="keep", allow_unbounded_staleness=True))
    refuse_unbuilt(config(stale_policy="mask_span", allow_trajectory_loss=True))
    refuse_unbuilt(config(max_staleness=0, forward_backward_batch=ForwardBackwardBatch()))
    refuse_unbuilt(config(on_failure="replace", zero_variance="replace"))
    refuse_unbuilt(config(max_staleness=0, truncation=Truncation(train="reward"), batch_order="admission"))


def test_environment_that_wants_to_be_recovered_is_refused():
    class Stateless(Env):
        recovery = "stateless"

    with pytest.raises(ConfigError, match=r"Stateless.recovery='stateless' isn't built yet"):
        refuse_unbuilt_env(Stateless)
    refuse_unbuilt_env(Env)
    refuse_unbuilt_env(None)
