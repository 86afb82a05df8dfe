"""`headway data`: what it tells of files, and of those that can't be used."""

import json
import subprocess
from pathlib import Path

import pytest

from bench.small_models import write_small_model
from pipeline.commands import cli

CASES = Path(__file__).parent.parent / "data" / "cases"


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [
        {"id": "a", "prompt": "one", "answer": 7},
        {"id": "a", "prompt": "three", "answer": "7"},
        {"id": "b", "prompt": "three", "answer": None, "tags": []},
        {"id": "b", "prompt": "three", "answer": None, "tags": []},
        {"prompt": "three", "answer": 0.5, "tags": ["x", "y"], "more": {"a": True}, "ok": False, "odd\x1b[1m": 1},
    ]
    (tmp_path / "good.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "one.csv").write_text("prompt\nx\n")
    (tmp_path / "bad.jsonl").write_text('{"prompt": ""}\n')
    return tmp_path


def told(capsys, *words):
    code = cli.main(["data", *words])
    said = capsys.readouterr()
    return code, said.out.splitlines(), said.err.splitlines()


def test_every_field_is_told_with_its_kinds(files, capsys):
    assert told(capsys, "good.jsonl", "one.csv", "--prompt-field", "prompt") == (
        0,
        [
            "good.jsonl: 5 rows (JSON Lines)",
            "  id            text (1 character); not in 1 row",
            "  prompt        text (3 to 5 characters)",
            "  answer        null 2, whole number 1, text 1 (1 character), number 1",
            "  tags          list (0 to 2 items); not in 2 rows",
            "  more          object; not in 4 rows",
            "  ok            true/false; not in 4 rows",
            "  'odd\\x1b[1m'  whole number; not in 4 rows",
            "  2 rows with the id of an earlier one",
            "  1 row equal to an earlier one",
            "one.csv: 1 row (CSV)",
            "  prompt  text (1 character)",
        ],
        [],
    )


def test_values_that_no_file_holds_are_told_of_too(files, capsys):
    (files / "mine.py").write_text("def rows():\n    return [{'image': b'x', 'pair': (1, 2), 3: 4}]\n")
    expected = ["mine.py:rows: 1 row (function)", "  image  bytes", "  pair   list (2 items)", "  3      whole number"]
    assert told(capsys, "mine.py:rows") == (0, expected, [])


def test_file_that_can_not_be_used_is_one_sentence_and_the_others_are_told(files, capsys):
    code, out, err = told(capsys, "bad.jsonl", "one.csv", "gone.jsonl", "--prompt-field", "prompt")
    assert code == 2 and out[0] == "one.csv: 1 row (CSV)" and len(err) == 2
    assert err[0].startswith("headway: bad.jsonl: line 1 has an empty prompt ('prompt' is ''). ")
    assert "say with --allow-empty-prompts that it may be empty" in err[0]
    assert err[1].startswith("headway: gone.jsonl does not exist.")
    assert told(capsys, "bad.jsonl", "--prompt-field=prompt", "--allow-empty-prompts")[0] == 0


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "headway data needs a file of rows"),
        (["one.csv", "--promt-field", "x"], "--promt-field is no option. Did you mean --prompt-field?"),
        (["one.csv", "--allow-empty-prompts", "maybe"], "--allow-empty-prompts is 'maybe'; write true"),
        (["one.csv", "--allow-empty-prompts"], "--allow-empty-prompts has no effect without a --prompt-field"),
        (["one.csv", "--id-field", "prompt", "two.csv"], "'two.csv' is not an option"),
    ],
)
def test_bad_options_are_refused(files, capsys, words, part):
    code, out, err = told(capsys, *words)
    assert code == 2 and out == [] and len(err) == 1 and part in err[0]


def test_help_lists_the_options(capsys):
    code, out, _ = told(capsys, "--help")
    assert code == 0 and all(any(name in line for line in out) for name in ("--prompt-field", "--id-field", "Parquet"))


def test_run_on_rows_without_prompts_is_refused_before_any_process_starts(files, capsys, monkeypatch):
    """HR07."""

    def start(*words, **options):
        raise AssertionError(f"{words} was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    write_small_model(files / "model")
    (files / "score.py").write_text("def score(text, row):\n    return 0.0\n")
    data = str(CASES / "HR07" / "missing_field.jsonl")
    words = ["--model", "model", "--data", data, "--prompt-field", "prompt", "--answer-field", "answer"]
    assert cli.main(["run", *words, "--reward", "score.py:score", "--steps", "1", "--run-dir", "run"]) == 2
    said = capsys.readouterr().err
    assert f"{data}: 3 lines can't be used: line 2 has no field 'prompt'" in said
    assert "line 3 has an empty prompt" in said and "line 4 has no field 'answer'" in said
    assert not (files / "run").exists()


def test_directory_that_was_deleted_is_told(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    code, out, err = told(capsys, "good.jsonl")
    monkeypatch.chdir(tmp_path)
    assert (code, out) == (2, []) and len(err) == 1 and "The current directory has been deleted" in err[0]
