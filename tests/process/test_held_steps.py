"""A run that breaks while its caller holds a step: it says so and ends at once, not when the next step is asked for."""

import asyncio
import contextlib
import os
import signal
import time
import warnings

import pytest
from running import audit, events_of, make_trainer

import pipeline as rl
from pipeline.checkpoints.saved import complete_checkpoints
from pipeline.tasks import guess

SECONDS = 60.0  # bound on every wait
ROWS = guess.train_rows(0)
FAILED = "The run has failed while its caller holds step 2, and ends: "


@pytest.fixture(scope="module")
def model(kept):
    with kept.supervisor(device="cpu") as supervisor:
        yield supervisor


async def until(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        await asyncio.sleep(0.01)


def hold_second_step(trainer, break_it, then, steps=5, rows=ROWS):
    """Breaks the run after its second step, and asks for no step until `end` is logged; then awaits `then()`."""

    async def collect():
        numbers = []
        steps_of_run = trainer.run(rows, steps=steps)
        async for step in steps_of_run:
            numbers.append(step.n)
            if step.n == 2:
                break_it()
                await until(lambda: events_of(trainer.run_dir, "end"))
                if await then() == "leave":
                    await steps_of_run.aclose()
                    return numbers
        return numbers

    return asyncio.run(collect())


def kill_sampler(model):
    os.kill(model._run.workers.samplers[0].pid, signal.SIGKILL)


async def go_on():
    """The caller asks for the next step."""


def test_a_run_whose_restarts_are_used_up_tells_who_holds_a_step_and_has_ended_when_the_next_is_asked_for(
    model, tmp_path, monkeypatch
):
    monkeypatch.setattr(model, "max_restarts", 0)
    trainer = make_trainer(model, tmp_path / "run")

    async def look():
        assert model.active is None  # the memory is free, and the processes may serve another run
        assert trainer.waits_for.startswith("its caller, who holds a step; the run has failed")
        assert complete_checkpoints(tmp_path / "run")[0].version == 2
        (step,) = [step async for step in make_trainer(model, tmp_path / "other").run(ROWS, steps=1)]
        assert step.n == 1

    died = "Samplers died 1 times within ten minutes, but max_restarts is 0"
    with pytest.warns(rl.RunWarning, match=FAILED + died), pytest.raises(rl.RunError, match=died):
        hold_second_step(trainer, lambda: kill_sampler(model), look)
    (end,) = events_of(tmp_path / "run", "end")
    assert (end["status"], end["steps"]) == ("failed", 2) and end["cause"].startswith(died)
    assert not trainer.stopped and audit(tmp_path / "run") == 0


def test_who_leaves_the_loop_of_a_run_that_has_failed_meanwhile_gets_no_error_beside_the_warning(model, tmp_path):
    async def leave():
        return "leave"

    trainer = make_trainer(model, tmp_path / "run")
    with pytest.warns(rl.RunWarning, match=f"{FAILED}enough"):
        assert hold_second_step(trainer, lambda: model._run.fail(rl.RunError("enough")), leave) == [1, 2]
    assert not trainer.stopped  # nobody had asked for that
    assert [event["status"] for event in events_of(tmp_path / "run", "end")] == ["failed"]


def test_groups_that_all_fail_are_told_to_who_holds_a_step(model, tmp_path):
    """No process has died: the run has nothing left that it could train."""
    trainer = make_trainer(model, tmp_path / "run")
    hopeless = rl.RunError("256 groups in a row were given up")
    with pytest.warns(rl.RunWarning, match=FAILED + str(hopeless)), pytest.raises(rl.RunError, match=str(hopeless)):
        hold_second_step(trainer, lambda: trainer._run._loop.intake.close(hopeless), go_on)
    assert audit(tmp_path / "run") == 0


def test_who_asks_for_the_next_step_at_once_gets_the_error_alone(model, tmp_path, recwarn):
    def fail(step):
        model._run.fail(rl.RunError("enough"))

    with pytest.raises(rl.RunError, match="enough"):
        rl.run(make_trainer(model, tmp_path / "run"), ROWS, steps=3, on_step=fail)
    assert [str(one.message) for one in recwarn if one.category is rl.RunWarning] == []
    assert events_of(tmp_path / "run", "end")[0]["cause"] == "enough"


@pytest.mark.parametrize("leaves_by", ["break", "an error"])
@pytest.mark.parametrize("is_kept", [False, True], ids=["loop alone", "generator in a variable"])
def test_who_leaves_the_loop_last_of_all_has_a_run_that_ended_in_order(model, tmp_path, capfd, leaves_by, is_kept):
    """asyncio.run ends the loop at once, and with it what closes the generator: that still saves, and says nothing."""
    kept = []

    async def leave():
        if is_kept:
            kept.append(make_trainer(model, tmp_path / "run").run(ROWS, steps=9))
        async for step in kept[0] if is_kept else make_trainer(model, tmp_path / "run").run(ROWS, steps=9):
            if step.n == 2:
                if leaves_by == "an error":
                    raise ValueError("the caller's own")
                break

    with pytest.raises(ValueError, match="own") if leaves_by == "an error" else contextlib.nullcontext():
        asyncio.run(leave())
    (end,) = events_of(tmp_path / "run", "end")
    assert (end["status"], end["steps"], "cause" in end) == ("stopped", 2, False)
    saved = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert saved == {"version-0", f"version-{events_of(tmp_path / 'run', 'published')[-1]['version']}"}
    assert (model.active, capfd.readouterr().err) == (None, "")


@pytest.mark.parametrize("when", ["a step is held", "a step is awaited"])
def test_who_leaves_while_the_learner_is_brought_back_waits_for_nobody(model, tmp_path, when):
    """asyncio.run cancels what brings it back, too: nobody may wait for that any more."""
    trainer = make_trainer(model, tmp_path / "run")
    kept, killed = [], []

    async def take_steps():
        kept.append(trainer.run(ROWS, steps=1000))
        async for step in kept[0]:
            if step.n == 2:
                killed.append(model._run.workers.learner.pid)
                os.kill(killed[0], signal.SIGKILL)
                if when == "a step is held":
                    await until(lambda: model._run.learner.is_away)
                    raise ValueError("the caller's own")

    async def leave():
        if when == "a step is held":
            await take_steps()
        taking = asyncio.create_task(take_steps())
        await until(lambda: killed and model._run.learner.is_away)
        assert not taking.done()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rl.RunWarning)
        with pytest.raises(ValueError, match="own") if when == "a step is held" else contextlib.nullcontext():
            asyncio.run(asyncio.wait_for(leave(), SECONDS))
    assert events_of(tmp_path / "run", "end")[-1]["status"] == "stopped" and model.active is None
    assert audit(tmp_path / "run") == 0


def test_a_cancellation_as_the_processes_are_up_leaves_nothing_of_the_run(model, tmp_path, monkeypatch):
    original = model.open_run

    async def go_on():
        training = asyncio.create_task(anext(aiter(make_trainer(model, tmp_path / "run").run(ROWS, steps=1))))

        async def open_run(*arguments, **options):
            run = await original(*arguments, **options)
            asyncio.get_running_loop().call_soon(training.cancel)
            return run

        monkeypatch.setattr(model, "open_run", open_run)
        with pytest.raises(asyncio.CancelledError):
            await training
        monkeypatch.undo()

    asyncio.run(go_on())
    assert model.active is None
    assert len(rl.run(make_trainer(model, tmp_path / "next"), ROWS, steps=1)) == 1
