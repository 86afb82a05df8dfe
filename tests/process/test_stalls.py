"""A run in which nothing moves: stall-<time>.json tells what every process is at, and the run continues or stops."""

import asyncio
import json
import os
import signal

import pytest
from running import audit, events_of, make_trainer, steps_taken

import pipeline as rl
from pipeline.tasks import guess

SECONDS = 60.0  # bound on every run


@pytest.fixture(scope="module")
def model(kept):
    with kept.supervisor(device="cpu") as supervisor:
        yield supervisor


@pytest.fixture(autouse=True)
def short_looks(monkeypatch):
    monkeypatch.setattr("pipeline.stalls.stall_watch.LOOK_SECONDS", 0.1)


def stall_of(run_dir):
    (path,) = run_dir.glob("stall-*.json")
    return json.loads(path.read_text())


@pytest.mark.filterwarnings("ignore::pipeline.user_warnings.RunWarning")
def test_users_code_that_never_lets_go_is_found_in_its_stacks_and_the_run_ends_as_asked(model, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.processes.worker.worker_handle.USER_CODE_END_SECONDS", 0.5)
    rows = [dict(row) for row in guess.train_rows(0)[:24]]
    rows[2]["fatal"] = "backtracking thread"
    trainer = make_trainer(
        model,
        tmp_path / "run",
        env="fatal_envs:Fatal",
        arguments={"directory": str(tmp_path)},
        sampling={"environment_processes": 2},
        groups_per_step=3,
        group_size=3,
        max_staleness=1,
        stall_timeout=3.0,
        on_stall="stop",
    )
    with pytest.raises(rl.RunError, match=r"Nothing has moved in this run for 3 s: it waits: .*on_stall is \"stop\""):
        steps_taken(trainer, rows, 3, seconds=SECONDS)
    found = stall_of(tmp_path / "run")
    stuck = [
        name for name, process in found["processes"].items() if any("in backtrack" in s for s in process["stacks"])
    ]
    assert len(stuck) == 1 and stuck[0].startswith("environment-")
    assert set(found["processes"]) == {"supervisor", "learner", "sampler-0", "environment-0", "environment-1"}
    assert all(process["stacks"] for process in found["processes"].values())
    host = found["queues"]["environments"][int(stuck[0][-1])]
    assert any(call.startswith("on_turn or reward of trajectory 2.0, for ") for call in host["calls"])
    running = found["trainer"]["trajectories"]["running"]
    assert "ended by environment_timeout = 600 s at the latest" in running["2.0"]
    assert found["ledger"]["policy_version"] == found["trainer"]["version"]
    owed = {group for group, _ in found["ledger"]["reservations"]["owed"]}
    assert 2 in owed and found["sockets"]["learner"]["received"] > 0
    assert any("TrajectoryLoop" in line or "AgentLoop" in line or "Rollouts._work" in line for line in found["tasks"])
    assert events_of(tmp_path / "run", "end")[0]["status"] == "failed"
    assert audit(tmp_path / "run") == 0


def test_a_run_that_stalls_and_gets_on_again_completes(model, tmp_path):
    async def act(step):
        if step.n == 2:
            pid = model._run.workers.samplers[0].pid
            os.kill(pid, signal.SIGSTOP)
            asyncio.get_running_loop().create_task(let_go(pid))

    async def let_go(pid):
        while not list((tmp_path / "run").glob("stall-*.json")):
            await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGCONT)

    trainer = make_trainer(model, tmp_path / "run", stall_timeout=3.0)
    with pytest.warns(rl.RunWarning, match=r"Nothing has moved in this run for 3 s.* has been stopped for .*continues"):
        assert steps_taken(trainer, guess.train_rows(0), 12, act, seconds=SECONDS) == list(range(1, 13))
    found = stall_of(tmp_path / "run")
    sampler = found["processes"]["sampler-0"]
    assert sampler["state"] == "T" and sampler["stacks"] == [] and sampler["row"]["seconds_since_heartbeat"] > 2.0
    assert found["queues"]["sampler-0"]["with_sampler"]
    assert "has been stopped for" in found["waits_for"]
    assert audit(tmp_path / "run") == 0


def test_a_caller_who_takes_its_time_between_two_batches_stalls_nothing(model, tmp_path):
    async def act(step):
        await asyncio.sleep(1.5)

    trainer = make_trainer(model, tmp_path / "run", stall_timeout=1.0, on_stall="stop", max_staleness=0)
    assert steps_taken(trainer, guess.train_rows(0), 2, act, seconds=SECONDS) == [1, 2]
    assert not list((tmp_path / "run").glob("stall-*.json"))
