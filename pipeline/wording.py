"""How errors name what they are about: an option, a value, the choices, and the one that was probably meant."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any


def shown(value: object) -> str:
    """A value as a sentence shows it: its repr, cut where it is long."""
    try:
        return f"{value!r:.100}"
    except Exception:  # users' classes have a repr of their own
        if isinstance(value, int):  # Python writes none of more than 4300 digits
            return f"a number of {value.bit_length()} bits"
        return f"a {type(value).__name__} that can't be shown"


def label(owner: object, name: str) -> str:
    """`Schedule.concurrency`: how errors name an option. A class may have a LABEL other than its name."""
    return f"{getattr(type(owner), 'LABEL', type(owner).__name__)}.{name}"


def quoted(names: Sequence[Any]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def suggestion(word: str, choices: Iterable[str]) -> str:
    """ " Did you mean X?" for the nearest choice, or nothing if none is near."""
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f" Did you mean {near[0]}?" if near else ""
