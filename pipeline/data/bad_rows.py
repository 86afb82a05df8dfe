"""What is wrong with the rows of one data source, gathered so that one error tells all of it."""

from pipeline.errors import ConfigError

SHOWN = 10  # bad lines that the error lists; of the others it tells the number


class BadRows:
    """source: how the error names where the rows come from. unit: what its places are: "line" (from 1), or "row" (from
    0, as in events.jsonl).
    """

    def __init__(self, source: str, unit: str) -> None:
        self.source = source
        self.unit = unit
        self.num_bad = 0
        self._last: int | str | None = None
        self._shown: list[list[str]] = []  # of each bad place: itself, and what is wrong with it
        self._advice: dict[str, None] = {}  # each once, in order
        self._aside = ""

    def add(self, place: int | str, what: str, advice: str, aside: str = "") -> None:
        """`what` completes "line 3 …", advice is a sentence. Several of one place come one after the other. aside:
        what `what` goes on with, where it is not the same as the one before.
        """
        if aside != self._aside:
            what += aside
        self._aside = aside or self._aside
        if place == self._last:
            if self.num_bad <= SHOWN:
                self._shown[-1].append(what)
        else:
            self._last = place
            self.num_bad += 1
            if self.num_bad <= SHOWN:
                self._shown.append([f"{self.unit} {place}", what])
        if self.num_bad <= SHOWN:
            self._advice[advice] = None

    def refuse(self) -> None:
        """Raise ConfigError if there are any."""
        if not self.num_bad:
            return
        places = "; ".join(f"{place} {', and '.join(what)}" for place, *what in self._shown)
        count, more = "", ""
        if self.num_bad > 1:
            count = f" {self.num_bad:,} {self.unit}s can't be used:"
        if self.num_bad > SHOWN:
            more = f"; and {self.num_bad - SHOWN:,} more"
        raise ConfigError(f"{self.source}:{count} {places}{more}. {' '.join(self._advice)}")
