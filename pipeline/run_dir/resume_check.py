"""Whether a run may go on as it is asked to, with the recipe and the rows that it began with (config.json), and whether
anything is left to do.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError
from pipeline.run_dir.json_lines import object_in
from pipeline.user_warnings import warn_of_run
from pipeline.wording import shown

GOALS = ("steps", "max_minutes")  # how far to go
MAY_CHANGE = (*GOALS, "run_dir")  # where the directory is now says who resumes it
# What a run goes on with, but maybe not to the bit.
VERSIONS = ("headway", "python", "torch")
TAIL_BYTES = 1 << 20  # of a log, in which its last line is looked for
_ABSENT = "nothing"


def refuse_changed(stored: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ConfigError, naming the first field that differs, unless a run described by `now` may continue the one
    whose config.json holds `stored`. Versions may be others: `warn_of_versions`.
    """
    now = json.loads(json.dumps(now))  # tuples are lists there, and so on
    ours = {name: value for name, value in now.items() if name not in VERSIONS}
    theirs = {name: value for name, value in stored.items() if name not in VERSIONS}
    for name, before, after in _differences(theirs, ours, ""):
        if name.startswith("rows"):
            raise ConfigError(
                f"The training rows are not those that the run began with ({name} was {shown(before)} and is "
                f"{shown(after)}); continue it with the same rows in the same order, or begin another run."
            )
        if name.startswith("workload.") and name.endswith(("_rows", "_digest")):
            which, _, what = name.rpartition(".")[2].rpartition("_")
            raise ConfigError(
                f"The {'held-out' if which == 'holdout' else 'training'} rows of {name[9:].rpartition('.')[0]} are not "
                f"those that the run began with ({'number' if what == 'rows' else what} was {shown(before)} and is "
                f"{shown(after)}); put the data back as it was, or begin another run from this one's weights."
            )
        raise ConfigError(
            f"{name} was {_text(before)} when the run began, and is {_text(after)} now; a run goes on with its own "
            "recipe (only steps and max_minutes may change): put it back, or begin another run from its weights."
        )


def warn_of_versions(stored: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Of another Python, torch or Headway than the run began with."""
    for name in VERSIONS:
        if stored.get(name) != now.get(name):
            warn_of_run(
                f"The run began with {name} {stored.get(name)} and goes on with {now.get(name)}: what follows may "
                "differ in the last bits from what it would have been."
            )


def nothing_left(*, steps: int, batches: int, is_saved: bool, is_measured: bool, status: str | None) -> bool:
    """Whether a run that has trained `batches` batches has done all of `steps`: nothing is to be made of what comes
    behind the last one, a checkpoint (is_saved), an evaluation that is due (is_measured) and an end in order (status,
    of its `end` event).
    """
    if batches != steps:
        return batches > steps
    return is_saved and is_measured and status in ("completed", "stopped")


def last_line(path: Path) -> dict[str, Any]:
    """The last whole line of a log; empty when there is none. What is broken behind it is cut off by the run
    (`cut_torn_tail`): a power failure may leave the end of a line, too, whose beginning was lost.
    """
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}; make it readable.") from error
    whole = (object_in(line) for line in reversed(lines) if line.endswith(b"\n"))
    return next((found for found in whole if found is not None), {})


def _differences(before: Any, after: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """(field, old value, new value), in the order of `after`. A field is called after the class of the config that has
    it, or by its path.
    """
    if isinstance(before, dict) and isinstance(after, dict) and before.get("class") == after.get("class"):
        owner = after.get("class", name)
        for key in dict.fromkeys([*after, *before]):
            if key not in MAY_CHANGE:
                inner = f"{owner}.{key}" if owner else key
                yield from _differences(before.get(key, _ABSENT), after.get(key, _ABSENT), inner)
    elif before != after or type(before) is not type(after):
        yield name, before, after


def _text(value: Any) -> str:
    """A config is told by its class."""
    return str(value.get("class", "a table")) if isinstance(value, dict) else shown(value)
