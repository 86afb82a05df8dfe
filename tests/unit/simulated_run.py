"""A run that is only written down: random rollouts under the real schedule, with the real journal, dying at any write.

Its log is buffered as EventLog is; what a death leaves of the buffer is random. A power failure also takes from the
end of both files what was not synced.
"""

import json
import os
import random
from pathlib import Path

from pipeline.journal.complete_log import complete_log
from pipeline.journal.journal_files import Journal, read
from pipeline.journal.log_bookmark import LogBookmark, read_bookmark
from pipeline.journal.log_state import LogState
from pipeline.journal.record_codec import pack_values, unpack_values
from pipeline.journal.recorder import Recorder
from pipeline.journal.records import BatchRecord
from pipeline.journal.run_state import RunState
from pipeline.run_dir.run_files import BOOKMARK
from pipeline.schedule import Batch, Blocked, Scheduler, ScheduleRules
from pipeline.trajectory import Group, Span, Trajectory

MODES = {"wait": ("wait", "truncate"), "carry_over": ("keep", "carry_over"), "discard": ("keep", "discard")}


class Died(BaseException):
    """The process is gone."""


class Files:
    """What is written, and what of it is safe. Dies after `writes_left` more writes."""

    def __init__(self, run_dir: Path, rng: random.Random, writes_left: float, power: bool) -> None:
        self.run_dir, self.rng, self.writes_left, self.power = run_dir, rng, writes_left, power
        self.events, self.metrics = run_dir / "events.jsonl", run_dir / "metrics.jsonl"
        self.pending = b""
        self.now = 0.0
        self.journal = Journal(run_dir)
        self.follow = lambda apply: setattr(self, "_apply", apply)
        self._apply = lambda event: None

    def count(self) -> None:
        self.writes_left -= 1
        if self.writes_left < 0:
            raise Died

    def log(self, event, /, **fields):
        self.count()
        self.now += self.rng.random() / 8
        line = {"t": round(self.now, 6), "event": event} | fields
        self.pending += json.dumps(line).encode() + b"\n"
        self._apply(line)
        if self.rng.random() < 0.1:
            self.flush()

    def flush(self):
        with open(self.events, "ab") as file:
            file.write(self.pending)
        self.pending = b""

    @property
    def num_bytes(self):
        return len(self.pending) + (self.events.stat().st_size if self.events.exists() else 0)

    def sync(self):
        """The log's."""
        self.flush()
        self.log_safe = self.events.stat().st_size

    def die(self):
        """Leave what a death leaves."""
        self.pending = self.pending[: self.rng.randint(0, len(self.pending))]
        self.flush()
        last = sorted((self.run_dir / "journal").glob("*.log"))[-1]
        safe = self.journal._synced
        os.close(self.journal._file)
        if self.power:
            os.truncate(last, self.rng.randint(safe, last.stat().st_size))
            size = self.events.stat().st_size
            lost = self.rng.choice([5, 500, 10**6])
            os.truncate(self.events, self.rng.randint(max(self.log_safe, size - lost), size))
        elif self.rng.random() < 0.5:  # the kill came in the middle of a write
            with open(last, "ab") as file:
                file.write(self.rng.randbytes(self.rng.randint(1, 60)))


class _JournalOf:
    """The real journal, in which each record is a write that may be the last."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.sync, self.begin = files.journal.sync, files.journal.begin

    def append(self, record):
        files = self.files
        files.count()
        files.journal.append(record)
        if files.rng.random() < 0.05 and files.writes_left < float("inf"):  # killed before the event
            files.writes_left = 0


class SimulatedRun:
    """One run directory's story, resumed after each death."""

    def __init__(self, run_dir: Path, seed: int, mode: str, power: bool = False) -> None:
        self.rng = random.Random(seed)
        self.bookmark_rng = random.Random(seed)  # of its own: a seed's story is the same with and without
        self.run_dir, self.power = run_dir, power
        stale_policy, self.on_stragglers = MODES[mode]
        self.size, self.steps = self.rng.randint(2, 3), self.rng.randint(2, 5)
        self.rules = ScheduleRules(
            groups_per_step=self.rng.randint(1, 3),
            group_size=self.size,
            max_staleness=self.rng.randint(0, 2),
            steps=self.steps,
            num_rows=7,
            stale_policy=stale_policy,
            carry_over=mode == "carry_over",
        )
        self.saved = (RunState().to_plain(), 0)  # a checkpoint's state, and the file it names
        self.num_deaths = self.num_restored = self.num_short_cuts = 0

    def play(self, lives: int) -> None:
        """Until it is complete; it dies so many times before."""
        for _ in range(lives):
            try:
                self._live(self.rng.randint(0, 120))
                return
            except Died:
                self.num_deaths += 1
                self.files.die()
        self._live(float("inf"))

    def _live(self, writes: float) -> None:
        self.files = files = Files(self.run_dir, self.rng, float("inf"), self.power)
        if files.events.exists():
            num_steps = len(files.metrics.read_text().splitlines()) if files.metrics.exists() else 0
            logged = self._complete_log(num_steps)
            state = RunState.from_plain(self.saved[0])
            for record in read(self.run_dir, self.saved[1]):
                state.apply(record)
            if state.training is not None and state.training.record.step <= num_steps:
                state.finish_batch()
            files.now, version, resumed = logged.seconds, logged.version, {"resumed": logged.num_runs}
        else:
            logged, state, version, resumed = None, RunState(), 0, {}
        files.journal.begin()
        self.bookmark = LogBookmark(self.run_dir, files, logged or LogState())
        self.recorder = Recorder(_JournalOf(files), files, state)
        self.partial: dict[int, dict[int, Trajectory]] = {}  # members that run or have ended, by group
        self.ended: set[tuple[int, int]] = set()
        self.attempts: dict[tuple[int, int], int] = {}
        self.pins: dict[tuple[int, int], int] = {}
        self.discarded: set[tuple[int, int]] = set()
        self._log_run(version, resumed)
        files.writes_left = writes
        self.scheduler = self._scheduler(state)
        if logged is not None:
            self._give_back(logged, state)
        self._train_all(logged, state)
        counts = {"admitted": state.admitted, "consumed": state.consumed}
        counts |= {name: state.given_up[name] for name in ("failed", "filtered")}
        left = state.admitted - state.consumed - state.given_up.total()
        files.log("end", status="completed", steps=state.batches, outstanding=left, **counts)
        files.flush()
        files.journal.close()

    def _complete_log(self, num_steps):
        """From the bookmark on, if there is one that holds: it has to come to what the whole log says."""
        path = self.run_dir / BOOKMARK
        logged, has_bookmark = complete_log(self.run_dir, num_steps), path.exists()
        bookmark = path.read_bytes() if has_bookmark else b""
        num_decisions = logged.num_decisions
        self.num_short_cuts += has_bookmark and read_bookmark(self.run_dir, num_decisions)[0] > 0
        path.unlink(missing_ok=True)
        assert complete_log(self.run_dir, num_steps) == logged
        if has_bookmark:
            path.write_bytes(bookmark)
        return logged

    def _log_run(self, version, resumed):
        rules = self.rules
        own = {"mode": "async", "max_staleness": rules.max_staleness, "stale_policy": rules.stale_policy}
        own |= {"on_stragglers": self.on_stragglers, "groups_per_step": rules.groups_per_step}
        own |= {"group_size": self.size, "admit_ahead": rules.admit_ahead, "oversample_factor": 1.0}
        self.files.log("run", **own, concurrency=9, steps=self.steps, version=version, **resumed)
        self.files.sync()

    def _scheduler(self, state):
        untrained = [*state.ready, *(state.training.groups if state.training else ())]
        unconsumed = {group: (one.version, set(one.handed_over)) for group, one in state.outstanding.items()}
        for result in untrained:
            unconsumed.setdefault(result.group, (result.version, set(range(self.size))))
        for result in untrained:
            unconsumed[result.group][1].difference_update(result.members)
        scheduler = Scheduler.resumed(
            self.rules,
            version=state.version,
            batches=state.batches,
            admitted=state.admitted,
            replaced=state.given_up.total(),
            unconsumed=unconsumed,
        )
        for result in [*(state.training.groups if state.training else ()), *state.ready]:
            self._receive(scheduler, result, len(unconsumed[result.group][1]) == 0)
        return scheduler

    def _receive(self, scheduler, result, whole):
        whole = self.rules.stale_policy == "wait" or (whole and result.final and len(result.members) == self.size)
        scheduler.receive(result.group, None if whole else result.members, result.final)

    def _give_back(self, logged, state):
        """What the dead process had and nobody saved starts again; some trajectories were saved."""
        for group, one in list(state.outstanding.items()):
            running = self.partial[group] = {}
            left = set(range(self.size)) - one.handed_over
            if one.handed_over and all(logged.member(group, number).state == "discarded" for number in left):
                self._deliver(Group(group, one.row, one.version, [], final=True), False)  # all that it died before
                continue
            for number in left:
                member = logged.member(group, number)
                self.attempts[group, number] = member.attempt
                if member.state == "discarded":
                    self.discarded.add((group, number))
                if member.state in ("discarded", "new"):
                    continue
                trajectory = Trajectory(group, number, one.row, [Span("prompt", [1])], reward=1.0)
                for version, kv_version, tokens in member.segments:
                    trajectory.spans.append(Span("generated", [5] * tokens, version, kv_version, [-0.5] * tokens))
                assert member.tells_all_of(trajectory)
                running[number] = trajectory
                if member.segments and self.rng.random() < 0.3:  # it was saved
                    self.num_restored += 1
                    if member.state == "ended":
                        self.ended.add((group, number))
                else:
                    self._retry(group, number)

    def _train_all(self, logged, state):
        if state.training is not None:
            self._update(state.training.record, logged.due)
        while self.scheduler.batches < self.steps:
            if self.rng.random() < 0.4 and state.training is None:  # a checkpoint
                plain = unpack_values(pack_values(state.to_plain()))
                self.saved = (plain, self.recorder.next_file())
                if self.rng.random() < 0.5:
                    self.files.journal.remove_before(self.saved[1])
                if self.bookmark_rng.random() < 0.7:
                    self.bookmark.save()
            for admission in self.scheduler.admit():
                self.recorder.admitted(admission, self.rng.choice([None, "a-row"]))
            while isinstance(self.scheduler.select(), Blocked):
                self._do_something()
            self._train(self.scheduler.select())

    def _train(self, batch: Batch):
        state, version = self.recorder.state, self.scheduler.version
        members = batch.members or [None] * len(batch.groups)
        trained = [
            one
            for group, part in zip(batch.groups, members, strict=True)
            for result in state.ready
            if result.group == group
            for one in result.trajectories
            if part is None or one.member in part
        ]
        ages = [version - span.version for one in trained for span in one.spans if span.kind == "generated"]
        record = BatchRecord(
            step=self.scheduler.batches + 1,
            version=version,
            groups=batch.groups,
            members=batch.members,
            updated=self.rng.random() < 0.8,
            lr=0.1,
            gradient_scale=1.0,
            chunks=(),
            tokens=sum(one.generated_tokens for one in trained),
            masked=0,
            dropped=0,
            age_min=min(ages),
            age_max=max(ages),
        )
        self.recorder.batch(record)
        self._update(record, "optim" if record.updated else "")

    def _update(self, record, due):
        if due == "optim":
            own = {"from": record.version, "to": record.version + 1}
            self.files.log("optim", step=record.step, **own, seconds=0.1)
        if due:
            self.files.log("published", version=record.version + 1, slot=0, bytes=8, seconds=0.1)
        self.scheduler.commit(Batch(record.groups, record.members), record.updated)
        self.recorder.state.finish_batch()
        self.files.flush()
        self.files.count()
        with open(self.files.metrics, "a") as file:
            file.write(json.dumps({"step": record.step}) + "\n")

    def _do_something(self):
        """One random event of one trajectory, or the end of one group."""
        state, rng = self.recorder.state, self.rng
        group = rng.choice(list(state.outstanding)[: rng.choice([1, 3, 9])])
        one, running = state.outstanding[group], self.partial.setdefault(group, {})
        left = [number for number in range(self.size) if number not in one.handed_over]
        if one.handed_over and self.on_stragglers == "discard":
            self._discard_rest(group, left)
            return
        if not one.handed_over and not self.rules.carry_over and rng.random() < 0.02:
            tokens = sum(trajectory.generated_tokens for trajectory in running.values())
            self.recorder.given_up("failed", group, "it raised", tokens)
            self._replace(group)
            return
        number = rng.choice(left)
        if number not in running:
            self._start(group, number)
        elif (group, number) in self.ended:
            self._hand_over(group, [m for m in left if (group, m) in self.ended], left)
        elif rng.random() < 0.05:
            self._retry(group, number)
        elif rng.random() < 0.6 or not running[number].generated_tokens:
            self._sample(running[number])
        else:
            self.ended.add((group, number))
            tokens = running[number].generated_tokens
            name = {"trajectory": f"{group}.{number}", "group": group}
            self.files.log("trajectory", **name, tokens=tokens, reward=1.0, truncated=None)

    def _start(self, group, number):
        one = self.recorder.state.outstanding[group]
        version = self.scheduler.version
        self.partial[group][number] = Trajectory(group, number, one.row, [Span("prompt", [1])], reward=1.0)
        self.pins[group, number] = version
        name = {"trajectory": f"{group}.{number}", "group": group}
        self.files.log("started", **name, version=self.rng.choice([None, version]), sampler=0)

    def _sample(self, trajectory):
        tokens = self.rng.randint(0, 4)
        generated = [span for span in trajectory.spans if span.kind == "generated"]
        version = generated[0].version if generated else self.pins[trajectory.group, trajectory.member]
        if tokens:
            trajectory.spans.append(Span("generated", [5] * tokens, version, version, [-0.5] * tokens))
        name = {"trajectory": f"{trajectory.group}.{trajectory.member}", "group": trajectory.group}
        own = {"version": version, "kv_version": version, "tokens": tokens}
        self.files.log("segment", **name, **own, cached=0, sampler=0, seconds=0.1)

    def _retry(self, group, number):
        trajectory = self.partial[group].pop(number)
        self.ended.discard((group, number))
        self.attempts[group, number] = self.attempts.get((group, number), 0) + 1
        name = {"trajectory": f"{group}.{number}", "group": group, "attempt": self.attempts[group, number]}
        self.files.log("retry", **name, cause="it died", tokens=trajectory.generated_tokens)

    def _hand_over(self, group, ended, left):
        whole = len(ended) == len(left)
        if not whole and (self.on_stragglers == "truncate" or self.recorder.state.outstanding[group].handed_over):
            return
        running = self.partial[group]
        one = self.recorder.state.outstanding[group]
        if whole and not one.handed_over and not self.rules.carry_over and self.rng.random() < 0.05:
            tokens = sum(running[number].generated_tokens for number in ended)
            self.recorder.given_up("filtered", group, "zero_variance", tokens, was_ready=True)
            self._replace(group)
            return
        result = Group(group, one.row, one.version, [running.pop(number) for number in ended], final=whole)
        self._deliver(result, not one.handed_over)

    def _discard_rest(self, group, left):
        running = self.partial[group]
        one = self.recorder.state.outstanding[group]
        for number in left:
            self.ended.discard((group, number))
            tokens = running.pop(number).generated_tokens if number in running else 0
            if (group, number) in self.discarded:
                continue
            name = {"trajectory": f"{group}.{number}", "group": group}
            self.files.log("discarded", **name, cause="group_discard", tokens=tokens)
            self.discarded.add((group, number))
        self._deliver(Group(group, one.row, one.version, [], final=True), False)

    def _deliver(self, result, whole):
        self.recorder.ready(result)
        self._receive(self.scheduler, result, whole)

    def _replace(self, group):
        self.partial.pop(group, None)
        admission = self.scheduler.replace(group)
        if admission is not None:
            self.recorder.admitted(admission, None)
