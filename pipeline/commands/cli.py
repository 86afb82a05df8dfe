"""The command line: `headway COMMAND …`, and what run.py calls. It ends in an exit code and at most one sentence.

Exit codes: 0 done, 1 the run failed or the audit found something, 2 bad options, 129 SIGHUP (the terminal
was closed), 130 Ctrl-C, 143 SIGTERM.
"""

import contextlib
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from pipeline import audit
from pipeline.commands.data import DATA_HELP, check_data
from pipeline.commands.eval_config import eval_help
from pipeline.commands.export import export
from pipeline.commands.make_eval_config import parse_eval
from pipeline.commands.make_run_config import parse
from pipeline.commands.option_values import as_written
from pipeline.commands.options import help_text
from pipeline.commands.resume import Resume, is_resume, parse_resume
from pipeline.commands.run_config import RunConfig
from pipeline.commands.signals import EXIT_CODES, end_by_signals, ignore_signals, signal_that_came
from pipeline.errors import ConfigError, ConfigTypeError
from pipeline.run_dir.run_files import EVENTS, is_run_directory
from pipeline.version import VERSION
from pipeline.wording import suggestion
from shm.errors import HeadwayError
from workers.machine.limits import refusal_in_words

USAGE = """Usage: headway COMMAND …

  headway run [--OPTION VALUE …]   train; the same as python run.py, --help lists the options
  headway eval DIR|RUN_DIR [--OPTION VALUE …]
                                   measure a model, or a run's newest checkpoint, without training; --help lists the
                                   options
  headway data FILE… [--OPTION VALUE …]
                                   check files of rows as a run does, and tell what they hold; --help lists the options
  headway audit RUN_DIR            prove from a run's events.jsonl that its bound held
  headway export RUN_DIR OUT_DIR   write a run's weights as a model directory that transformers loads
  headway clean [RUN_DIR…]         remove what runs that were killed have left
  headway --version"""

AUDIT_HELP = """Usage: headway audit RUN_DIR

Prove from a run's events.jsonl that its bound held, that each group was trained once, and that every token is accounted
for; exit code 1 when it finds something."""

EXPORT_HELP = """Usage: headway export RUN_DIR OUT_DIR

Write a run's newest checkpoint, or the one that is named (RUN_DIR/checkpoints/version-N), as a model directory that
transformers loads. OUT_DIR is new, or empty."""

COMMANDS = ("run", "eval", "data", "audit", "export", "clean", "--help", "--version")
LATER_COMMANDS = ("report", "top")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code, and raises only a SystemExit that isn't ours."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        end_by_signals()
        warnings.showwarning = _show_warning
        code = _command(arguments)
        if sys.stdout is not None:  # Python found it closed
            sys.stdout.flush()
        ignore_signals()  # from here on the outcome is decided
    except BaseException as error:
        ignore_signals()
        if signal_that_came() is None:
            code = _code_of(error)
    if (number := signal_that_came()) is not None:  # whatever became of what it has raised
        return EXIT_CODES[number]
    return code


def _code_of(error: BaseException) -> int:
    """The exit code for a command that has raised `error`, told in one sentence."""
    match error:
        case ConfigError() | ConfigTypeError():
            return _fail(as_written(str(error), {}), 2)
        case HeadwayError():
            return _fail(as_written(str(error), {}), 1)  # the library names its options as Python does
        case BrokenPipeError():
            # The reader of our output is gone (`headway … | head`): nothing is left to say, not even at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        case OSError() | MemoryError() if (limit := refusal_in_words(error)) is not None:
            return _fail(limit, 1)
        case Exception():  # the outermost frame: a bug of ours must not end in a page of stack trace
            return _fail_by_bug(error)
        case _:
            raise error


def _command(arguments: list[str]) -> int:
    match arguments:
        case [] | ["--help" | "-h" | "help", *_]:
            print(USAGE)
            return 0
        case ["--version"]:
            print(f"headway {VERSION}")
            return 0
        case ["run", *options]:
            return _run(options)
        case ["eval", *options]:
            return _eval(options)
        case ["data", *rest]:
            return _data(rest)
        case ["audit", *rest]:
            return _audit(rest)
        case ["export", *rest]:
            return _export(rest)
        case ["clean", *rest]:
            return _clean(rest)
        case [word, *_]:
            if word in LATER_COMMANDS:
                raise ConfigError(f"headway {word} isn't built yet.")
            raise ConfigError(f"headway has no command {word!r}.{suggestion(word, COMMANDS)} headway --help lists all.")
    raise AssertionError("every list of arguments matches a case above")


def _run(options: list[str]) -> int:
    if {"--help", "-h"} & set(options):
        print(help_text())
        return 0
    _find_modules_here()
    if is_resume(options):
        return _resume(options)
    return _launch(parse(options))


def _resume(options: list[str]) -> int:
    resume = parse_resume(options)
    if resume.looks_complete:  # then a job that is started again and again needs neither torch nor its data
        print(resume.nothing_to_do)
        return 0
    return _launch(resume.config, resume)


def _eval(options: list[str]) -> int:
    if {"--help", "-h"} & set(options):
        print(eval_help())
        return 0
    _find_modules_here()
    config = parse_eval(options)
    from pipeline.commands.evaluate import evaluate  # here for the same reason as in `_launch`

    return evaluate(config)


def _data(arguments: list[str]) -> int:
    if {"--help", "-h"} & set(arguments):
        print(DATA_HELP)
        return 0
    _find_modules_here()
    return check_data(arguments)


def _audit(arguments: list[str]) -> int:
    if {"--help", "-h"} & set(arguments):
        print(AUDIT_HELP)
        return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ConfigError("headway audit needs one run directory: headway audit RUN_DIR.")
    if not is_run_directory(arguments[0]):
        raise ConfigError(f"{arguments[0]} holds no {EVENTS}; name the directory of a run.")
    return audit.main(os.path.join(arguments[0], EVENTS))


def _export(arguments: list[str]) -> int:
    if {"--help", "-h"} & set(arguments):
        print(EXPORT_HELP)
        return 0
    if len(arguments) != 2 or any(word.startswith("-") for word in arguments):
        raise ConfigError("headway export needs a run and a new directory: headway export RUN_DIR OUT_DIR.")
    print(export(*arguments))
    return 0


def _clean(arguments: list[str]) -> int:
    from pipeline.commands.clean import CLEAN_HELP, clean  # here for the same reason as in `_launch`

    if {"--help", "-h"} & set(arguments):
        print(CLEAN_HELP)
        return 0
    return clean(arguments)


def _find_modules_here() -> None:
    """Options may name modules that lie in the current directory. Raises ConfigError if that is gone."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        raise ConfigError("The current directory has been deleted; change to one that is there.") from None
    if here not in sys.path:
        sys.path.append(here)


def _launch(config: RunConfig, resume: Resume | None = None) -> int:
    # Here and not at the top: the supervisor's side takes long to load, and bad options are answered at once.
    from pipeline.commands.launch import run

    return run(config, resume)


def _show_warning(message: Warning | str, *_: object) -> None:
    """One line, as errors are: where in our code it was raised means nothing to a user."""
    with contextlib.suppress(OSError):  # that nobody reads it must not break what is warned of
        print(f"headway: warning: {' '.join(str(message).split())}", file=sys.stderr)


def _fail(sentence: str, code: int) -> int:
    print(f"headway: {' '.join(sentence.split())}", file=sys.stderr)
    return code


def _fail_by_bug(error: Exception) -> int:
    """Exit 1 with one sentence; the stack trace goes to a file."""
    path = Path(tempfile.gettempdir(), f"headway-error-{os.getpid()}.txt")
    try:
        path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        kept = f"the stack trace is in {path}"
    except OSError as unwritable:
        kept = f"the stack trace could not be written to {path} ({unwritable.strerror})"
    return _fail(f"ended by an error of its own, {type(error).__name__}: {error}; {kept}.", 1)
