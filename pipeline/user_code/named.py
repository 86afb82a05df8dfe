"""What users name as `module:name` or `path/to/file.py:name`: found, or a ConfigError in one sentence.

`what` and `example` complete that sentence, such as `environment` and `my_envs:Search`.
"""

from typing import Any

from pipeline.errors import ConfigError
from workers.errors import ImportPathError
from workers.import_path import find_object, split_path


def find_named(path: str, what: str, example: str) -> Any:
    """The object, imported in this process. Raises ConfigError, whatever the user's module raises."""
    try:
        return find_object(path, what, example)
    except ImportPathError as error:
        raise ConfigError(str(error)) from error


def split_named(path: str, what: str, example: str) -> tuple[str, str]:
    """(module or absolute file, dotted name); a file must be there, nothing is imported. Raises ConfigError."""
    try:
        return split_path(path, what, example)
    except ImportPathError as error:
        raise ConfigError(str(error)) from error


def checked_path(path: str, what: str, example: str, *, or_itself: bool = True) -> str:
    """The path, that of a file made absolute; nothing is imported. or_itself: it may be given itself, too. Raises
    ConfigError.
    """
    place, name = split_named(path, what, example)
    if place == "__main__":
        raise ConfigError(
            f"The {what} is {path!r}, but no other process can import the script itself; put it into a module of its "
            f"own{', or give it itself instead of its name' if or_itself else ''}."
        )
    return f"{place}:{name}"
