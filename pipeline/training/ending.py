"""How a run ends."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class SaveAtEnd(Enum):
    """What becomes of the weights when a run ends."""

    OR_FAIL = 1  # it went as someone wanted: not to save is an error
    IF_POSSIBLE = 2  # it is ending with an error, which no other one may hide
    NOTHING = 3


@dataclass(slots=True)
class Ending:
    """As far as is known: what its `end` event says, with what a failure has failed with, and what becomes of the
    weights. error: the latest that winding up has raised.
    """

    status: str = "failed"
    save: SaveAtEnd = SaveAtEnd.IF_POSSIBLE
    cause: BaseException | None = None
    error: BaseException | None = None

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Around a part of winding up, after which the others are due whatever it raises."""
        try:
            yield
        except BaseException as error:
            self.error = error
