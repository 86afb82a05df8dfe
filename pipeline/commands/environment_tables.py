"""`[[environment]]` tables of a TOML file: several environments, each with its rows, that one run mixes by weight."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pipeline.commands.arguments import Given
from pipeline.commands.option_values import as_written, convert
from pipeline.commands.options import EXPOSED, option_table, text_of
from pipeline.commands.workload_config import EnvironmentTable, WorkloadConfig
from pipeline.commands.workload_options import absolute_sources
from pipeline.errors import ConfigError
from pipeline.wording import suggestion
from shm.errors import HeadwayError

MIX = "environment"  # the key of the tables
OF_ENVIRONMENT = {spec.name for spec in fields(EnvironmentTable)}
# Its own, then those of a run's that are an environment's.
TABLE_FIELDS = ("name", "weight", *(name for name in dict(EXPOSED)[WorkloadConfig] if name in OF_ENVIRONMENT))
TABLE_OPTIONS = option_table(((EnvironmentTable, TABLE_FIELDS),))


def read_tables(found: Any, path: Path) -> tuple[EnvironmentTable, ...]:
    """Of the file at `path`, what its key `environment` holds. Raises ConfigError naming table and key."""
    if not isinstance(found, list) or not found or not all(isinstance(table, dict) for table in found):
        raise ConfigError(f"environment in {path} is no table; write each environment as a table [[environment]].")
    tables = tuple(_read_table(table, f"[[environment]] {number} of {path}") for number, table in enumerate(found, 1))
    names = [table.called for table in tables]
    for number, name in enumerate(names, 1):
        if name in names[: number - 1]:
            first = names.index(name) + 1
            raise ConfigError(
                f"[[environment]] {first} and {number} of {path} are both called {name!r}; give one another name."
            )
    return tables


def tables_table() -> str:
    """docs/options.md's table of their keys."""
    rows = ["| key of `[[environment]]` | default | meaning |", "| --- | --- | --- |"]
    rows += [f"| `{one.name}` | {text_of(one.default)} | {one.meaning} |" for one in TABLE_OPTIONS.values()]
    return "\n".join(rows)


def _read_table(table: Mapping[str, Any], where: str) -> EnvironmentTable:
    for key in table:
        if key not in TABLE_OPTIONS:
            raise ConfigError(f"{key} in {where} is no key of an environment.{suggestion(key, TABLE_OPTIONS)}")
    given = {key: Given(value, f"{key} in {where}", typed=True) for key, value in table.items()}
    values = {TABLE_OPTIONS[key].field: convert(TABLE_OPTIONS[key], item) for key, item in given.items()}
    try:
        return EnvironmentTable(**values | absolute_sources(values))
    except HeadwayError as error:
        named = {key: Given(None, f"{key} in {where}", typed=True) for key in TABLE_OPTIONS}
        raise ConfigError(as_written(str(error), named, TABLE_OPTIONS)) from error
