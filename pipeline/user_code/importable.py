"""Whether another process can import what a user's script holds, and under what name."""

import sys
from typing import Any


def import_path_of(found: Any) -> str | None:
    """`module:name` of a class or function; None if another process can't import it: it is of a script's own
    `__main__`, of a notebook, of a function's inside, or bound to an object.
    """
    module_name, name = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    module = sys.modules.get(module_name) if isinstance(module_name, str) else None
    if module is None or module_name == "__main__" or getattr(module, "__spec__", None) is None or name is None:
        return None
    named: Any = module
    for part in name.split("."):
        named = getattr(named, part, None)  # nothing is called <locals> or <lambda>
    return f"{module_name}:{name}" if named is found else None
