"""What users' code says of itself before any worker starts: in a process of its own, each mistake one sentence."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from probed import Raises, Search

import pipeline as rl
from pipeline.user_code import description, probe
from pipeline.user_code.description import collect_rows, describe, rows_at
from pipeline.user_code.probe import EnvDescription, call_rows, describe_environment, describe_environments, env_rows

FILE = str(Path(__file__).with_name("probed.py"))


def source(name, arguments=None):
    return rl.EnvSource(f"{FILE}:{name}", arguments or {})


def test_environment_says_what_it_is_in_a_process_of_its_own(capfd):
    found = describe_environment(source("Search", {"size": 2, "word": "x"}), seed=5)
    rows = [{"word": "x", "seed": 5, "pair": [index, True]} for index in range(2)]
    assert found == EnvDescription("Search", ["search"], "stateless", rows)
    said = capfd.readouterr()
    assert said.out == ""  # what it prints is not our output
    assert "made in" in said.err and f"made in {os.getpid()}" not in said.err
    assert "without torch" in said.err and "closed" in said.err


def test_mix_is_imported_in_one_process_and_told_by_name(capfd):
    mix = rl.EnvSource({"a": f"{FILE}:Search", "b": "probed:Search"}, {"a": {"size": 1}})
    found = describe_environments(mix)
    assert [(name, len(told.rows)) for name, told in found.items()] == [("a", 1), ("b", 2)]
    made_in = {line for line in capfd.readouterr().err.splitlines() if line.startswith("made in")}
    assert len(made_in) == 1


def test_class_that_no_other_process_can_import_is_asked_here(capfd):
    class Inside(Search):
        pass

    assert describe_environment(rl.EnvSource(Inside, {"size": 1}), seed=1).rows[0]["seed"] == 1
    assert f"made in {os.getpid()}" in capfd.readouterr().out
    assert [row["environment"] for row in env_rows({"one": Inside, "two": Inside}, {"two": {"size": 1}})] == [
        "one",
        "one",
        "two",
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "error", "fault"),
    [
        ("Serch", {}, rl.ConfigError, "has no 'Serch'. Did you mean Search?"),
        ("Raises", {}, rl.ConfigError, r"Raises\(\) failed: .*probed.py line \d+: KeyError: 'no\\nkey'. Correct it."),
        ("Half", {}, rl.ConfigError, r"^half of a pair: \?$"),  # no message carries what stood there
    ],
)
def test_what_the_process_finds_wrong_is_raised_here(name, arguments, error, fault):
    with pytest.raises(error, match=fault) as raised:
        describe_environment(source(name, arguments))
    assert "\n" not in str(raised.value)


def test_process_that_leaves_others_behind_takes_them_along(tmp_path):
    found = describe_environment(source("Stays", {"pid_file": str(tmp_path / "pid")}))
    assert found.name == "Stays" and found.rows is None
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_process_that_hangs_is_ended_and_named(tmp_path):
    hangs = source("Hangs", {"pid_file": str(tmp_path / "pid")})
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(rl.ConfigError, match=r"The environment .*probed.py:Hangs has not come up within 0.5 s"):
        describe_environment(hangs, timeout=0.5)
    assert {child.pid for child in psutil.Process().children()} <= before


def test_long_wait_is_told_of(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(probe, "REPORT_SECONDS", 0.1)
    with pytest.raises(rl.ConfigError, match="has not come up"):
        describe_environment(source("Hangs", {"pid_file": str(tmp_path / "pid")}), timeout=0.5)
    said = capsys.readouterr().err.splitlines()
    assert said and all(
        re.search(r"^waiting for the environment .*:Hangs to come up: \d+ s so far$", line) for line in said
    )


def test_rows_that_nobody_wants_are_not_made():
    assert describe_environment(source("Search", {"size": 2, "word": "x"}), with_rows=False).rows is None
    mix = rl.EnvSource(
        {"a": f"{FILE}:Search", "b": f"{FILE}:Search"}, {name: {"size": 2, "word": "x"} for name in "ab"}
    )
    found = describe_environments(mix, seed=3, without_rows=["a"])
    assert found["a"].rows is None and len(found["b"].rows) == 2


def test_process_that_dies_is_told_of_with_its_end():
    with pytest.raises(rl.ConfigError, match=r"probed.py:Dies can't be used: .* was killed by SIGABRT before it"):
        describe_environment(source("Dies"))


def test_process_dies_with_the_one_that_asks(tmp_path):
    code = (
        "import pipeline as rl, sys; from pipeline.user_code.probe import describe_environment;"
        "describe_environment(rl.EnvSource(sys.argv[1], {'pid_file': sys.argv[2]}))"
    )
    asking = subprocess.Popen([sys.executable, "-c", code, f"{FILE}:Hangs", str(tmp_path / "pid")])
    try:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    finally:
        asking.kill()
        asking.wait()
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_rows_come_from_a_function_by_its_path():
    rows = [{"prompt": "a", "answer": 7}, {"prompt": "b", "answer": None}]
    assert call_rows("probed:rows") == rl.load_rows(f"{FILE}:rows", prompt_field="prompt") == rows
    with pytest.raises(rl.ConfigError, match="question"):
        rl.load_rows("probed:rows", prompt_field="question")
    for path, fault in (("rows", "The data is 'rows'"), ("no/such.py:rows", "is not there")):
        with pytest.raises(rl.ConfigError, match=fault):
            call_rows(path)


@pytest.mark.parametrize("name", ["GeneratorExit", "Own"])
def test_what_is_no_exception_like_others_is_named_all_the_same(name):
    with pytest.raises(rl.ConfigError, match=rf"probed:raise_{name} failed: .*probed.py line \d+: {name}"):
        call_rows(f"probed:raise_{name}")


def test_rows_of_a_process_that_has_forked_come_once():
    assert call_rows("probed:rows_of_two") == [{"prompt": "a"}]


def test_rows_that_go_through_a_set_are_the_same_each_time(monkeypatch):
    found = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        found.append(call_rows("probed:rows_of_a_set"))
    assert found[0] == found[1] and len(found[0]) == 50


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("probed:NOT_A_FUNCTION", "The data probed:NOT_A_FUNCTION is int; name a function"),
        ("probed:row", "has no 'row'. Did you mean rows?"),
        ("os:getcwd", "os:getcwd gave str; it gives a list of rows"),
        ("os:getpid", "os:getpid gave int; it gives a list of rows"),
        ("os:listdir", "Of the rows of os:listdir, row 0 is"),
        ("probed:Raises", "probed:Raises failed: .*KeyError"),
        ("gc:get_threshold", "Of the rows of gc:get_threshold, row 0 is 700"),
    ],
)
def test_function_that_gives_no_rows_is_named(path, fault):
    with pytest.raises((rl.ConfigError, rl.ConfigTypeError), match=fault):
        rows_at(path)


def test_rows_are_counted_as_they_come(monkeypatch):
    def endless():
        while True:
            yield {"text": "x" * 1000}

    monkeypatch.setattr(description, "MAX_ANSWER_BYTES", 2**20)
    with pytest.raises(rl.ConfigError, match=r"f gave more than 1 MiB of rows, .* in its first 1,04\d"):
        collect_rows(endless(), "f")
    with pytest.raises(rl.ConfigError, match="f gave no rows"):
        collect_rows([], "f")

    def fails_late():
        yield {"a": 1}
        raise OSError("disk gone")

    with pytest.raises(rl.ConfigError, match="f failed: .*test_probe.py line .*OSError: disk gone"):
        collect_rows(fails_late(), "f")
    with pytest.raises(rl.ConfigTypeError, match=r"Of the rows of f, row 1 has \{1\} as its 'b'"):
        collect_rows([{"a": 1}, {"b": {1}}], "f")


def test_arguments_and_rows_are_found_wrong_by_name():
    with pytest.raises(rl.ConfigTypeError, match="Search takes .*unexpected keyword argument 'sise'"):
        describe(Search, {"sise": 3}, 0)
    with pytest.raises(rl.ConfigError, match="Raises.rows failed: .*SystemExit: no rows here"):
        describe(Raises, {"where": "rows"}, 0)
    assert describe(Raises, {"where": "close"}, 0)["rows"] is None  # what close raises is only logged


def test_method_that_is_called_rows_by_chance_is_named():
    class Table(Search):
        def rows(self):
            return 3

    with pytest.raises(rl.ConfigTypeError, match="Table.rows is no classmethod"):
        describe(Table, {}, 0)


def test_environment_without_rows_is_named():
    with pytest.raises(rl.ConfigError, match="The environment Guess brings no rows along"):
        env_rows("pipeline.tasks.guess:Guess")


def is_gone(pid):
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    return True


def wait_until(happened, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)
