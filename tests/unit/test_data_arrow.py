"""Rows of Parquet files and of directories that `datasets` saved, and the columns that are no plain values."""

import datetime
import decimal
import json
import os
import shutil
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pipeline as rl

NESTED = [
    {"prompt": "a", "n": 1, "x": 0.5, "ok": True, "list": [1, None], "struct": {"t": "é", "l": [["x"]]}},
    {"prompt": "b", "n": None, "x": -1.0, "ok": None, "list": [], "struct": {"t": None, "l": []}},
]


def refusal(path, **fields) -> str:
    with pytest.raises(rl.ConfigError) as caught:
        rl.load_rows(path, **fields)
    return str(caught.value)


def parquet(tmp_path, columns, name="rows.parquet", **options):
    pq.write_table(pa.table(columns), tmp_path / name, **options)
    return tmp_path / name


@pytest.fixture
def datasets():
    """Not at the top: every process of the tests collects this file, and a second of its processor goes into this."""
    import datasets

    return datasets


@pytest.fixture
def saved(tmp_path, datasets):
    datasets.Dataset.from_list(NESTED).save_to_disk(str(tmp_path / "one"), num_shards=2)
    parts = {"train": datasets.Dataset.from_list(NESTED), "test": datasets.Dataset.from_list(NESTED[:1])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "two"))
    return tmp_path


def test_parquet_rows_are_plain_values(tmp_path):
    pq.write_table(pa.Table.from_pylist(NESTED), tmp_path / "a.parquet", row_group_size=1)
    rows = rl.load_rows(tmp_path / "a.parquet", prompt_field="prompt", answer_field="n")
    assert rows == NESTED and json.loads(json.dumps(rows)) == NESTED
    assert [type(row["n"]) for row in rows] == [int, type(None)]


def test_texts_of_every_kind_and_numbers_of_every_size(tmp_path):
    columns = {
        "large": pa.array(["x"], pa.large_string()),
        "category": pa.array(["y"]).dictionary_encode(),
        "unsigned": pa.array([2**64 - 1], pa.uint64()),
        "half": pa.array([0.5], pa.float16()),
        "nothing": pa.nulls(1),
        "pair": pa.array([[1, 2]], pa.list_(pa.int8(), 2)),
    }
    (row,) = rl.load_rows(parquet(tmp_path, columns))
    assert row == {"large": "x", "category": "y", "unsigned": 2**64 - 1, "half": 0.5, "nothing": None, "pair": [1, 2]}
    assert type(row["half"]) is float and type(row["pair"][0]) is int


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (pa.array([datetime.datetime(2030, 1, 2)]), "timestamp[us]"),
        (pa.array([datetime.date(2030, 1, 2)]), "date32[day]"),
        (pa.array([datetime.timedelta(1)]), "duration[us]"),
        (pa.array([decimal.Decimal("1.5")]), "decimal128(2, 1)"),
        (pa.array([b"x"]), "binary"),
        (pa.array([{"bytes": b"x", "path": "a.png"}]), "binary"),
        (pa.array([[datetime.time(1)]]), "time64[us]"),
        (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())), "map<string, int64"),
    ],
)
def test_column_without_plain_values_is_named(tmp_path, values, kind):
    path = parquet(tmp_path, {"prompt": ["a"], "odd": values})
    assert refusal(path).startswith(f"{path}: column 'odd' holds {kind}")
    assert "rows hold plain values (numbers, text, lists, structs), so save it as text or numbers" in refusal(path)


def test_columns_of_one_name_are_refused(tmp_path):
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), tmp_path / "a.parquet")
    assert "has two columns 'a'" in refusal(tmp_path / "a.parquet")


def test_declared_field_that_is_no_column_is_one_sentence_and_bad_rows_are_counted_from_0(tmp_path):
    path = parquet(tmp_path, {"question": ["a", "", None], "id": [1, 2, 1]})
    said = refusal(path, prompt_field="questoin")
    assert "has no column 'questoin', the prompt field; its columns are 'question', 'id'. Did you mean quest" in said
    said = refusal(path, prompt_field="question", id_field="id")
    assert "2 rows can't be used: row 1 has an empty prompt ('question' is ''); row 2 has None as its prompt" in said
    assert "row 2 has None as its prompt ('question'), and has the id 1 of row 0" in said


def test_text_that_is_not_utf8_is_named_with_row_and_column(tmp_path):
    broken = pa.array([b"a", b"b\xff"]).view(pa.string())  # Parquet's readers check no text
    path = parquet(tmp_path, {"n": [1, 2], "text": broken})
    assert f"{path}: row 1, column 'text' is not UTF-8" in refusal(path)


def test_file_that_is_no_parquet_is_refused(tmp_path):
    (tmp_path / "a.parquet").write_text('{"a": 1}\n')
    assert refusal(tmp_path / "a.parquet").startswith(f"{tmp_path}/a.parquet can't be read as what its name says: ")
    columns = {"a": [f"{index:09}" for index in range(1000)]}
    whole = parquet(tmp_path, columns, write_page_checksum=True).read_bytes()
    changed = whole[:200] + b"\xff" * 40 + whole[240:]  # inside the first page
    for content in (*(whole[:size] for size in (1, 4, 8, 100, len(whole) // 2, len(whole) - 1)), changed):
        (tmp_path / "b.parquet").write_bytes(content)
        assert "b.parquet can't be read as what its name says" in refusal(tmp_path / "b.parquet")


def test_value_that_was_changed_behind_its_checksum_is_refused(tmp_path):
    """Nothing else would show it: it is a number as good as the other."""
    plain = {"compression": "NONE", "use_dictionary": False}
    path = parquet(tmp_path, {"a": [1000, 2001, 3000]}, write_page_checksum=True, **plain)
    path.write_bytes(path.read_bytes().replace((2001).to_bytes(8, "little"), (2002).to_bytes(8, "little")))
    assert "rows.parquet can't be read as what its name says" in refusal(path)


def test_rows_are_counted_through_all_batches(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.data.arrow_rows.BATCH_ROWS", 2)
    path = parquet(tmp_path, {"q": ["a", "b", "c", "d", ""]})
    assert "row 4 has an empty prompt" in refusal(path, prompt_field="q")


def test_file_without_rows_is_refused(tmp_path):
    assert "has no rows" in refusal(parquet(tmp_path, {"a": pa.array([], pa.string())}))


def test_saved_dataset_is_read_shard_by_shard(saved):
    assert rl.load_rows(saved / "one", prompt_field="prompt") == NESTED


def test_split_of_saved_datasets_is_named(saved):
    assert rl.load_rows(f"{saved}/two#test") == NESTED[:1]
    assert rl.load_rows(f"{saved}/two#train", id_field="prompt")[1]["id"] == "b"
    assert f"holds 2 splits; name one of {saved}/two#train, {saved}/two#test." in refusal(saved / "two")
    assert "has no split 'tset'; it has train, test. Did you mean test?" in refusal(f"{saved}/two#tset")
    assert "holds a single dataset and no splits; leave #train out" in refusal(f"{saved}/one#train")


def test_only_split_needs_no_name(tmp_path, datasets):
    datasets.DatasetDict({"train": datasets.Dataset.from_list(NESTED)}).save_to_disk(str(tmp_path / "d"))
    assert rl.load_rows(tmp_path / "d") == NESTED


def test_rows_that_were_selected_before_saving_are_those_that_are_read(tmp_path, datasets):
    datasets.Dataset.from_list(NESTED).select([1]).save_to_disk(str(tmp_path / "d"))
    assert rl.load_rows(tmp_path / "d") == NESTED[1:]


def test_saved_dataset_that_is_not_whole_is_refused(saved):
    state = saved / "one" / "state.json"
    kept = json.loads(state.read_text())
    state.write_text(json.dumps(kept | {"_data_files": [{"filename": "../two/train/x.arrow"}]}))
    assert "names no data files" in refusal(saved / "one")
    state.write_text(json.dumps(kept | {"_data_files": [{"filename": "gone.arrow"}]}))
    assert "gone.arrow can't be read as what its name says" in refusal(saved / "one")
    os.mkfifo(saved / "one" / "pipe.arrow")
    state.write_text(json.dumps(kept | {"_data_files": [{"filename": "pipe.arrow"}]}))
    assert "pipe.arrow is no regular file" in refusal(saved / "one")
    state.write_text(json.dumps(kept | {"_data_files": [{"filename": "\ud800"}]}))
    assert "can't be read as what its name says" in refusal(saved / "one")
    state.write_text(json.dumps(kept | {"_data_files": 5}))
    assert "names no data files" in refusal(saved / "one")
    state.write_text("{")
    assert "state.json is not valid JSON" in refusal(saved / "one")
    shutil.rmtree(saved / "two" / "train")
    assert "has no state.json; save it again" in refusal(f"{saved}/two#train")


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    path = parquet(tmp_path, {"a": [1]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as if it were not installed
    assert "is read by pyarrow, which can't be imported" in refusal(path)
    assert "install the extra: pip install -e '.[data]' in the checkout" in refusal(path)
