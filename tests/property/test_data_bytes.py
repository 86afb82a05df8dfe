"""Files of any bytes are rows or one sentence, never another error; and rows come back as they were written."""

import json
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

import pipeline as rl

# Bytes that mean something to the formats, so that some files get far.
PIECES = [
    b'{"a": ',
    b"1",
    b"}",
    b"\n",
    b"\r\n",
    b"[",
    b"]",
    b",",
    b'"',
    b"x",
    b"\\ud83d",
    b"\xef\xbb\xbf",
    b"\xe2\x80\xa8",
]
PIECES += [b"\xff", b"NaN", b"1e999", b"9" * 25, b" ", b"\t", b"null", b'{"a": {"b": []}}', b"\0", b":", b"\\"]
CONTENTS = st.one_of(st.binary(max_size=40), st.lists(st.sampled_from(PIECES), max_size=16).map(b"".join))

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    TEXTS,
)
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))
ROWS = st.lists(st.dictionaries(TEXTS, VALUES, max_size=4), min_size=1, max_size=6)


def shape(value):
    """The value with the type of everything in it: 1, 1.0 and True are equal, but not the same."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    return [shape(item) for item in value] if isinstance(value, list) else (type(value), repr(value))


@given(CONTENTS, st.sampled_from(["jsonl", "json", "csv"]), st.booleans())
def test_bytes_are_rows_or_one_sentence(content, suffix, declared):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, f"a.{suffix}")
        path.write_bytes(content)
        try:
            rows = rl.load_rows(path, **({"prompt_field": "a", "id_field": "b"} if declared else {}))
        except rl.ConfigError as error:
            assert str(error).startswith(str(path)) and len(str(error)) < 2000 + len(str(path))
        else:
            assert rows and all(isinstance(row, dict) for row in rows)


@given(ROWS, st.sampled_from(["jsonl", "json"]), st.booleans(), st.sampled_from(["\n", "\r\n", "\n\n \n"]))
def test_rows_come_back_as_they_were_written(rows, suffix, ascii_only, end):
    written = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
    text = end.join(written) if suffix == "jsonl" else f"[{f',{end}'.join(written)}]{end}"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, f"a.{suffix}")
        path.write_bytes(text.encode())
        assert shape(rl.load_rows(path)) == shape(rows)


@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=5))
def test_csv_values_come_back_as_they_were_written(records):
    def quoted(text):
        return '"' + text.replace('"', '""') + '"'

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "a.csv")
        lines = ["one,two", *(f"{quoted(first)},{quoted(second)}" for first, second in records)]
        path.write_bytes("\r\n".join(lines).encode())
        assert rl.load_rows(path) == [{"one": first, "two": second} for first, second in records]
