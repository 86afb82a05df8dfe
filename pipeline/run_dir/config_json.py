"""config.json: the options that a run was made with, and the versions it ran on."""

import platform
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pipeline.version import VERSION


def config_json(config: Any, *, seed: int) -> dict[str, Any]:
    """What a run's config.json holds: versions, seed, and every option of `config` (a dataclass) as it was used."""
    return {
        "headway": VERSION,
        "python": platform.python_version(),
        "torch": installed_version("torch"),
        "seed": seed,
        "config": plain(config),
    }


def plain(value: Any) -> Any:
    """A config as JSON values; each nested config also names its class."""
    if is_dataclass(value):
        return {"class": type(value).__name__} | {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def installed_version(package: str) -> str | None:
    """The installed version of a package, without importing it; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
