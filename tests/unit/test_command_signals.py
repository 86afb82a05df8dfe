"""A signal before a run has its own way with signals ends the command, whatever becomes of what it raises."""

import asyncio
import contextlib
import os
import signal

import pytest

from pipeline.commands import cli
from pipeline.commands.signals import Signals, end_by_signals, signal_that_came
from pipeline.errors import ConfigError

CODES = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.getsignal(number) for number, _ in CODES}
    for number in before:  # which the tests, too, may have been started deaf to
        signal.signal(number, signal.SIG_DFL)
    yield
    end_by_signals()  # what came is forgotten
    for number, handler in before.items():
        signal.signal(number, handler)


async def send(number):
    """To this thread, and let the loop hear of it, in a few ticks."""
    signal.raise_signal(number)
    for _ in range(10):
        await asyncio.sleep(0)


def let_through(number):
    os.kill(os.getpid(), number)
    raise AssertionError("the signal has raised")


def swallow(number):
    """As a bare `except` does."""
    with contextlib.suppress(BaseException):
        let_through(number)
    return 0


def swallow_in_destructor(number):
    """Python prints what a destructor raises, and goes on."""

    class Dying:
        def __del__(self):
            let_through(number)

    Dying()
    return 0


def wrap(number):
    """As `type` does with what `__set_name__` raises, and a package with what its own import raises."""
    try:
        let_through(number)
    except BaseException as error:
        raise RuntimeError("wrapped") from error


def refuse(number):
    """As what reads users' code does with whatever it raises."""
    try:
        let_through(number)
    except BaseException as error:
        raise ConfigError("The environment can't be made.") from error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("number", "code"), CODES)
@pytest.mark.parametrize("meets", [let_through, swallow, swallow_in_destructor, wrap, refuse])
def test_signal_ends_the_command_whatever_it_meets(monkeypatch, capsys, meets, number, code):
    monkeypatch.setattr(cli, "_command", lambda _: meets(number))
    assert cli.main(["clean"]) == code
    assert capsys.readouterr().out == ""
    assert signal.getsignal(number) is signal.SIG_IGN  # the outcome is decided


def test_run_is_not_begun_after_a_signal_that_was_swallowed():
    class Run:
        def request_stop(self):
            raise AssertionError("there is nothing to end in order")

    async def begin():
        return Signals(Run())

    end_by_signals()
    swallow(signal.SIGTERM)
    assert signal_that_came() == signal.SIGTERM
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(begin())
    end_by_signals()  # the next command begins anew
    assert asyncio.run(begin()).received is None


@pytest.mark.parametrize(("number", "code"), CODES)
def test_a_closing_terminal_asks_as_often_as_it_likes(monkeypatch, number, code):
    """The shell and the kernel each send SIGHUP. A second SIGINT or SIGTERM would end these tests."""

    def close_terminal(_):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(number)
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)

    monkeypatch.setattr(cli, "_command", close_terminal)
    assert cli.main(["clean"]) == code


@pytest.mark.parametrize(("number", "code"), CODES)
def test_a_run_ends_at_once_by_a_second_signal_that_is_no_sighup(number, code):
    asked = []

    class Run:
        def request_stop(self):
            asked.append(number)

    async def run():
        signals = Signals(Run())
        for one in (signal.SIGHUP, signal.SIGHUP, number):
            await send(one)
        return signals.received

    if number == signal.SIGHUP:
        assert asyncio.run(run()) == signal.SIGHUP
    else:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(run())
    assert len(asked) == 1


@pytest.mark.parametrize(("number", "code"), CODES)
def test_a_signal_that_the_command_was_started_deaf_to_changes_nothing(monkeypatch, number, code):
    """As under nohup, or behind `&` in a script."""

    async def run():
        signals = Signals(None)
        await send(number)
        return signals.received

    def command(_):
        signal.raise_signal(number)
        assert asyncio.run(run()) is None
        return 0

    signal.signal(number, signal.SIG_IGN)
    monkeypatch.setattr(cli, "_command", command)
    assert cli.main(["clean"]) == 0 and signal_that_came() is None
    assert signal.getsignal(number) is signal.SIG_IGN


@pytest.mark.parametrize(("number", "code"), CODES)
def test_signal_while_the_outcome_is_told_changes_nothing(monkeypatch, capsys, number, code):
    def tell(error, exit_code):
        os.kill(os.getpid(), number)
        print(error)
        return exit_code

    monkeypatch.setattr(cli, "_command", lambda _: refuse_now())
    monkeypatch.setattr(cli, "_fail", tell)
    assert cli.main(["clean"]) == 2
    assert capsys.readouterr().out == "no such option\n"


def refuse_now():
    raise ConfigError("no such option")


def test_a_closed_stdout_is_no_error(monkeypatch):
    monkeypatch.setattr(cli, "_command", lambda _: 0)
    monkeypatch.setattr("sys.stdout", None)
    assert cli.main(["--version"]) == 0


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit()])
def test_what_ends_python_otherwise_passes(monkeypatch, error):
    def fail(_):
        raise error

    monkeypatch.setattr(cli, "_command", fail)
    with pytest.raises(type(error)):
        cli.main(["clean"])
