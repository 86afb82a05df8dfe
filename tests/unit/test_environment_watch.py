"""What a run does when one of its environment hosts hangs, or dies: who fails, who pays, and what is told."""

import asyncio

import pytest

from pipeline.environments.activity import METHODS, now_ns, private_board
from pipeline.errors import RunError
from pipeline.processes.environment import environment_watch
from pipeline.processes.environment.environment_culprit import Verdict
from pipeline.processes.environment.environment_watch import EnvironmentWatch
from workers.errors import WorkerDied
from workers.messages import EnvironmentCall

DIED = WorkerDied("The environment 0 (pid 7) was killed by SIGSEGV.", by_signal=True)
CALL = EnvironmentCall(5, 3, 1, "turn", {})


class Run:
    """In the place of all that a watch has to do with; `verdict` is what its looks find. In processes, or a thread."""

    name, pid, ready = "environment 0", 7, True

    def __init__(self, monkeypatch, in_thread=False):
        self.verdict, self.late = None, None
        self.board = private_board()
        self.long_logs = []
        self.failures, self.lost_calls, self.restarted, self.kills = [], [], [], 0
        handles = [] if in_thread else [self]
        options = {"timeout": 60.0, "silence": 60.0, "log_dir": "logs", "fail": self.failures.append}
        self.watch = EnvironmentWatch(self, [self.board], handles, self, **options)
        monkeypatch.setattr(environment_watch, "judge", lambda *_, **__: self.verdict)
        monkeypatch.setattr(environment_watch, "limit_log", lambda path: path in self.long_logs)

    def enter(self):
        """The call is in users' code; returns its entry."""
        self.board.enter_loop(CALL.request, now_ns(), METHODS.index("on_turn"))
        return self.board.look().loop

    def look(self, verdict=None):
        self.watch.look()
        self.verdict = verdict
        self.watch.look()

    def die(self):
        asyncio.run(self.watch.replace(0, DIED, None))

    # The handle of its process.

    def log_path(self, log_dir):
        return f"{log_dir}/environment-0.log"

    def kill(self):
        self.kills += 1

    # The client.

    def call_of(self, request):
        return CALL if request == CALL.request else None

    def overdue(self, seconds):
        return self.late

    def lost(self, host, why, failed, suspects):
        self.lost_calls.append((why, failed, suspects))

    # Restarts.

    async def restart(self, handle, start, error, *, is_accident):
        self.restarted.append((str(error), is_accident))


def test_who_is_blamed_for_a_hang_fails_and_nobody_else_pays(monkeypatch):
    run = Run(monkeypatch)
    run.look(Verdict((run.enter(),), "could not be cancelled"))
    run.look(run.verdict)  # its death is still to come
    assert run.kills == 1
    run.die()
    sentence = "on_turn of trajectory 3.1 took longer than environment_timeout = 60 s, and could not be cancelled"
    why = f"The environment 0 (pid 7) was killed: {sentence}."
    assert run.lost_calls == [(why, {CALL.request: sentence}, [])] and run.restarted == [(why, False)]
    run.die()  # the next one is a death like any other
    assert run.restarted[1][0] == str(DIED)


def test_a_host_that_stands_still_by_itself_is_replaced_as_an_accident_is(monkeypatch):
    run = Run(monkeypatch)
    run.look(Verdict((), "stood still"))
    run.die()
    why = "The environment 0 (pid 7) was killed: its event loop stood still."
    assert run.lost_calls == [(why, {}, [])] and run.restarted == [(why, True)]


def test_whoever_is_in_users_code_at_a_death_is_its_suspect(monkeypatch):
    run = Run(monkeypatch)
    run.die()
    run.enter()
    run.die()
    assert run.lost_calls == [(str(DIED), {}, []), (str(DIED), {}, [CALL.request])]
    assert run.restarted == [(str(DIED), True), (str(DIED), False)]


@pytest.mark.parametrize("loop_runs", [False, True])
def test_a_thread_that_hangs_ends_the_run_unless_the_others_there_go_on(monkeypatch, loop_runs):
    run = Run(monkeypatch, in_thread=True)
    run.look(Verdict((run.enter(),), "did not end when it was cancelled", loop_runs=loop_runs))
    said = "".join(map(str, run.failures))
    assert loop_runs or said.startswith("An environment hangs: on_turn of trajectory 3.1 took longer than env")
    assert len(run.failures) == (not loop_runs) and run.kills == 0


def test_an_answer_that_is_lost_ends_the_run(monkeypatch):
    run = Run(monkeypatch)
    run.late = "on_turn of trajectory 3.1 has not come back for 999 s"
    run.watch.look()
    (failure,) = run.failures
    assert isinstance(failure, RunError) and run.late in str(failure)


def test_how_often_what_users_code_printed_was_cut_is_counted(monkeypatch):
    run = Run(monkeypatch)
    run.watch.look()
    assert run.watch.num_log_cuts == 0
    run.long_logs.append("logs/environment-0.log")
    run.watch.look()
    run.watch.look()
    assert run.watch.num_log_cuts == 2


def test_who_only_wakes_to_see_that_it_cant_go_on_is_not_busy():
    before, after = {1: 10, 2: 10, 3: 10, 4: 10}, {1: 60, 2: 12, 3: 10, 4: 40, 5: 99}
    assert environment_watch._busiest(before, after) == {1, 4}, "5 is new"
    assert environment_watch._busiest(before, before) == set()
