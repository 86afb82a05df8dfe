"""What is valid but not built yet is refused in one sentence when a run starts."""

import pytest

from pipeline.env import Env
from pipeline.errors import ConfigError
from pipeline.unsupported import refuse_unbuilt_env


def test_environment_that_wants_to_be_recovered_is_refused():
    class Stateless(Env):
        recovery = "stateless"

    with pytest.raises(ConfigError, match=r"Stateless.recovery='stateless' isn't built yet"):
        refuse_unbuilt_env(Stateless)
    refuse_unbuilt_env(Env)
    refuse_unbuilt_env(None)
