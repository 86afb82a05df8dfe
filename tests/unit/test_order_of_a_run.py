"""What a run does when: a kill between any two lines of a step loses nothing, and nothing keeps a run from being wound
up. Its parts are played, and note what is asked of them.
"""

import asyncio
from contextlib import aclosing
from types import SimpleNamespace

import pytest

from pipeline.training import training_run
from pipeline.training.training_loop import Step
from pipeline.training.training_run import TrainingRun
from pipeline.user_warnings import RunWarning

PARTS = ("evaluations", "rollouts", "checkpoint", "processes")  # in the order in which they are wound up


class Play:
    """A TrainingRun with played parts. raises: by what is asked of a part, the error; notes: what was asked, in order.
    slow: what takes a turn of the event loop.
    """

    def __init__(self, monkeypatch, *, steps=2, every=2, raises=None, slow=()):
        self.notes, self.raises, self.slow = [], raises or {}, slow
        self.settled = None  # the step of an update that had begun when the run ended
        self.scheduler = SimpleNamespace(batches=0, version=0, rules=SimpleNamespace(steps=steps))
        played = {
            "LogBookmark": lambda *_: None,
            "make_scheduler": lambda rules, state: self.scheduler,
            "RunLog": lambda *_: SimpleNamespace(start=lambda: None, step=self.line, end=self.end),
            "Rollouts": lambda *_, **options: SimpleNamespace(),
            "RolloutSaver": lambda *_: SimpleNamespace(start=lambda fail: None, stop_rollouts=self.stop_rollouts),
            "RunSaver": lambda *_: SimpleNamespace(save=self.save, saves=None),
            "TrainingLoop": self.make_loop,
            "RunEvaluations": lambda *_, **options: SimpleNamespace(
                launch=lambda: self.asked("launch"),
                take_metrics=lambda: {"evaluation/wait_seconds": 0.0},
                finish=lambda: self.asked("finish"),
                stop=lambda: self.asked("evaluations"),
            ),
        }
        for name, part in played.items():
            monkeypatch.setattr(training_run, name, part)
        schedule = SimpleNamespace(sample_requests=1, concurrency=1)
        config = SimpleNamespace(
            engine=SimpleNamespace(schedule=schedule),
            checkpointing=SimpleNamespace(rollout_every=1.0, keep_best=0),
            **dict.fromkeys(("group_size", "completion", "oldest_first", "on_failure")),
        )
        model = SimpleNamespace(open_run=self.open, end_run=self.end_run, chat=None, starting="")
        plan = SimpleNamespace(
            engine=SimpleNamespace(model=model, env=None), config=config, rules=None, rows=[], recipe={}, spec=None
        )
        plan.evaluator = plan.validate_batch = None
        due = SimpleNamespace(due=lambda version: version % every == 0, damaged=None)
        files = dict.fromkeys(("directory", "log_dir", "events", "metrics", "results", "trajectories", "journal"))
        files |= {"lock": SimpleNamespace(tell=lambda **live: self.check("lock")), "checkpoints": due, "directory": "."}
        self.run = TrainingRun(plan, SimpleNamespace(**files), None)

    def check(self, asked):
        self.notes.append(asked)
        if asked in self.raises:
            raise self.raises[asked]

    async def asked(self, what):
        self.check(what)
        if what in self.slow:
            await asyncio.sleep(0)
            self.notes.append(f"{what}, all of it")

    async def open(self, *_, **options):
        self.check("open")
        return SimpleNamespace(live={}, fail=None, learner_serves=True, end_soon=lambda error: None)

    def make_loop(self, *_, **options):
        self.check("loop")
        return SimpleNamespace(
            step=self.step, settle=self.settle, request_stop=lambda: None, waits=None, time_account=None
        )

    async def step(self):
        self.check("step")
        self.scheduler.batches += 1
        self.scheduler.version += 1
        return Step(self.scheduler.batches, self.scheduler.version, {})

    async def settle(self):
        return self.settled

    def line(self, step):
        whole = self.settled is step or "evaluation/wait_seconds" in step.metrics
        self.notes.append(f"line {step.n}" if whole else f"half of line {step.n}")

    async def save(self, may_fail=False):
        await self.asked("checkpoint" if not may_fail else f"due checkpoint {self.scheduler.version}")

    async def stop_rollouts(self, *, is_last):
        await self.asked("rollouts")
        self.notes.append(f"rollouts are kept: {is_last}")

    async def end_run(self, run, *, at_once):
        await self.asked("processes")
        self.notes.append(f"processes end at once: {at_once}")

    def end(self, status, state, cause):
        assert (cause is not None) == (status == "failed")
        self.cause = cause
        self.notes.append(f"end: {status}")

    async def train(self, leave_after=None):
        async with aclosing(self.run.steps()) as steps:
            async for step in steps:
                self.notes.append(f"the caller has {step.n}")
                if step.n == leave_after:
                    break

    def wound_up(self):
        """The parts that were, in order, and how the log ends."""
        return [note for note in self.notes if note in PARTS or note.startswith("end: ")]


def test_a_step_has_its_whole_line_before_its_checkpoint_and_the_caller_comes_last(monkeypatch):
    play = Play(monkeypatch, steps=3)
    asyncio.run(play.train())
    first = play.notes.index("launch")
    assert play.notes[first - 1] == "due checkpoint 0"
    assert play.notes[first : play.notes.index("finish")] == [
        *("launch", "step", "line 1", "the caller has 1"),
        *("launch", "step", "line 2", "due checkpoint 2", "the caller has 2"),
        *("launch", "step", "line 3", "the caller has 3"),
    ]
    assert play.wound_up() == [*PARTS, "end: completed"]


def test_an_update_that_had_begun_has_its_line_before_the_last_checkpoint(monkeypatch):
    play = Play(monkeypatch)
    play.settled = Step(2, 2, {})
    asyncio.run(play.train(leave_after=1))
    after = play.notes[play.notes.index("rollouts are kept: True") + 1 :]
    assert after == ["line 2", "checkpoint", "processes", "processes end at once: False", "end: stopped"]


@pytest.mark.parametrize("fails", PARTS)
@pytest.mark.parametrize("error", [OSError("no"), asyncio.CancelledError(), GeneratorExit()])
def test_all_of_a_run_is_wound_up_whatever_becomes_of_a_part(monkeypatch, fails, error):
    play = Play(monkeypatch, raises={fails: error})
    with pytest.raises(type(error)) as caught:
        asyncio.run(play.train())
    assert caught.value is error or type(error) is asyncio.CancelledError  # which asyncio.run makes anew
    # On top of an error there is no other one; and whoever leaves the run, or its loop, wants its weights.
    saved = [] if fails in ("evaluations", "rollouts") and type(error) is OSError else ["checkpoint"]
    status = {OSError: "failed", asyncio.CancelledError: "stopped", GeneratorExit: "completed"}[type(error)]
    status = "completed" if fails == "processes" else status  # all that counts was done
    assert play.wound_up() == ["evaluations", "rollouts", *saved, "processes", f"end: {status}"]


@pytest.mark.parametrize(
    ("fails", "there_is"),
    [
        ("open", []),
        ("lock", ["processes"]),
        ("loop", ["rollouts", "processes"]),
        ("due checkpoint 0", ["evaluations", "rollouts", "checkpoint", "processes"]),
    ],
)
def test_what_a_set_up_that_failed_has_made_is_wound_up(monkeypatch, fails, there_is):
    play = Play(monkeypatch, raises={fails: OSError("no")})
    with pytest.raises(OSError, match="no"):
        asyncio.run(play.train())
    assert play.wound_up() == [*there_is, "end: failed"]


def test_the_second_request_to_stop_saves_nothing_even_while_it_saves(monkeypatch):
    play = Play(monkeypatch, raises={"checkpoint": asyncio.CancelledError()})

    async def train():
        async for _ in play.run.steps():
            play.run.request_stop()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(train())
    assert play.notes[-3:] == ["processes", "processes end at once: True", "end: stopped"]


@pytest.mark.parametrize("fails", PARTS)
def test_what_a_run_has_failed_with_is_told_whatever_its_end_meets(monkeypatch, fails):
    play = Play(monkeypatch, raises={"step": OSError("the reason"), fails: OSError("another")})
    with pytest.raises(OSError, match="the reason"), pytest.warns(RunWarning, match="not ended in order.*: another"):
        asyncio.run(play.train())
    assert (play.notes[-1], str(play.cause)) == ("end: failed", "the reason")


@pytest.mark.parametrize("fails", PARTS)
def test_a_run_that_has_failed_and_is_stopped_says_why(monkeypatch, fails):
    play = Play(monkeypatch, raises={"step": OSError("the reason"), fails: asyncio.CancelledError()})
    told = pytest.warns(RunWarning, match="had failed when it was stopped: the reason")
    with pytest.raises(asyncio.CancelledError), told:
        asyncio.run(play.train())
    assert (play.notes[-1], str(play.cause), play.run.stopped) == ("end: failed", "the reason", False)


def test_a_run_that_is_left_to_asyncio_closes_no_more_than_the_part_that_it_is_at(monkeypatch):
    """asyncio.run cancels what closes the generator, and goes on with that: a second GeneratorExit is thrown in."""
    play = Play(monkeypatch, slow=PARTS)

    async def train():
        async with aclosing(play.run.steps()) as steps:
            async for step in steps:
                yield step

    async def leave():
        async for _ in train():
            break

    asyncio.run(leave())
    assert play.wound_up() == [*PARTS, "end: stopped"]
    assert [note.split(",")[0] for note in play.notes if note.endswith("all of it")] == list(PARTS[1:])
