"""What is done to a run, when and to which process: drawn from a seed, so that a soak's strikes can be drawn again.

Pure: it is told which processes there are, and names one.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

SUPERVISOR_EVERY = 10  # kills, of which the last is the supervisor's
STOP_EVERY = 25  # strikes, of which the last asks the supervisor to stop, by SIGTERM
FREEZE_SECONDS = (0.2, 4.0)  # least and most; below the run's worker timeout

Kind = Literal["kill", "segfault", "freeze", "hang", "kill_supervisor", "freeze_supervisor", "stop_supervisor"]
# Of strikes on workers and their keepers, how often each occurs.
WORKER_KINDS: dict[Kind, int] = {"kill": 70, "segfault": 12, "freeze": 10, "hang": 4, "freeze_supervisor": 4}
KILLS = ("kill", "segfault", "kill_supervisor")

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Strike:
    """One strike. after: since the one before, by the run's clock. seconds: of a freeze. chance: in [0, 1), says whom
    it hits.
    """

    kind: Kind
    after: float
    seconds: float
    chance: float

    @property
    def hits_supervisor(self) -> bool:
        return self.kind.endswith("_supervisor")

    def victim(self, processes: Sequence[P]) -> P | None:
        """One of the workers and keepers that there are; None of none."""
        return processes[int(self.chance * len(processes))] if processes else None


def strikes(seed: int, every: float) -> Iterator[Strike]:
    """Without end. every: mean seconds between two."""
    draws = random.Random(seed)
    number = kills = 0
    while True:
        number += 1
        kind: Kind = draws.choices(list(WORKER_KINDS), list(WORKER_KINDS.values()))[0]
        if number % STOP_EVERY == 0:
            kind = "stop_supervisor"
        elif kind in KILLS:
            kills += 1
            kind = "kill_supervisor" if kills % SUPERVISOR_EVERY == 0 else kind
        yield Strike(kind, draws.uniform(0.2, 1.8) * every, draws.uniform(*FREEZE_SECONDS), draws.random())
