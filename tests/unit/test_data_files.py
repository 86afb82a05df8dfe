"""What load_rows refuses whatever the format, and what it reads of JSON Lines, JSON and CSV."""

import gzip
import json
import os

import pytest

import pipeline as rl
from pipeline.data.data_file import text_lines


@pytest.fixture
def saved(tmp_path):
    """Writes text (or bytes) under a name; returns the path."""

    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def refusal(path, error=rl.ConfigError, **fields) -> str:
    with pytest.raises(error) as caught:
        rl.load_rows(path, **fields)
    return str(caught.value)


# --- files --------------------------------------------------------------------------------------------------------


def test_what_is_no_data_file_is_one_sentence(saved, tmp_path):
    saved("train.jsonl", "{}")
    assert refusal(tmp_path / "trian.jsonl").endswith("does not exist. Did you mean train.jsonl? Name a data file.")
    assert "is a directory, but not one that `datasets` saved" in refusal(tmp_path)
    assert "is empty (0 bytes)" in refusal(saved("a.jsonl", ""))
    assert "has the suffix '.txt', which tells no format; rows are read from .jsonl, " in refusal(saved("a.txt", "x"))
    assert "has no suffix, which tells no format" in refusal(saved("rows", "x"))
    assert "is compressed (.gz); unpack it" in refusal(saved("a.jsonl.gz", "x"))
    assert "is gzip-compressed, not a plain text file" in refusal(saved("b.jsonl", gzip.compress(b"{}")))
    assert "is UTF-16 text" in refusal(saved("c.json", "[]".encode("utf-16")))
    assert "is a Parquet file" in refusal(saved("d.csv", b"PAR1..."))
    assert "a file has no splits" in refusal(f"{saved('e.jsonl', '{}')}#train")
    os.mkfifo(tmp_path / "f.jsonl")
    assert "is no regular file" in refusal(tmp_path / "f.jsonl")
    assert "can't be read" in refusal("a\0b.jsonl")
    assert "can't be read: File name too long." in refusal("x" * 5000 + ".jsonl")
    assert "c.json/d.json can't be read: Not a directory." in refusal(tmp_path / "c.json" / "d.json")
    for path in (None, "", 3, b"a.jsonl", ["a.jsonl"]):
        assert "name a data file" in refusal(path, rl.ConfigTypeError)


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", "\n \n"), ("a.json", "[]"), ("a.csv", "a,b\n")])
def test_file_without_rows_is_refused(saved, name, content):
    assert "has no rows; give at least one" in refusal(saved(name, content))


# --- JSON Lines ---------------------------------------------------------------------------------------------------


def test_lines_end_as_they_like_and_blank_ones_hold_no_row(saved):
    path = saved("a.NDJSON", '{"a": 1}\r\n\n  \t\r\n {"a": 2} \n{"a": 3}')
    assert rl.load_rows(path) == [{"a": 1}, {"a": 2}, {"a": 3}]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 1}}', "has the field 'c' twice"),
        ('{"a": NaN}', "holds NaN, which is no JSON"),
        ('{"a": [-Infinity]}', "holds -Infinity, which is no JSON"),
        ('{"a": 1} {"a": 2}', "goes on after its first value, at character 10"),
        ('{"a": 1', "is not valid JSON: Expecting ',' delimiter, character 8"),
        ("{'a': 1}", "is not valid JSON: Expecting property name enclosed in double quotes, character 2"),
        ('{"a": "x\ty"}', "is not valid JSON: Invalid control character at, character 9"),
        ("[1]", "is [1], not an object"),
        ("null", "is None, not an object"),
        ('{"a": ' + "[" * 100 + "]" * 100 + "}", "has a value nested too deep as its 'a' (at most 100 levels)"),
        ("[" * 100_000, "is nested too deep"),
    ],
)
def test_line_that_is_no_row_is_refused_with_its_number(saved, line, part):
    said = refusal(saved("a.jsonl", '{"a": 1}\n\n' + line + '\n{"a": 2}\n'))
    assert f"a.jsonl: line 3 {part}" in said and len(said) < 400


def test_rows_may_be_nested_as_deep_as_the_rule_says(saved):
    deep = '{"a": ' + "[" * 99 + "]" * 99 + "}"
    assert len(rl.load_rows(saved("a.jsonl", deep))) == 1


def test_file_that_grows_is_read_as_far_as_it_went_at_first(saved):
    """One that is written faster than it is read would have no end."""
    path = saved("grows.jsonl", '{"a": 1}\n{"a": 2}\n')
    found = []
    for line in text_lines(path):
        found.append(line)
        with open(path, "ab") as file:
            file.write(b'{"a": 3}\n')
    assert found == [b'{"a": 1}\n', b'{"a": 2}\n']


def test_torn_last_line_is_told_as_such(saved):
    assert "line 2 is not valid JSON" in refusal(saved("a.jsonl", '{"a": 1}\n{"a": '))
    assert "as when a copy was cut short" in refusal(saved("a.jsonl", '{"a": 1}\n{"a": '))


def test_json_called_json_lines_is_told_as_such(saved):
    assert "give it the suffix .json." in refusal(saved("a.jsonl", '[\n{"a": 1}\n]\n'))


def test_first_ten_bad_lines_are_listed_and_the_others_counted(saved):
    path = saved("a.jsonl", "".join(f'{{"a": {"1" if number % 2 else "x"}}}\n' for number in range(1, 1001)))
    said = refusal(path)
    assert said.startswith(f"{path}: 500 lines can't be used: line 2 is not")
    assert "line 20 is" in said and "line 22" not in said and "; and 490 more. " in said
    path.write_text(path.read_text() + "3\n")
    assert refusal(path).endswith("; and 491 more. Correct what is written there.")  # nothing of what isn't listed


# --- JSON ---------------------------------------------------------------------------------------------------------


def test_json_is_one_list_of_objects(saved):
    rows = [{"a": 1, "b": [1.5, None]}, {"a": "x"}, {}]
    assert rl.load_rows(saved("a.json", json.dumps(rows))) == rows
    assert rl.load_rows(saved("b.json", "\n" + json.dumps(rows, indent=2) + "\n\n")) == rows


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"data": [{"a": 1}]}', "is an object whose field 'data' is a list: save that list alone"),
        ('{"a": 1}', "holds an object; a .json file of rows is one list of objects"),
        ('{"a": 1}\n{"a": 2}\n', "which is JSON Lines: give it the suffix .jsonl"),
        ("7", "holds 7; a .json file"),
        ("{", "holds no list, and its line 1 is not valid JSON"),
        ('[{"a": 1},\n {"a": }]', "line 2 is not valid JSON: Expecting value, character 8"),
        ('[{"a": 1}\n {"a": 2}]', "line 2 is not valid JSON: a comma or ] was expected, not '{' at character 2"),
        ('[{"a": 1},', "line 1 is not valid JSON: Expecting value"),
        ('[{"a": 1}', "line 1 is not valid JSON: a comma or ] was expected, not the end of the file"),
        ('[{"a": 1},]', "line 1 is not valid JSON: Expecting value, character 11"),
        ('[{"a": 1}]\n[]', "line 2 is not valid JSON: nothing may follow the list, not '['"),
        ('[{"a": 1},\n {"a": 2, "a": 3}]', "line 2 has the field 'a' twice"),
        ('[{"a": 1},\n 5]', "row 1 (line 2) is 5, not an object"),
        ('[{"a": 1},\n\n {"a": 1},\n {"a": 2},\n 5]', "row 3 (line 5) is 5, not an object"),
        ('[{"b": 1}, {"a": 1}, {"c": 1}]', "2 rows can't be used: row 0 (line 1) has no field 'a'"),
    ],
)
def test_json_that_is_no_list_of_objects_is_refused(saved, text, part):
    said = refusal(saved("a.json", text), answer_field="a")
    assert part in said and said.startswith(str(saved("a.json", text)))


# --- CSV ----------------------------------------------------------------------------------------------------------


def test_csv_values_are_text_as_they_stand(saved):
    text = 'prompt,answer\r\n"one, ""two""\nthree",007\n\n a ,\n'
    assert rl.load_rows(saved("a.csv", text), answer_field="answer") == [
        {"prompt": 'one, "two"\nthree', "answer": "007"},
        {"prompt": " a ", "answer": ""},
    ]


def test_csv_may_have_very_many_columns(saved):
    """Within seconds: nothing goes through all of them for each of them."""
    count = 100_000
    header, record = ",".join(f"c{index}" for index in range(count)), ",".join("1" * count)
    (row,) = rl.load_rows(saved("wide.csv", f"{header}\n{record}\n"))
    assert len(row) == count and set(row.values()) == {"1"}


def test_csv_takes_long_fields_and_leaves_the_module_as_it_was(saved):
    import csv

    before = csv.field_size_limit()
    assert len(rl.load_rows(saved("a.csv", "a,b\n" + "x" * 1_000_000 + ",y\n"))[0]["a"]) == 1_000_000
    assert csv.field_size_limit() == before


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a,b,a\n1,2,3\n", "the header (line 1) names 'a' twice"),
        ("\na,,c\n1,2,3\n", "the header (line 2) has no name for field 2 of 3"),
        ("a;b\n1;2\n", "its fields are parted by semicolons"),
        (
            'a,b\n"1\n2",3\n4\n5,6,7\n',
            "2 lines can't be used: line 4 has 1 fields, but the header names 2; line 5 has 3",
        ),
        ('a,b\n1,"2\n3,4\n', "the record that begins in line 2 is not valid CSV: unexpected end of data"),
        ('a,b\n1,"2"x\n', "the record that begins in line 2 is not valid CSV"),
        ("b,c\n1,2\n", "has no column 'a', the answer field; its columns are 'b', 'c'"),
    ],
)
def test_csv_that_is_none_is_refused_by_its_line(saved, text, part):
    assert part in refusal(saved("a.csv", text), answer_field="a")


# --- fields -------------------------------------------------------------------------------------------------------


def write_rows(saved, *rows):
    return saved("rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {}}}


@pytest.mark.parametrize(
    "prompt",
    [
        "x",
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}],
        [{"role": "assistant", "content": "", "tool_calls": [CALL]}],
    ],
    ids=["text", "messages", "call"],
)
def test_prompts_are_text_or_messages(saved, prompt):
    assert rl.load_rows(write_rows(saved, {"q": prompt}), prompt_field="q") == [{"q": prompt}]


@pytest.mark.parametrize(
    ("prompt", "part"),
    [
        (" \n\t", "has an empty prompt ('q' is ' \\n\\t')"),
        ([{"role": "user", "content": " "}], "has an empty prompt ('q' is [{'role': 'user', 'content': ' '}])"),
        (None, "has None as its prompt ('q')"),
        (3, "has 3 as its prompt ('q')"),
        ([], "has [] as its prompt ('q')"),
        (["x"], "has ['x'] as its prompt ('q')"),
        ([{"role": "user"}], "has [{'role': 'user'}] as its prompt ('q')"),
        ([{"role": "me", "content": "x"}], "has [{'role': 'me', "),
    ],
)
def test_other_prompts_are_refused(saved, prompt, part):
    assert f"line 2 {part}" in refusal(write_rows(saved, {"q": "x"}, {"q": prompt}), prompt_field="q")


def test_ids_are_copied_and_each_is_there_once(saved):
    path = write_rows(saved, {"n": "a"}, {"n": 1}, {"n": "1"}, {"n": 2, "id": 2})
    assert [row["id"] for row in rl.load_rows(path, id_field="n")] == ["a", 1, "1", 2]
    assert rl.load_rows(path)[0] == {"n": "a"}


def test_ids_that_are_none_are_refused(saved):
    rows = [{"n": 1}, {"n": 1}, {"n": 1.0}, {"n": True}, {"n": ""}, {}, {"n": 2, "id": "b"}]
    said = refusal(write_rows(saved, *rows), id_field="n")
    assert (
        "6 lines can't be used: line 2 has the id 1 of line 1; line 3 has 1.0 as its id ('n'); line 4 has True" in said
    )
    assert "line 6 has no field 'n', the id (its fields: none); line 7 has 'b' as its \"id\", but the id field" in said


def test_fields_that_rows_have_instead_are_listed_once_while_they_are_the_same(saved):
    said = refusal(write_rows(saved, {"promt": "x"}, {"promt": "y"}, {"p": 1}), prompt_field="prompt")
    assert said.endswith(
        "3 lines can't be used: line 1 has no field 'prompt', the prompt (its fields: 'promt'); line 2 has no field "
        "'prompt', the prompt; line 3 has no field 'prompt', the prompt (its fields: 'p'). Add the prompt, or name "
        "the field that holds it with --prompt-field (prompt_field in Python)."
    )


def test_two_mistakes_of_one_line_are_one_entry(saved):
    said = refusal(write_rows(saved, {"x": 1}, {"p": "x", "a": 1}), prompt_field="p", answer_field="a")
    assert "rows.jsonl: line 1 has no field 'p', the prompt (its fields: 'x'), and has no field 'a', the answer" in said


def test_options_that_mean_nothing_are_refused(saved):
    path = write_rows(saved, {"a": 1})
    assert "prompt_field is 3" in refusal(path, rl.ConfigTypeError, prompt_field=3)
    assert "answer_field is ''" in refusal(path, rl.ConfigTypeError, answer_field="")
    assert "allow_empty_prompts is 1" in refusal(path, rl.ConfigTypeError, prompt_field="a", allow_empty_prompts=1)
    assert "allow_empty_prompts has no effect without a prompt_field" in refusal(path, allow_empty_prompts=True)


# --- functions ----------------------------------------------------------------------------------------------------


def test_rows_of_a_function_are_checked_as_those_of_files_are(saved, capfd):
    path = saved("my_rows.py", "def rows():\n    print('made')\n    return [{'q': 'x', 'n': 1}, {'q': '', 'n': 1}]\n")
    assert rl.load_rows(f"{path}:rows") == [{"q": "x", "n": 1}, {"q": "", "n": 1}]
    assert capfd.readouterr().out == ""  # it is called in another process
    said = refusal(f"{path}:rows", prompt_field="q", id_field="n")
    assert f"{path}:rows: row 1 has an empty prompt ('q' is ''), and has the id 1 of row 0" in said
    assert "has no 'row'. Did you mean rows?" in refusal(f"{path}:row")
