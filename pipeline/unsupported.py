"""What an environment may ask for but no process does yet: refused in one sentence when a run starts."""

from pipeline.env import Env
from pipeline.errors import ConfigError


def refuse_unbuilt_env(env_class: type[Env] | None) -> None:
    """Raise ConfigError for what an environment's class asks for in vain; None: a path, imported by its own process
    only. Call it before any process starts.
    """
    if env_class is not None and env_class.recovery != "drop":
        raise ConfigError(
            f"{env_class.__qualname__}.recovery={env_class.recovery!r} isn't built yet; for now only 'drop' works."
        )
