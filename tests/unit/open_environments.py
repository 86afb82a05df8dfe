"""How many environments are open: what is left of them when all have ended."""

from pipeline.environments.host import EnvironmentHost
from pipeline.processes.environment.environment_client import EnvironmentClient


def num_open(client: EnvironmentClient) -> list[int]:
    """On each host, as the supervisor's end has it."""
    return [len(handles) for handles in client.open_at]


def num_episodes(host: EnvironmentHost) -> int:
    """In a host itself."""
    return len(host._episodes)
