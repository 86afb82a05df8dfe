"""A file of JSON objects, one a line: how the run's logs are written, and what a full disk says.

It serves events.jsonl, metrics.jsonl, samples.jsonl and eval.jsonl.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from pipeline.errors import RunError

# Made once: json.dumps with options makes an encoder per call. ASCII only, so that no character inside a text can end
# the line for some reader.
_encode = json.JSONEncoder(allow_nan=False, ensure_ascii=True).encode
_encode_readable = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode
_ENDS_LINES = re.compile("[\x85\u2028\u2029\ud800-\udfff]")  # for some reader, or no UTF-8 at all


class JsonLines:
    """A file of JSON objects, one a line, written by one process. Buffered: `flush` hands the lines to the system.

    for_people: letters beyond ASCII stand as themselves, in UTF-8.
    """

    def __init__(self, path: str | os.PathLike[str], *, for_people: bool = False):
        self._path = Path(path)
        self._for_people = for_people
        self._file: TextIO | None = open(path, "a", encoding="utf-8")  # closed by close

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object. Raises RunError when the disk is full, and for a number that is not finite."""
        if self._file is None:
            raise RunError(f"{self._path} is closed; nothing can be written to it any more.")
        try:
            line = _readable(record) if self._for_people else _encode(record)
        except ValueError as error:
            raise RunError(f"A record for {self._path} can't be written as JSON ({error}): {record!r}.") from error
        self._guard(lambda file: file.write(line + "\n"))

    def flush(self) -> None:
        if self._file is not None:
            self._guard(lambda file: file.flush())

    def close(self) -> None:
        """Flush and close; a second call does nothing."""
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            file.close()
        except OSError as error:
            raise RunError(f"{self._path} could not be written to its end: {error.strerror}.") from error

    def _guard(self, act: Callable[[TextIO], Any]) -> None:
        try:
            act(self._file)
        except OSError as error:
            raise RunError(
                f"{self._path} can't be written: {error.strerror}; make room, or use another disk."
            ) from error


def _readable(record: Mapping[str, Any]) -> str:
    return _ENDS_LINES.sub(lambda found: f"\\u{ord(found[0]):04x}", _encode_readable(record))
