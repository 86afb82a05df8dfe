"""Rows from Parquet files and from directories that `datasets` saved, read by pyarrow; nothing is ever unpickled.

Columns hold what JSON could: booleans, numbers, text, null, and lists and structs of these. Others (timestamps,
decimals, bytes, images, maps) have no one plain value, so they are refused by the column's name.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.data.bad_rows import BadRows
from pipeline.errors import ConfigError
from pipeline.wording import suggestion

BATCH_ROWS = 10_000  # rows that exist as columns and as Python objects at once


def read_parquet(path: Path, bad: BadRows) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row from 0, row). Raises ConfigError for a file that is none, and for columns without plain values."""
    pyarrow = _pyarrow(path)
    import pyarrow.parquet as parquet  # optional, and slow to load

    with _readable(path, pyarrow), parquet.ParquetFile(path, page_checksum_verification=True) as file:
        _check_columns(path, file.schema_arrow, pyarrow)
        # Without threads: they would outlive the reading, in a process that starts others.
        yield from _rows(path, file.iter_batches(batch_size=BATCH_ROWS, use_threads=False), pyarrow)


def read_saved_dataset(path: Path, split: str | None, bad: BadRows) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row from 0, row) of a `Dataset`, or of one split of a `DatasetDict`: the named one, or the only one. Raises
    ConfigError for any other directory, an unknown split, and columns without plain values.
    """
    files = _data_files(_split_directory(path, split))
    pyarrow = _pyarrow(path)
    yield from _rows(path, _batches(files, pyarrow), pyarrow)


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow  # optional, and slow to load
    except ImportError as error:
        raise ConfigError(
            f"{path} is read by pyarrow, which can't be imported ({error}); install the extra: "
            "pip install -e '.[data]' in the checkout, or save the rows as JSON Lines (.jsonl)."
        ) from error
    return pyarrow


@contextmanager
def _readable(path: Path, pyarrow: Any) -> Iterator[None]:
    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeError) as error:  # also names that are not UTF-8
        why = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path} can't be read as what its name says: {why}. Write the file again.") from error


def _batches(files: Iterable[Path], pyarrow: Any) -> Iterator[Any]:
    for file in files:
        if file.exists() and not file.is_file():  # a pipe would be waited for
            raise ConfigError(f"{file} is no regular file; save the dataset again.")
        with _readable(file, pyarrow), pyarrow.memory_map(str(file)) as source:
            reader = pyarrow.ipc.open_stream(source)
            _check_columns(file, reader.schema, pyarrow)
            yield from reader


def _rows(path: Path, batches: Iterable[Any], pyarrow: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    row = 0
    for batch in batches:
        try:
            batch.validate(full=True)  # Arrow trusts what it reads: damaged offsets would end this process
        except pyarrow.ArrowInvalid as error:
            if "UTF8" in str(error):
                raise ConfigError(f"{path}: {_undecodable(batch, row)} is not UTF-8. Correct the text.") from error
            raise ConfigError(f"{path} is damaged from row {row} on: {error}. Write the file again.") from error
        values = batch.to_pylist()
        yield from enumerate(values, row)
        row += len(values)


def _undecodable(batch: Any, row: int) -> str:
    """Which value of the batch, whose first row is `row`, is no text."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        for index in range(len(column)):
            try:
                column[index].as_py()
            except UnicodeDecodeError:
                return f"row {row + index}, column {name!r:.80}"
    raise AssertionError("a batch can't be decoded, but each of its values can")


# --- columns -----------------------------------------------------------------------------------------------------


def _check_columns(path: Path, schema: Any, pyarrow: Any) -> None:
    known: set[str] = set()
    for field in schema:
        if field.name in known:
            raise ConfigError(f"{path} has two columns {field.name!r:.80}; give each its own name.")
        known.add(field.name)
        found = _unplain(field.type, pyarrow)
        if found is not None:
            raise ConfigError(
                f"{path}: column {field.name!r:.80} holds {found}; rows hold plain values (numbers, text, lists, "
                "structs), so save it as text or numbers, or leave the column out."
            )


def _unplain(kind: Any, pyarrow: Any) -> str | None:
    """The first type within `kind` whose values are not plain; None if all are."""
    types = pyarrow.types
    if types.is_struct(kind):
        inner = [field.type for field in kind]
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = [kind.value_type]
    elif types.is_dictionary(kind):
        inner = [kind.value_type]
    else:
        texts = (types.is_string, types.is_large_string, types.is_string_view)
        plain = (types.is_boolean, types.is_integer, types.is_floating, types.is_null, *texts)
        return None if any(matches(kind) for matches in plain) else str(kind)
    return next(filter(None, (_unplain(one, pyarrow) for one in inner)), None)


# --- directories -------------------------------------------------------------------------------------------------


def _split_directory(path: Path, split: str | None) -> Path:
    """Where the `Dataset` is that `path` and `split` mean."""
    if (path / "dataset_dict.json").is_file():
        splits = _read_json(path / "dataset_dict.json").get("splits")
        if not isinstance(splits, list) or not splits or not all(isinstance(name, str) for name in splits):
            raise ConfigError(f"{path / 'dataset_dict.json'} lists no splits; save the datasets again.")
        if split is None and len(splits) > 1:
            names = ", ".join(f"{path}#{name}" for name in splits)
            raise ConfigError(f"{path} holds {len(splits)} splits; name one of {names}.")
        name = splits[0] if split is None else split
        if name not in splits:
            raise ConfigError(
                f"{path} has no split {name!r}; it has {', '.join(splits)}.{suggestion(name, splits)} Name one of them."
            )
        return path / name
    if not (path / "state.json").is_file():
        raise ConfigError(
            f"{path} is a directory, but not one that `datasets` saved (it has no state.json or dataset_dict.json); "
            "name a file in it, or save the rows with save_to_disk."
        )
    if split is not None:
        raise ConfigError(f"{path} holds a single dataset and no splits; leave #{split} out.")
    return path


def _data_files(directory: Path) -> list[Path]:
    """Its Arrow files, in order."""
    if not (directory / "state.json").is_file():
        raise ConfigError(f"{directory} is no dataset that `datasets` saved: it has no state.json; save it again.")
    state = _read_json(directory / "state.json")
    if state.get("_indices_data_files"):
        raise ConfigError(f"{directory} was saved by an old version of `datasets`, as a selection; save it again.")
    entries = state.get("_data_files")
    entries = entries if isinstance(entries, list) else []
    names = [one.get("filename") if isinstance(one, dict) else None for one in entries]
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ConfigError(f"{directory / 'state.json'} names no data files; save the dataset again.")
    return [directory / name for name in names]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}; save the dataset again.") from error
    return found if isinstance(found, dict) else {}
