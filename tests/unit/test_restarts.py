"""Dead processes are started again as often as accidents happen; what a successor would die of, too, ends the run."""

import asyncio

import pytest

from pipeline.errors import RunError
from pipeline.processes.worker import restarts
from pipeline.processes.worker.restarts import RESTART_WINDOW_SECONDS, Restarts
from pipeline.user_warnings import RunWarning
from workers.errors import WorkerDied, WorkerFailed

pytestmark = pytest.mark.filterwarnings("ignore::pipeline.user_warnings.RunWarning")  # each restart is one

KILLED = WorkerDied("The sampler 0 (pid 7) was killed.", by_signal=True)
ENDED = WorkerDied("The sampler 0 (pid 7) ended with exit code 1.")


class Place:
    """In the place of a run's workers, of one of them, and of the log. deaths: what its starts meet, one by one."""

    name, pid, max_restarts, failure = "sampler 0", 7, 2, None

    def __init__(self, *deaths):
        self.deaths = list(deaths)
        self.starts = lambda: None  # what else happens then
        self.told, self.failures = [], []
        self.restarts = Restarts("Samplers", self, self, self.fail)

    def respawn(self, handle):
        assert handle is self
        self.pid += 1

    def log(self, event, **fields):
        self.told.append((event, fields["pid"], fields["cause"]))

    def fail(self, error):
        self.failures.append(error)
        self.failure = error

    async def start(self):
        self.starts()
        death = self.deaths.pop(0) if self.deaths else None
        if death is not None:
            raise death

    def begin(self):
        asyncio.run(self.restarts.start(self, self.start))

    def die(self, **options):
        asyncio.run(self.restarts.restart(self, self.start, KILLED, **options))


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(restarts.time, "monotonic", lambda: now[0])
    return now


def test_one_that_is_killed_before_it_serves_is_followed_by_another():
    place = Place(KILLED, KILLED)
    with pytest.warns(RunWarning) as warned:
        place.begin()
    assert [str(warning.message) for warning in warned] == [
        f"The sampler 0 (pid 7) was killed. Another process (pid {pid}) takes its place." for pid in (8, 9)
    ]
    assert place.told == [("restart", 8, str(KILLED)), ("restart", 9, str(KILLED))]
    assert place.restarts.count == 2 and place.failures == []


@pytest.mark.parametrize("error", [ENDED, WorkerFailed("The sampler 0 stopped: it broke a rule.")])
def test_one_that_ends_by_itself_before_it_serves_is_not(error):
    place = Place(error)
    with pytest.raises(type(error)):
        place.begin()
    assert place.told == [] and place.restarts.count == 0


def test_too_many_deaths_within_the_window_end_the_run_with_the_last(clock):
    place = Place()
    place.die()
    place.die()
    assert place.failures == [] and place.restarts.count == 2
    place.die()
    (failure,) = place.failures
    assert isinstance(failure, RunError) and str(failure) == (
        "Samplers died 3 times within ten minutes, but max_restarts is 2; look into logs/ and at the machine's memory, "
        "then resume, or raise max_restarts. The last: The sampler 0 (pid 7) was killed."
    )
    assert place.restarts.count == 2


def test_deaths_that_are_long_past_do_not_count(clock):
    place = Place()
    for _ in range(9):
        place.die()
        clock[0] += 0.4 * RESTART_WINDOW_SECONDS
        place.die(is_accident=False)
        clock[0] += 0.2 * RESTART_WINDOW_SECONDS
    assert place.failures == [] and place.restarts.count == 18


def test_one_that_takes_long_to_start_and_then_dies_of_its_work_is_not_replaced_for_ever(clock):
    place = Place()
    place.starts = lambda: clock.append(clock.pop() + 2 * RESTART_WINDOW_SECONDS)
    for _ in range(3):
        place.die()
        clock[0] += 0.1 * RESTART_WINDOW_SECONDS
    (failure,) = place.failures
    assert str(failure).startswith(
        "The sampler 0 died 3 times within ten minutes, the time that it took to start left out, but max_restarts is 2;"
    )


def test_deaths_of_several_that_serve_between_them_do_not_add_up_over_their_starts(clock):
    place = Place()
    place.starts = lambda: clock.append(clock.pop() + 0.5 * RESTART_WINDOW_SECONDS)
    for number in range(20):
        place.name = f"sampler {number % 4}"
        place.die()
        clock[0] += 0.2 * RESTART_WINDOW_SECONDS
    assert place.failures == [] and place.restarts.count == 20


def test_a_death_on_the_way_is_an_accident_whatever_the_one_before_was(clock):
    place = Place(*[KILLED] * 9)
    place.die(is_accident=False)
    assert "died 3 times" in str(place.failures[0]) and place.restarts.count == 3


@pytest.mark.parametrize("error", [WorkerFailed("It broke a rule."), RunError("It was not ready in time.")])
def test_what_a_successor_would_meet_too_ends_the_run(error):
    place = Place(error)
    place.die()
    assert place.failures == [error] and place.restarts.count == 1


def test_a_run_that_has_failed_starts_nobody():
    place = Place()
    place.failure = error = RunError("The disk is full.")
    place.die()
    assert place.told == []
    place.deaths = [KILLED]
    with pytest.raises(WorkerDied):
        place.begin()
    assert place.failure is error
