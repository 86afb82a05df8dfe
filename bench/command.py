"""The command line that all benches share: options, --help, exit codes, where the runs go, and what a result says.

Exit codes: 0 done, 1 a run or its audit failed, 2 bad options, 130 Ctrl-C.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pipeline.commands.arguments import read_arguments
from pipeline.commands.option_values import as_written, convert
from pipeline.commands.options import OPTIONS, Option
from pipeline.commands.run_config import RunConfig
from pipeline.errors import ConfigError
from pipeline.run_dir.config_json import installed_version
from pipeline.run_dir.run_directory import check_run_dir
from pipeline.version import VERSION
from shm.errors import HeadwayError

UNSET = {"samplers": "one", "out": "a temporary directory"}  # what --help says of a default that is None


def run_command(arguments: Sequence[str], help_text: Callable[[], str], act: Callable[[list[str]], None]) -> int:
    """Show help or act on `arguments`; returns the exit code."""
    try:
        if {"--help", "-h"} & set(arguments):
            print(help_text())
        else:
            act(list(arguments))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCommand:
    """One bench as a command. Its options are the fields of its plan, a dataclass with a default for each, in the order
    of --help; those of run.py mean what they mean there.

    own: (type, meaning) of the options that run.py has not. minima: the least value of a number. configs(plan): of
    every run, made before anything starts; a plan with `out` makes their directories below it.
    """

    doc: str
    plan: type
    own: Mapping[str, tuple[type, str]]
    minima: Mapping[str, int]
    configs: Callable[[Any], list[RunConfig]]
    bench: Callable[[Any], None]

    @property
    def options(self) -> dict[str, Option]:
        options = {}
        for field in fields(self.plan):
            if field.name in self.own:
                kind, meaning = self.own[field.name]
                options[field.name] = Option(field.name, self.plan, field.name, kind, False, meaning, field.default)
            else:
                options[field.name] = OPTIONS[field.name]
        return options

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Show help or run the bench with `arguments` (those of the process if None); returns its exit code."""
        arguments = list(sys.argv[1:] if arguments is None else arguments)
        return run_command(arguments, self.help_text, lambda given: self.bench(self.parse(given)))

    def parse(self, arguments: Sequence[str]) -> Any:
        """The plan. Raises ConfigError, before anything starts, for whatever run.py would refuse too."""
        options = self.options
        given = read_arguments(arguments, list(options), {})
        values = {name: convert(options[name], item) for name, item in given.items()}
        for name, minimum in self.minima.items():
            if name in values and values[name] < minimum:
                raise ConfigError(f"{options[name].flag} is {values[name]}; it must be at least {minimum}.")
        plan = self.plan(**values)
        try:
            configs = self.configs(plan)
        except HeadwayError as error:
            raise ConfigError(as_written(str(error), given)) from error
        if getattr(plan, "out", None) is not None:
            for config in configs:
                check_run_dir(config.run_dir, "--out")
        return plan

    def help_text(self) -> str:
        """The bench's own docstring, then each option with its default."""
        defaults = {field.name: field.default for field in fields(self.plan)}
        width = max(len(option.flag) for option in self.options.values()) + 2
        lines = [self.doc.strip(), "", "Options"]
        for name, option in self.options.items():
            default = UNSET[name] if defaults[name] is None else defaults[name]
            lines.append(f"  {option.flag:<{width}}{option.meaning} (default: {default})")
        return "\n".join(lines)


@contextmanager
def run_root(out: str | None) -> Iterator[Path]:
    """Where the runs' directories are made: `out`, or a temporary one that is gone afterwards."""
    if out is not None:
        yield Path(out)
        return
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as root:
        yield Path(root)


def result_head(name: str, plan: Any) -> dict[str, Any]:
    """What every result says of itself: the bench, its options, and what it was measured with."""
    return {
        "bench": name,
        "options": {option: value for option, value in asdict(plan).items() if option != "out"},
        "cores": os.cpu_count(),
        "versions": {"headway": VERSION, "torch": installed_version("torch"), "python": sys.version.split()[0]},
    }
