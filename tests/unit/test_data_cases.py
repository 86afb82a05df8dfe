"""Data files on which other systems have gone wrong: each is read exactly, or refused with file, line and field."""

import json
from pathlib import Path

import pytest

import pipeline as rl
from pipeline.run_dir.json_lines import JsonLines
from workers.message_codec import decode, encode
from workers.messages import EnvironmentCall, Environments

CASES = Path(__file__).parent.parent / "data" / "cases"


def refusal(path, **fields) -> str:
    with pytest.raises(rl.ConfigError) as caught:
        rl.load_rows(path, **fields)
    return str(caught.value)


def test_byte_order_mark_changes_nothing():
    """HR01."""
    plain = rl.load_rows(CASES / "HR01" / "plain.jsonl")
    assert rl.load_rows(CASES / "HR01" / "bom.jsonl", prompt_field="prompt") == plain
    assert [list(row) for row in plain] == [["prompt", "answer"]] * 3
    assert [row["answer"] for row in plain] == ["5", "8", "7"]


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.json", '[{"prompt": "x"}]'), ("a.csv", "prompt\nx\n"), ("a.jsonl", '{"prompt": "x"}\r\n\r\n')],
)
def test_byte_order_mark_of_every_text_format(tmp_path, name, text):
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert rl.load_rows(tmp_path / name, prompt_field="prompt") == [{"prompt": "x"}]


def test_byte_order_mark_inside_a_file_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n\xef\xbb\xbf{"a": 2}\n')
    assert "line 2 is not valid JSON" in refusal(tmp_path / "a.jsonl")
    assert "as when files are joined" in refusal(tmp_path / "a.jsonl")


def test_separators_of_unicode_end_no_record(tmp_path):
    """HR03, with the logs that hold such text."""
    rows = rl.load_rows(CASES / "HR03" / "u2028.jsonl")
    assert [row["prompt"] for row in rows] == ["first\u2028half and\u2029half", "next\x85line"]
    log = JsonLines(tmp_path / "log.jsonl")
    for row in rows:
        log.write(row)
    log.close()
    assert (tmp_path / "log.jsonl").read_bytes().count(b"\n") == 2
    assert rl.load_rows(tmp_path / "log.jsonl") == rows
    assert [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()] == rows


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e"])
@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.jsonl"])
def test_no_separator_but_the_line_end_parts_text(tmp_path, separator, name):
    text = f"a{separator}b"
    written = json.dumps({"prompt": text}, ensure_ascii=ord(separator) < 0x20)
    content = {"a.json": f"[{written}]", "a.csv": f"prompt\n{text}\n", "a.jsonl": written}[name]
    (tmp_path / name).write_text(content, encoding="utf-8", newline="")
    assert rl.load_rows(tmp_path / name) == [{"prompt": text}]


def test_invalid_utf8_is_named_with_its_line_and_byte():
    """HR04."""
    path = CASES / "HR04" / "bad_utf8.jsonl"
    assert refusal(path).startswith(f"{path}: line 2 is not UTF-8: byte 16 of the line (counted from 0) is 0xac")


@pytest.mark.parametrize(
    ("name", "before"), [("a.json", b'[{"a":\n '), ("a.csv", b"a\n "), ("a.jsonl", b'{"a": 1}\n ')], ids=str
)
def test_invalid_utf8_of_every_text_format(tmp_path, name, before):
    (tmp_path / name).write_bytes(before + b"\xe2\x82")
    assert "line 2 is not UTF-8: byte 1 of the line (counted from 0) is 0xe2" in refusal(tmp_path / name)


def test_every_value_keeps_its_own_type():
    """HR06."""
    answers = [row["answer"] for row in rl.load_rows(CASES / "HR06" / "mixed_types.jsonl", answer_field="answer")]
    assert answers == [7, "7", None, 7.0, ["7", "seven"], 12345678901234567890]
    assert [type(answer).__name__ for answer in answers] == ["int", "str", "NoneType", "float", "list", "int"]
    calls = [EnvironmentCall(1, 0, 0, "reset", {"row": {"answer": answer}}) for answer in answers]
    _, arrived = decode(encode(Environments(calls), 1))  # as the process that scores it gets it
    arrived = [call.argument["row"]["answer"] for call in arrived.calls]
    assert arrived == answers and list(map(type, arrived)) == list(map(type, answers))


@pytest.mark.parametrize("number", ["18446744073709551616", "-9223372036854775809", "9" * 5000, "1e400", "-1e999"])
def test_number_that_no_message_or_float_can_carry_is_refused_by_its_line(tmp_path, number):
    (tmp_path / "a.jsonl").write_text('{"answer": 1}\n{"n": 2, "answer": ' + number + "}\n")
    assert refusal(tmp_path / "a.jsonl").startswith(f"{tmp_path}/a.jsonl: line 2 h")


def test_number_of_more_than_64_bits_is_named_with_its_field(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"n": 2, "answer": [18446744073709551616]}\n')
    assert "line 1 has [18446744073709551616] as its 'answer'" in refusal(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text('{"answer": [18446744073709551615, -9223372036854775808]}\n')
    assert rl.load_rows(tmp_path / "a.jsonl") == [{"answer": [2**64 - 1, -(2**63)]}]


def test_rows_without_prompt_or_answer_are_listed_before_anything_starts():
    """HR07."""
    path = CASES / "HR07" / "missing_field.jsonl"
    said = refusal(path, prompt_field="prompt", answer_field="answer")
    assert said.startswith(f"{path}: 3 lines can't be used: line 2 has no field 'prompt', the prompt (its fields: ")
    assert "'question', 'answer'); line 3 has an empty prompt ('prompt' is ''); line 4 has no field 'answer'" in said
    allowed = refusal(path, prompt_field="prompt", answer_field="answer", allow_empty_prompts=True)
    assert "line 3" not in allowed and "line 2" in allowed and "line 4" in allowed
    assert len(rl.load_rows(path)) == 4  # nothing was said of any field


def test_half_of_a_surrogate_pair_is_refused_and_a_pair_comes_through(tmp_path):
    """HR60."""
    lines = (CASES / "HR60" / "surrogate.jsonl").read_text().splitlines()
    assert "line 1 has 'half \\ud83d pair' as its 'prompt'" in refusal(CASES / "HR60" / "surrogate.jsonl")
    (tmp_path / "pair.jsonl").write_text(lines[1])
    assert rl.load_rows(tmp_path / "pair.jsonl")[0]["prompt"] == "whole \U0001f600 pair"
    (tmp_path / "key.jsonl").write_text('{"a\\ud83d": 1}')
    assert "as its 'a\\ud83d'" in refusal(tmp_path / "key.jsonl")
