"""Where a run's parts tell of what ends it, and start what must end with it."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RunEnds:
    """Of one run, for its samplers, its learner and its environment hosts.

    fail(error): the run can't go on; whoever waits for anything of it gets the error. on_error(error): something went
    wrong in a callback, such as the one for a message, where nobody waits; it ends the run, too. spawn_task(coroutine)
    runs it until it or the run ends, and fails the run with what it raises.
    """

    fail: Callable[[BaseException], None]
    on_error: Callable[[Exception], None]
    spawn_task: Callable[[Coroutine[Any, Any, None]], None]
