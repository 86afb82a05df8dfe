"""What the configs accept but no process does yet: refused in one sentence when a run starts, in this one place.

A feature that gets built takes its line out of here.
"""

from pipeline.config import Budget
from pipeline.env import Env
from pipeline.errors import ConfigError
from pipeline.trainer_config import TrainerConfig


def refuse_unbuilt(config: TrainerConfig) -> None:
    """Raise ConfigError for the first setting that isn't built yet. Call it before any process starts."""
    engine = config.engine
    for setting, default, found in (
        ("Schedule.priority", "fifo", engine.schedule.priority),
        ("Budget.tool_output_tokens", Budget().tool_output_tokens, engine.budget.tool_output_tokens),
    ):
        if found != default:
            raise ConfigError(f"{setting}={found!r} isn't built yet; for now only {default!r} works.")


def refuse_unbuilt_env(env_class: type[Env] | None) -> None:
    """The same for what an environment's class asks for; None: a path, imported by its own process only."""
    if env_class is not None and env_class.recovery != "drop":
        raise ConfigError(
            f"{env_class.__qualname__}.recovery={env_class.recovery!r} isn't built yet; for now only 'drop' works."
        )
