"""--max-minutes: when a run is asked to stop, so that it has saved and ended in time."""

import asyncio

from pipeline.commands.time_limit import END_SECONDS, TimeLimit


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_time_is_kept_back_for_the_longest_update_and_save_twice_over():
    clock = Clock()
    limit = TimeLimit(10.0, clock)
    assert (limit.reserve, limit.left) == (END_SECONDS, 600.0 - END_SECONDS)
    for what, seconds in (("update", 3.0), ("save", 20.0), ("update", 7.0), ("update", 1.0)):
        limit.note(what, seconds)
    assert limit.reserve == END_SECONDS + 2 * (7.0 + 20.0)
    clock.now += 500.0
    assert limit.left == 100.0 - limit.reserve


def test_half_of_a_short_time_is_left_to_train():
    limit = TimeLimit(0.1, Clock())
    limit.note("save", 100.0)
    assert (limit.reserve, limit.left) == (3.0, 3.0)


def test_a_long_save_on_the_way_brings_the_stop_forward():
    """The reserve grows while the limit is waited for: what was over the time already ends the wait at once."""
    clock = Clock()
    limit = TimeLimit(1.0, clock)
    clock.now += 30.0
    assert limit.left > 0
    limit.note("save", 12.5)
    assert limit.left == 0.0
    asyncio.run(asyncio.wait_for(limit.over(), 60.0))
