"""The command line that all benches share: options, --help, exit codes, and the versions that a result names.

Exit codes: 0 done, 1 a run or its audit failed, 2 bad options, 130 Ctrl-C.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.command_line import Given
from pipeline.config_json import installed_version
from pipeline.errors import ConfigError
from pipeline.make_run_config import convert
from pipeline.options import Option
from pipeline.version import VERSION
from shm.errors import HeadwayError


def run_command(
    arguments: Sequence[str] | None, help_text: Callable[[], str], bench: Callable[[list[str]], None]
) -> int:
    """Show help or run the bench with `arguments` (those of the process if None); returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if {"--help", "-h"} & set(arguments):
            print(help_text())
        else:
            bench(arguments)
        sys.stdout.flush()
        return 0
    except ConfigError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except HeadwayError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output is gone (`… | head`): nothing is left to say, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def help_page(doc: str, known: Mapping[str, Option], defaults: Mapping[str, Any]) -> str:
    """The bench's own docstring, then each option with its default."""
    width = max(len(option.flag) for option in known.values()) + 2
    lines = [doc.strip(), "", "Options"]
    lines += [f"  {o.flag:<{width}}{o.meaning} (default: {defaults[name]})" for name, o in known.items()]
    return "\n".join(lines)


def option_values(given: Mapping[str, Given], known: Mapping[str, Option], minima: Mapping[str, int]) -> dict[str, Any]:
    """The values that the user gave, by name. Raises ConfigError for one of the wrong type, or below its minimum."""
    values = {name: convert(known[name], item) for name, item in given.items()}
    for name, minimum in minima.items():
        if name in values and values[name] < minimum:
            raise ConfigError(f"{known[name].flag} is {values[name]}; it must be at least {minimum}.")
    return values


def versions() -> dict[str, str | None]:
    """Of what a result was measured with."""
    return {"headway": VERSION, "torch": installed_version("torch"), "python": sys.version.split()[0]}
