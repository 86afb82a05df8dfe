"""Users' code that misbehaves in a run: what becomes of its trajectory, its row, the others, and the run."""

import asyncio
import contextlib
import functools

import pytest
from running import audit, events_of, make_trainer, metrics_of, steps_taken

import pipeline as rl
from pipeline.processes.environment.log_limit import limit_log
from pipeline.tasks import guess

SECONDS = 120.0  # bound on every run


@pytest.fixture(scope="module")
def model(kept):
    with kept.supervisor(device="cpu") as supervisor:
        yield supervisor


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr("pipeline.processes.environment.environment_watch.GRACE_SECONDS", 0.5)
    monkeypatch.setattr("pipeline.processes.active_run.WATCH_SECONDS", 0.25)


def numbered(count, **marked):
    """Rows that know their number; marked: fields of the third."""
    rows = [dict(row) | {"row": index} for index, row in enumerate(guess.train_rows(0)[:count])]
    rows[2] |= marked
    return rows


def trainer_of(model, run_dir, env, arguments, *, limits=None, timeout=60.0, **options):
    sampling = {"environment_processes": 2} | (limits or {})
    defaults = {"groups_per_step": 4, "group_size": 4, "max_staleness": 1}
    return make_trainer(
        model,
        run_dir,
        env=f"unruly_envs:{env}",
        arguments=arguments,
        timeout=timeout,
        sampling=sampling,
        **(defaults | options),
    )


def train(model, run_dir, env, arguments, rows, steps, act=None, **options):
    return steps_taken(trainer_of(model, run_dir, env, arguments, **options), rows, steps, act, seconds=SECONDS)


def total(run_dir, key):
    return sum(line.get(key, 0) for line in metrics_of(run_dir))


def trained_rows(run_dir):
    row_of = {event["group"]: event["row"] for event in events_of(run_dir, "admitted")}
    return [row_of[group] for event in events_of(run_dir, "batch") for group in event["groups"]]


def test_a_row_that_always_fails_is_tried_so_often_and_dropped_and_counted(model, tmp_path):
    """HR41: 20 rows, of which the third is broken, at each of the two times that the rows come round."""
    run_dir = tmp_path / "run"
    arguments = {"case": "HR41"}
    steps = train(model, run_dir, "Rewarded", arguments, numbered(20), 6, group_size=2, on_failure="replace")
    assert steps == list(range(1, 7))
    failed, retries = events_of(run_dir, "failed"), events_of(run_dir, "retry")
    assert len(failed) == 2 and all("row 2 is broken" in event["cause"] for event in failed)
    assert all("at its attempt 3 (max_retries = 2)" in event["cause"] for event in failed)
    assert {event["group"] for event in retries} == {event["group"] for event in failed}
    for event in failed:  # the first member to use its tries up ends the group
        attempts = [one["attempt"] for one in retries if one["group"] == event["group"]]
        assert 2 <= len(attempts) <= 4 and max(attempts) == 2
    assert set(trained_rows(run_dir)) == set(range(20)) - {2}
    assert total(run_dir, "groups/failed") <= len(failed) and total(run_dir, "recovery/failures") >= 3
    (end,) = events_of(run_dir, "end")
    assert end["failed"] == len(failed) and end["status"] == "completed"
    assert audit(run_dir) == 0


@pytest.mark.parametrize("on_failure", ["stop", "replace"])
def test_when_every_rollout_fails_the_run_ends_with_their_error(model, tmp_path, monkeypatch, on_failure):
    """HR40, HR41: after step 2 a service is down; that is no end of data."""
    monkeypatch.setattr("pipeline.training.intake.MAX_GIVEN_UP", 8)
    run_dir = tmp_path / "run"

    async def act(step):
        if step.n == 2:
            (tmp_path / "broken").touch()

    arguments = {"case": "HR41", "function": "reward_all_bad", "directory": str(tmp_path)}
    with pytest.raises(rl.RunError, match="RuntimeError: service down"):
        train(model, run_dir, "Rewarded", arguments, numbered(20), 50, act, on_failure=on_failure)
    (end,) = events_of(run_dir, "end")
    assert end["status"] == "failed" and 2 <= end["steps"] < 50
    assert audit(run_dir) == 0


@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "blocking"])
def test_a_member_that_never_ends_is_settled_and_every_step_comes(model, tmp_path, waits):
    """HR37: one that waits is truncated by `trajectory_timeout`; one that blocks is ended with its process."""
    run_dir = tmp_path / "run"
    limits = {"trajectory_timeout": 2.0} if waits else {"max_retries": 0}
    options = {"on_failure": "stop" if waits else "replace", "timeout": 60.0 if waits else 1.0}
    steps = train(model, run_dir, "Stuck", {"waits": waits}, numbered(8), 2, limits=limits, **options)
    assert steps == [1, 2]
    if waits:
        (ended,) = [event for event in events_of(run_dir, "trajectory") if event["trajectory"] == "5.3"]
        assert (ended["truncated"], ended["reward"]) == ("trajectory_timeout", 0.5)
        assert total(run_dir, "truncated/trajectory_timeout") == 1 / 16 and events_of(run_dir, "retry") == []
    else:
        (failed,) = events_of(run_dir, "failed")
        assert failed["group"] == 5 and "on_turn of trajectory 5.3 took longer than" in failed["cause"]
        assert {event["attempt"] for event in events_of(run_dir, "retry")} <= {1}
    assert audit(run_dir) == 0


def test_a_member_that_never_ends_does_not_hold_up_a_resumed_run_either(model, tmp_path):
    """HR37: the run is left while that member is in its tool, and gone on with."""
    run_dir = tmp_path / "run"

    async def steps_until(last, resume):
        trainer = trainer_of(model, run_dir, "Stuck", {"waits": True}, limits={"trajectory_timeout": 2.0})
        async with contextlib.aclosing(trainer.run(numbered(8), steps=2, resume=resume)) as steps:
            async for step in steps:
                if step.n == last:
                    return step.n

    assert asyncio.run(asyncio.wait_for(steps_until(1, None), SECONDS)) == 1
    assert asyncio.run(asyncio.wait_for(steps_until(2, run_dir), SECONDS)) == 2
    ends = [event["truncated"] for event in events_of(run_dir, "trajectory") if event["trajectory"] == "5.3"]
    assert ends == ["trajectory_timeout"] and sorted(trained_rows(run_dir)) == list(range(8))
    assert audit(run_dir) == 0


def test_tools_that_block_their_threads_end_at_their_deadline_and_hold_nobody_up(model, tmp_path):
    """HR73: all members of a group at once, each at every attempt; what is left of them ends with their process."""
    run_dir = tmp_path / "run"
    steps = train(
        model,
        run_dir,
        "Blocking",
        {},
        numbered(8, blocks=True),
        2,
        timeout=0.5,
        on_failure="replace",
        limits={"max_retries": 1},
    )
    assert steps == [1, 2]
    (failed,) = events_of(run_dir, "failed")
    assert failed["group"] == 2 and "in tool guess, took longer than environment_timeout = 0.5 s" in failed["cause"]
    own = [event for event in events_of(run_dir, "retry") if event["group"] == 2]
    assert sum("took longer" in event["cause"] for event in own) >= 1
    assert total(run_dir, "recovery/timeouts") == total(run_dir, "recovery/failures") >= 2
    assert 2 not in trained_rows(run_dir)
    assert audit(run_dir) == 0


def test_what_tools_give_and_print_too_much_of_is_cut_and_counted(model, tmp_path, monkeypatch):
    """HR77: of results the model reads the start, of the log the end stays."""
    limit = functools.partial(limit_log, max_bytes=100_000, kept_bytes=1000)
    monkeypatch.setattr("pipeline.processes.environment.environment_watch.limit_log", limit)
    run_dir = tmp_path / "run"

    async def act(step):
        while model._run.num_log_cuts == 0:
            await asyncio.sleep(0.02)

    budget = rl.Budget(max_turn_tokens=1, max_context_tokens=64, tool_output_tokens=4)
    assert train(model, run_dir, "Loud", {}, numbered(8), 2, act, budget=budget) == [1, 2]
    assert total(run_dir, "env/log_cuts") >= 1
    logs = [path.read_bytes() for path in (run_dir / "logs").glob("environment-*.log")]
    assert any(log.startswith(b"[") and b"bytes before this were cut" in log for log in logs)
    assert total(run_dir, "env/tool_results_cut") >= 2 * 16
    assert total(run_dir, "env/tool_calls") == 2 * total(run_dir, "env/tool_errors") >= 2 * 2 * 16
    assert audit(run_dir) == 0


def test_a_reward_that_times_itself_by_an_alarm_is_what_it_says(model, tmp_path):
    """HR74: it runs on its process's main thread, where alarms work."""
    run_dir = tmp_path / "run"
    assert train(model, run_dir, "Rewarded", {"case": "HR74"}, numbered(8), 2) == [1, 2]
    rewards = {event["trajectory"]: event["reward"] for event in events_of(run_dir, "trajectory")}
    assert all(reward == 1.0 + int(name.partition(".")[2]) for name, reward in rewards.items())
    assert audit(run_dir) == 0


def test_a_reward_that_spins_costs_its_own_group(model, tmp_path):
    """HR73: at its deadline its process is ended, and the others that were there start again."""
    run_dir = tmp_path / "run"
    arguments = {"case": "HR73", "function": "reward_spin", "by_member": True}
    steps = train(
        model,
        run_dir,
        "Rewarded",
        arguments,
        numbered(8),
        2,
        timeout=0.5,
        on_failure="replace",
        limits={"max_retries": 0},
    )
    (failed,), (restart,) = events_of(run_dir, "failed"), events_of(run_dir, "restart")
    assert steps == [1, 2] and failed["group"] == 2
    assert failed["cause"].startswith("reward of trajectory 2.0 took longer than environment_timeout = 0.5 s")
    assert failed["cause"] in restart["cause"]
    assert audit(run_dir) == 0


def test_an_evaluation_tries_as_often_and_then_ends_the_run(model, tmp_path):
    rows = numbered(8)
    evaluator = rl.Evaluator([rows[2]], every=100_000, group_size=1, final_group_size=0)
    why = r"evaluation of version 0 failed at row 0: .*row 2 is broken.*attempt 3"
    with pytest.raises(rl.TrajectoryError, match=why):
        train(model, tmp_path / "run", "Rewarded", {"case": "HR41"}, rows[:2] + rows[3:], 100_000, evaluator=evaluator)
    assert events_of(tmp_path / "run", "evaluation")[-1]["status"] == "failed"
    assert audit(tmp_path / "run") == 0


def test_an_evaluation_that_had_to_try_again_counts_it(model, tmp_path):
    """Its row's environment fails until a file is there, which the second attempt finds."""
    rows = numbered(8)
    arguments = {"directory": str(tmp_path)}
    evaluator = rl.Evaluator([rows[2]], every=1, group_size=2, final_group_size=0)
    assert train(model, tmp_path / "run", "Flaky", arguments, rows[:2] + rows[3:], 2, evaluator=evaluator) == [1, 2]
    assert {event["status"] for event in events_of(tmp_path / "run", "evaluation")} == {"completed"}
    assert total(tmp_path / "run", "evaluation/retries") == 2, "the second one waits for the first"
    assert events_of(tmp_path / "run", "retry") == [], "of its rollouts it logs no event"
    assert audit(tmp_path / "run") == 0
