"""What a user names as `module:name`: a loss of the learner's, an environment of its process's."""

import importlib
from typing import Any


def find_object(path: str) -> Any:
    """The object at `module:name`; a dotted name goes into classes. Raises what importing the user's module raises,
    which may be anything, and AttributeError when it defines no such name.
    """
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
