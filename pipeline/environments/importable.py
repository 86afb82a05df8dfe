"""Whether another process can import what a user's script holds, and under what name."""

import sys
from collections.abc import Callable


def import_path_of(found: type | Callable) -> str | None:
    """`module:name` of a class or function; None if another process can't import it: it is of a script's own
    `__main__`, of a notebook, or of a function's inside.
    """
    module = sys.modules.get(found.__module__)
    importable = found.__module__ != "__main__" and module is not None and getattr(module, "__spec__", None) is not None
    if not importable or "<locals>" in found.__qualname__ or "<lambda>" in found.__qualname__:
        return None
    return f"{found.__module__}:{found.__qualname__}"
