"""An event loop that users' code shares and can't end: asyncio hands an exit in a task (`sys.exit` in one of two tools,
in code that a model wrote) to whoever runs the loop, a signal's handler may raise while the loop itself runs, and
`loop.stop` is anybody's to call.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from pipeline.user_code.failures import LOGGER

T = TypeVar("T")

_log = logging.getLogger(LOGGER)


def run_to_end(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result; what ended the loop before is logged, and whoever waits for the task that it came from
    gets it. The loop is left open.
    """
    task = loop.create_task(coroutine)
    task.add_done_callback(lambda _: loop.stop())
    while not task.done():
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as ending:
            _log.warning("%s would have ended the event loop", type(ending).__name__, exc_info=ending)
        except Exception as raised:  # not by a callback, whose errors the loop keeps
            if not _is_from_a_handler(raised):
                raise
            _log.warning("A signal's handler raised %s into the event loop", type(raised).__name__, exc_info=raised)
    return task.result()


def _is_from_a_handler(raised: BaseException) -> bool:
    """Whether other code than the loop's own raised it."""
    trace = raised.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "")
    return module.partition(".")[0] not in ("asyncio", "selectors") and module != __name__
