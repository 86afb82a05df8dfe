"""Reading options: `--name value` pairs and flat TOML files, as names and raw values with where each stood."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import ConfigError
from pipeline.wording import suggestion


class Given(NamedTuple):
    """One value that the user gave."""

    value: Any
    where: str  # how errors name it: `--lr`, or `lr (in recipe.toml)`
    typed: bool  # False: text of the command line, still to be parsed


def read_arguments(
    arguments: Sequence[str], known: Sequence[str], later: Mapping[str, str], flags: Sequence[str] = ()
) -> dict[str, Given]:
    """`--max-staleness 2` or `--max-staleness=2`, … -> {"max_staleness": Given("2", …)}. Raises ConfigError.

    later: names of options that aren't built yet, with a sentence on what to do instead. flags: those that mean "true"
    when they stand without a value.
    """
    given: dict[str, Given] = {}
    unknown: list[str] = []
    rest = list(arguments)
    while rest:
        flag, has_value, value = rest.pop(0).partition("=")
        if not flag.startswith("--") or flag == "--":
            raise ConfigError(f"{flag!r} is not an option; options are written --name value, and --help lists them.")
        name = flag[2:].replace("-", "_")
        if name in later:
            raise ConfigError(f"{flag} isn't built yet: {later[name]}.")
        if name not in known or "_" in flag:
            dashed = ["--" + other.replace("_", "-") for other in known]
            unknown.append(f"{flag} is no option.{suggestion(flag.replace('_', '-'), dashed)}")
            if not has_value and rest and not rest[0].startswith("--"):
                rest.pop(0)  # what may be its value
            continue
        if not has_value:
            is_bare = not rest or rest[0].startswith("--")
            if is_bare and name not in flags:
                raise ConfigError(f"{flag} needs a value: write {flag} VALUE.")
            value = "true" if is_bare else rest.pop(0)
        if not value:
            raise ConfigError(f"{flag} is empty; give it a value, or leave it out.")
        if name in given:
            raise ConfigError(f"{flag} is given twice, as {given[name].value!r} and {value!r}; keep one.")
        given[name] = Given(value, flag, typed=False)
    _refuse(unknown)
    return given


def _refuse(unknown: Sequence[str]) -> None:
    """All at once: who has mistyped one name may have mistyped others."""
    if unknown:
        raise ConfigError(f"{' '.join(unknown)} --help lists all.")


def read_toml(
    path: Path, known: Sequence[str], later: Mapping[str, str], tables: Sequence[str] = ()
) -> dict[str, Given]:
    """A TOML file of `name = value` lines. Raises ConfigError naming the file, and the key or line.

    tables: names among `known` whose value may be a table.
    """
    if path.exists() and not path.is_file():  # a pipe or a device may never end
        raise ConfigError(f"--config {path} is no file; name a TOML file.")
    try:
        # A byte-order mark, which some editors write, is no part of the first name.
        table = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"--config {path} can't be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--config {path} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}."
        ) from error
    except (ValueError, RecursionError) as error:  # also what tomllib lets through: numbers or nesting without end
        raise ConfigError(f"--config {path} is not valid TOML: {error}.") from error
    unknown = []
    for name, value in table.items():
        if name in later:
            raise ConfigError(f"{name} in {path} isn't built yet: {later[name]}.")
        if isinstance(value, dict) and name not in tables:
            raise ConfigError(f"{path} has a table [{name}]; options stand at the top, as name = value.")
        if name not in known:
            unknown.append(f"{name} in {path} is no option.{suggestion(name, known)}")
    _refuse(unknown)
    return {name: Given(value, f"{name} (in {path})", typed=True) for name, value in table.items()}
