"""Workers that die or refuse at awkward moments, two samplers at once, and what a run's end leaves in idle workers."""

import asyncio
import contextlib
import os
import signal

import psutil
import pytest
from running import audit, events_of, make_trainer, steps_taken

import pipeline as rl
from pipeline.processes.sampler.sampler_client import Pick
from pipeline.processes.worker.run_workers import MODULES
from pipeline.processes.worker.worker_handle import READY_SECONDS, WorkerHandle
from pipeline.tasks import guess
from workers.errors import WorkerDied
from workers.messages import Hello, Ready
from workers.worker_main import START_SECONDS

ROWS = guess.train_rows(0)
SECONDS = 60.0  # bound on every wait
NOTICED_WITHIN = 5.0  # seconds, of a death


@pytest.fixture(scope="module")
def model(kept):
    """For tests that look at a run, not at how processes start: whoever died in one is started anew by the next."""
    with kept.supervisor(device="cpu") as supervisor:
        yield supervisor


@pytest.fixture(scope="module")
def pair(kept):
    """The same with two samplers."""
    with kept.supervisor(device="cpu", samplers=2, check_weights=True) as supervisor:
        yield supervisor


def kill(pid, number=signal.SIGKILL):
    """Kill, and wait for the end without reaping it: the sentinel has fired when this returns."""
    os.kill(pid, number)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def train(trainer, steps, act=None):
    return steps_taken(trainer, ROWS, steps, act, seconds=SECONDS)


def test_worker_waits_longer_for_its_start_than_the_learner_may_take():
    assert START_SECONDS > READY_SECONDS


def test_two_samplers_share_the_work_and_one_may_be_killed_by_any_signal(pair, tmp_path):
    """Also by one of those that have no name."""

    async def act(step):
        if step.n == 3:
            kill(pair._run.workers.samplers[1].pid, signal.SIGRTMIN + 6)

    assert train(make_trainer(pair, tmp_path / "run"), 8, act) == list(range(1, 9))
    (restart,) = events_of(tmp_path / "run", "restart")
    assert f"was killed by signal {signal.SIGRTMIN + 6}" in restart["cause"]
    samplers = [event["sampler"] for event in events_of(tmp_path / "run", "started")]
    assert min(samplers.count(0), samplers.count(1)) >= len(samplers) // 4
    assert audit(tmp_path / "run") == 0


def test_all_samplers_killed_at_once_are_noticed_within_seconds_and_their_requests_asked_again_once(pair, tmp_path):
    """Case HR38. Every trajectory has its tokens once: what the dead had not delivered, nobody has seen."""
    killed = []

    async def act(step):
        run = pair._run
        if step.n >= 2 and not killed and any(client._sent for client in run.samplers):  # requests that die with them
            killed.append(run.events.seconds())
            for sampler in run.workers.samplers:
                kill(sampler.pid)

    assert train(make_trainer(pair, tmp_path / "run"), 8, act) == list(range(1, 9))
    restarts = events_of(tmp_path / "run", "restart")
    assert {event["worker"] for event in restarts} == {"sampler 0", "sampler 1"} and len(restarts) == 2
    assert all(0.0 <= event["t"] - killed[0] < NOTICED_WITHIN for event in restarts)
    assert all("was killed by SIGKILL" in event["cause"] for event in restarts)
    assert events_of(tmp_path / "run", "retry") == []
    ended = [event["trajectory"] for event in events_of(tmp_path / "run", "trajectory")]
    assert len(ended) == len(set(ended))
    assert audit(tmp_path / "run") == 0


def kill_at_hello(monkeypatch, role, times):
    """The first processes of that role that are started from now on, so many of them."""
    receive, killed = WorkerHandle._receive, []

    def kill(handle, message):
        if isinstance(message, Hello) and handle.role == role and len(killed) < times:
            os.kill(handle.pid, signal.SIGKILL)
            killed.append(handle.pid)
        receive(handle, message)

    monkeypatch.setattr(WorkerHandle, "_receive", kill)


@pytest.mark.parametrize("started", [["learner"], ["sampler", "learner"], ["environment"]], ids=lambda roles: roles[0])
def test_a_process_that_is_killed_before_it_serves_is_replaced(model, tmp_path, monkeypatch, started):
    """A sampler is then at its hello, while the learner still starts."""
    for handle in model._pool.handles:
        if handle.role in started and handle.index == 0:
            handle.discard()
    kill_at_hello(monkeypatch, started[0], times=1)
    assert train(make_trainer(model, tmp_path / "run"), 1) == [1]
    (restart,) = events_of(tmp_path / "run", "restart")
    assert restart["worker"] == f"{started[0]} 0" and "was killed by SIGKILL" in restart["cause"]


def test_a_process_that_is_killed_again_and_again_before_it_serves_ends_the_run(model, tmp_path, monkeypatch):
    monkeypatch.setattr(model, "max_restarts", 1)
    model._pool.handle("environment", 0, MODULES["environment"], 1).discard()
    kill_at_hello(monkeypatch, "environment", times=2)
    why = r"died 2 times within ten minutes, but max_restarts is 1; no call was in your code .* The last: The e"
    with pytest.raises(rl.RunError, match=why):
        train(make_trainer(model, tmp_path / "run"), 1)


def die_with_ready(monkeypatch, incarnation):
    """The sampler's incarnation is dead when its Ready is delivered, and both are seen in one tick."""
    receive = WorkerHandle._receive

    def die(handle, message):
        receive(handle, message)
        if isinstance(message, Ready) and handle.role == "sampler" and handle.incarnation == incarnation:
            kill(handle.pid)
            handle._ended()

    monkeypatch.setattr(WorkerHandle, "_receive", die)


def test_death_in_the_tick_of_ready_of_a_restart_is_followed_by_another(model, tmp_path, monkeypatch):
    """Also of a sampler that is used again: in the second run, its restarts are counted from none."""
    monkeypatch.setattr(model, "max_restarts", 2)

    async def kill_sampler(step):
        if step.n == 1:
            kill(model._run.workers.samplers[0].pid)

    async def kill_twice(step):
        if step.n == 1:
            die_with_ready(monkeypatch, model._run.workers.samplers[0].incarnation + 1)
        await kill_sampler(step)

    for name, act, restarts in (("first", kill_twice, 2), ("second", kill_sampler, 1)):
        assert train(make_trainer(model, tmp_path / name), 4, act) == [1, 2, 3, 4]
        assert len(events_of(tmp_path / name, "restart")) == restarts
        assert audit(tmp_path / name) == 0


def test_learner_killed_while_a_batch_larger_than_its_ring_is_sent_gets_all_of_it_again(model, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.processes.worker.run_blocks.BATCH_QUEUE_BYTES", 1024)

    async def act(step):
        if step.n == 1:
            run = model._run
            os.kill(run.workers.learner.pid, signal.SIGSTOP)  # it reads no more: the next batch gets stuck
            asyncio.get_running_loop().create_task(kill_when_stuck(run))

    async def kill_when_stuck(run):
        while run.learner._outbox.room() >= 256:
            await asyncio.sleep(0.01)
        kill(run.workers.learner.pid)
        while not run.learner.is_away:
            await asyncio.sleep(0.01)
        told.append(trainer.waits_for)

    trainer, told = make_trainer(model, tmp_path / "run"), []
    assert train(trainer, 3, act) == [1, 2, 3]
    assert told == ["the learner, which died and is brought back to version 1"]
    assert [event["worker"] for event in events_of(tmp_path / "run", "restart")] == ["learner 0"]
    assert audit(tmp_path / "run") == 0


def ask(run, group, max_tokens):
    version = run.slots.committed
    return run.samplers[0].generate(
        priority=(0,),
        group=group,
        member=0,
        pick=lambda: Pick(version, run.slots.lease(version)),
        context=[1, 2, 3],
        max_tokens=max_tokens,
        generated=0,
    )


def test_request_that_no_sampler_can_serve_ends_the_run_once(model, tmp_path):
    async def act(step):
        if step.n == 1:
            ask(model._run, group=10**6, max_tokens=100_000).add_done_callback(lambda future: future.exception())

    with pytest.raises(WorkerDied, match="The sampler 0 stopped: Request .* needs 100002 tokens"):
        train(make_trainer(model, tmp_path / "run"), 5, act)
    assert events_of(tmp_path / "run", "restart") == []


def test_death_in_the_tick_of_ready_is_a_death_in_the_start(model, tmp_path, monkeypatch):
    """Of a sampler that was never ready: the one before is gone, as the test above leaves it."""
    handle = model._pool.handle("sampler", 0, MODULES["sampler"], 1)
    handle.discard()
    die_with_ready(monkeypatch, handle.incarnation + 1)
    assert train(make_trainer(model, tmp_path / "run"), 1) == [1]
    (restart,) = events_of(tmp_path / "run", "restart")
    assert "was killed by SIGKILL" in restart["cause"]
    assert audit(tmp_path / "run") == 0


def test_request_whose_trajectory_is_released_gives_its_room_and_place_back(model, tmp_path):
    async def act(step):
        if step.n != 1:
            return
        run = model._run
        pid = run.workers.samplers[0].pid
        os.kill(pid, signal.SIGSTOP)  # so that the release comes before the request is served
        try:
            future = ask(run, group=10**6, max_tokens=100)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            number = max(run.samplers[0]._sent)
            assert run.samplers[0]._sent[number].group == 10**6
            version, held = run.slots.committed, run.slots.num_leases(run.slots.committed)
            run.samplers[0].release(10**6, 0, then=lambda: run.slots.release(version))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert run.slots.num_leases(version) == held  # the sampler may read the slot still
        finally:
            os.kill(pid, signal.SIGCONT)
        segment = await asyncio.wait_for(future, SECONDS)
        assert (segment.tokens, segment.logprobs, segment.stopped) == ([], [], False)
        assert number not in run.samplers[0]._sent and not run.samplers[0]._after

    assert train(make_trainer(model, tmp_path / "run"), 3, act) == [1, 2, 3]


def test_a_halted_learner_is_not_waited_for_when_the_end_was_asked_for_twice(model, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.processes.worker.worker_handle.END_SECONDS", 3600.0)
    trainer, pids = make_trainer(model, tmp_path / "run"), []

    async def act(step):
        pids.append(model._run.workers.learner.pid)
        os.kill(pids[0], signal.SIGSTOP)
        trainer.request_stop()
        asyncio.current_task().cancel()

    with pytest.raises(asyncio.CancelledError):
        train(trainer, 5, act)
    assert len(pids) == 1 and not psutil.pid_exists(pids[0])
    assert audit(tmp_path / "run") == 0


@pytest.mark.filterwarnings("ignore::pipeline.user_warnings.RunWarning")
def test_a_halted_sampler_is_not_waited_for_at_the_end(model, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.processes.worker.worker_handle.END_SECONDS", 3600.0)
    trainer, pids = make_trainer(model, tmp_path / "run"), []

    async def act(step):
        pids.append(model._run.workers.samplers[0].pid)
        os.kill(pids[0], signal.SIGSTOP)
        trainer.request_stop()

    assert train(trainer, 5, act) == [1] and trainer.stopped
    assert not psutil.pid_exists(pids[0])
    assert audit(tmp_path / "run") == 0


@pytest.mark.parametrize("twice", [False, True])
def test_users_code_that_holds_its_process_does_not_hold_up_the_end(model, tmp_path, monkeypatch, twice):
    """Not for long, and not at all where the end was asked for twice."""
    monkeypatch.setattr("pipeline.processes.worker.worker_handle.END_SECONDS", 3600.0)
    monkeypatch.setattr("pipeline.processes.worker.worker_handle.USER_CODE_END_SECONDS", 3600.0 if twice else 0.5)
    one = {"environment_processes": 1}
    trainer, pids = make_trainer(model, tmp_path / "run", env="process_envs:Hanging", sampling=one), []
    collecting = None

    async def stop():
        while not (model._run and any(map(model._run._hosts.at_work, model._run.workers.environments))):
            await asyncio.sleep(0.02)
        pids.extend(handle.pid for handle in model._run.workers.all)
        trainer.request_stop()
        if twice:
            collecting.cancel()

    async def collect():
        nonlocal collecting
        collecting, stopping = asyncio.current_task(), asyncio.ensure_future(stop())
        steps = [step.n async for step in trainer.run(ROWS, steps=2)]
        await stopping
        return steps

    with pytest.raises(asyncio.CancelledError) if twice else contextlib.nullcontext():
        assert asyncio.run(asyncio.wait_for(collect(), SECONDS)) == []
    assert trainer.stopped
    gone = [pid for pid in pids if not psutil.pid_exists(pid)]
    assert len(gone) == 1, "that process, and no other"
    assert audit(tmp_path / "run") == 0


def mapped_blocks(pid):
    with open(f"/proc/{pid}/maps", encoding="utf-8") as maps:
        return [line.split("memfd:")[1].strip() for line in maps if "/memfd:headway" in line]


def test_idle_workers_hold_no_memory_of_the_run_before(pair, tmp_path):
    seen = []

    async def act(step):
        seen.append([len(mapped_blocks(handle.pid)) for handle in handles()])

    def handles():
        return [handle for handle in pair._pool.handles if handle.role in ("learner", "sampler")]

    train(make_trainer(pair, tmp_path / "first"), 1, act)
    pids = [handle.pid for handle in handles()]
    assert len(pids) == 3 and min(seen[0]) > 0
    assert [mapped_blocks(pid) for pid in pids] == [[], [], []]
    train(make_trainer(pair, tmp_path / "second"), 1)
    assert [handle.pid for handle in handles()] == pids  # they were used again


def test_hung_environment_process_is_replaced_for_the_next_run(model, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.processes.environment.environment_watch.GRACE_SECONDS", 0.0)
    monkeypatch.setattr("pipeline.processes.active_run.WATCH_SECONDS", 0.1)
    hanging = make_trainer(model, tmp_path / "hangs", env="process_envs:Hanging", timeout=0.5)
    with pytest.raises(rl.RunError, match=r"on_turn of trajectory .* = 0\.5 s, and could not be cancelled"):
        train(hanging, 1)
    assert train(make_trainer(model, tmp_path / "next", env="process_envs:HeldGuess", arguments=held(tmp_path)), 1)
    assert audit(tmp_path / "next") == 0


def held(tmp_path):
    return {"directory": str(tmp_path)}


def test_error_in_the_delivery_of_a_message_ends_the_run(model, tmp_path):
    async def act(step):
        if step.n == 1:
            model._run.workers.learner.on_message = lambda message: {}["no such key"]

    with pytest.raises(rl.RunError, match="A message could not be handled: KeyError: 'no such key'"):
        train(make_trainer(model, tmp_path / "run"), 5, act)


def test_last_words_of_a_worker_that_is_used_again_are_of_its_present_run(model, tmp_path):
    train(make_trainer(model, tmp_path / "first"), 1)

    async def act(step):
        log = tmp_path / "second" / "logs" / "learner-0.log"
        log.write_text("said in the second run\n")
        if step.n == 1:
            kill(model._run.workers.learner.pid)

    train(make_trainer(model, tmp_path / "second"), 2, act)
    (restart,) = events_of(tmp_path / "second", "restart")
    assert "said in the second run" in restart["cause"]
