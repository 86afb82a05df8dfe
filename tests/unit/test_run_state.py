"""The journal's records, added up: the same state as the run's own, and a schedule that goes on from it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import JournalError
from pipeline.journal.records import Admitted, BatchRecord, GivenUp, Ready
from pipeline.journal.run_state import RunState
from pipeline.schedule import Batch, Scheduler, ScheduleRules
from pipeline.training.received import Received
from pipeline.training.resumption import make_scheduler
from pipeline.trajectory import Group, Span, Trajectory

SIZE = 3


def trajectory(group, member, row=0):
    spans = [Span("prompt", [1, 2]), Span("generated", [3], 0, 0, [np.float32(-0.5).item()])]
    return Trajectory(group, member, row, spans, reward=float(member))


def result(group, members=range(SIZE), *, version=0, final=True):
    return Group(group, group, version, [trajectory(group, member, group) for member in members], final=final)


def record(step, version, groups, members=None, updated=True):
    return BatchRecord(
        step=step,
        version=version,
        groups=tuple(groups),
        members=members,
        updated=updated,
        lr=1e-3,
        gradient_scale=1.0,
        chunks=(),
        tokens=0,
        masked=0,
        dropped=0,
        age_min=0,
        age_max=0,
    )


def state_of(*records):
    state = RunState()
    for one in records:
        state.apply(one)
    return state


def test_a_batch_counts_when_it_is_finished_and_its_groups_are_gone_from_the_ready_ones_at_once():
    state = state_of(Admitted(0, 5, 0), Admitted(1, 6, 0), Ready(result(1)), Ready(result(0)), record(1, 0, [0]))
    assert (state.version, state.batches, state.consumed) == (0, 0, 1)
    assert [group.group for group in state.training.groups] == [0]
    assert [group.group for group in state.ready] == [1]
    state.finish_batch()
    assert (state.version, state.batches, state.training) == (1, 1, None)


def test_a_batch_without_a_gradient_leaves_the_version():
    state = state_of(Admitted(0, 5, 0), Ready(result(0)), record(1, 0, [0], updated=False))
    state.finish_batch()
    assert (state.version, state.batches) == (0, 1)


def test_the_record_of_the_next_batch_says_that_the_one_before_was_trained():
    state = state_of(*(Admitted(i, i, 0) for i in range(2)), Ready(result(0)), Ready(result(1)), record(1, 0, [0]))
    state.apply(record(2, 1, [1]))
    assert (state.version, state.batches) == (1, 1)


def test_parts_of_a_group_train_in_different_batches_and_it_is_consumed_with_the_last():
    state = state_of(Admitted(0, 0, 0), Ready(result(0, [0, 2], final=False)), record(1, 0, [0], ((2,),)))
    assert state.consumed == 0 and state.outstanding[0].handed_over == {0, 2}
    assert [group.members for group in state.ready] == [[0]]
    state.apply(Ready(result(0, [1])))
    state.apply(record(2, 1, [0, 0], ((0,), (1,))))
    assert state.consumed == 1 and not state.ready
    assert [group.members for group in state.training.groups] == [[0], [1]]
    assert [group.final for group in state.training.groups] == [False, True]


def test_an_empty_last_part_consumes_a_group_that_has_trained():
    state = state_of(Admitted(0, 0, 0), Ready(result(0, [0], final=False)), record(1, 0, [0], ((0,),)))
    state.apply(Ready(result(0, [])))
    assert state.consumed == 1 and not state.outstanding and not state.ready


@pytest.mark.parametrize("is_training", [False, True])
def test_an_empty_last_part_makes_the_part_before_it_the_last_that_a_resumed_run_gets(is_training):
    """Else that run would wait for the rest of the group to its end."""
    rules = ScheduleRules(
        groups_per_step=1, group_size=SIZE, max_staleness=1, steps=9, num_rows=9, stale_policy="mask_span"
    )
    state = state_of(Admitted(0, 0, 0), Ready(result(0, [0, 2], final=False)))
    if is_training:
        state.apply(record(1, 0, [0], ((0, 2),)))
    state.apply(Ready(result(0, [])))
    (left,) = state.training.groups if is_training else RunState.from_plain(state.to_plain()).ready
    assert left.final and left.members == [0, 2]
    scheduler, received = make_scheduler(rules, state), Received()
    received.add(left)
    scheduler.receive(left.group, left.members, left.final)
    received.consume(Batch((0,), ((0, 2),)))
    scheduler.commit(Batch((0,), ((0, 2),)), updated=True)
    assert scheduler._blocked("ready").group is None and not received._untrained


def test_who_has_a_part_already_gets_the_empty_last_part_behind_it():
    """As a resumed run whose members it still lacks are all discarded: that part goes out before its batch is taken
    again.
    """
    rules = ScheduleRules(
        groups_per_step=1, group_size=SIZE, max_staleness=1, steps=9, num_rows=9, stale_policy="mask_span"
    )
    state = state_of(Admitted(0, 0, 0), Ready(result(0, [0, 2], final=False)), record(1, 0, [0], ((0, 2),)))
    scheduler, begun, last = make_scheduler(rules, state), state.training, result(0, [])
    state.apply(Ready(last))
    for one in (*begun.groups, last):
        scheduler.receive(one.group, one.members, one.final)
    assert scheduler._blocked("ready").group is None
    assert [one.final for one in state.training.groups] == [True]


@pytest.mark.parametrize(
    "wrong",
    [
        Admitted(5, 0, 0),
        Ready(result(7)),
        GivenUp("failed", 7, "why", 0),
        record(3, 0, [0]),
        record(1, 4, [0]),
        record(1, 0, [0]),  # not ready
    ],
)
def test_a_record_that_cannot_follow_is_refused(wrong):
    with pytest.raises(JournalError):
        state_of(Admitted(0, 0, 0), wrong)


def test_it_comes_back_from_plain_values():
    state = state_of(
        Admitted(0, 5, 0),
        Admitted(1, 6, 0),
        Admitted(2, 7, 0),
        GivenUp("failed", 1, "why", 4),
        Ready(result(0, [0], final=False)),
        Ready(result(2)),
    )
    assert RunState.from_plain(state.to_plain()) == state


@pytest.mark.parametrize("broken", [{}, {"version": "x"}, None, [], {"version": 0, "batches": 0}])
def test_anything_else_is_refused(broken):
    with pytest.raises(JournalError):
        RunState.from_plain(broken)


class Play:
    """A schedule driven at random, with a state beside it that hears its records only."""

    def __init__(self, rules):
        self.rules = rules
        self.scheduler = Scheduler(rules)
        self.state = RunState()
        self.pulled = []

    def admit(self, admissions):
        for one in admissions:
            self.state.apply(Admitted(one.group, one.row, one.version))

    def finish(self, group):
        one = self.state.outstanding[group]
        ready = Group(group, one.row, one.version, [trajectory(group, member) for member in range(SIZE)])
        self.state.apply(Ready(ready))

    def fail(self, group):
        self.state.apply(GivenUp("failed", group, "why", 0))
        replacement = self.scheduler.replace(group)
        self.admit([replacement] if replacement is not None else [])

    def pull(self):
        """The oldest result that is not pulled."""
        for group in self.state.ready:
            if group.group not in self.pulled:
                self.pulled.append(group.group)
                self.scheduler.receive(group.group)
                return True
        return False

    def resume(self):
        self.scheduler, self.pulled = make_scheduler(self.rules, self.state), []


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_run_that_is_resumed_anywhere_trains_each_group_once_and_keeps_its_bound(data):
    rules = ScheduleRules(
        groups_per_step=data.draw(st.integers(1, 3)),
        group_size=SIZE,
        max_staleness=data.draw(st.integers(0, 3)),
        steps=data.draw(st.integers(1, 8)),
        num_rows=40,
        batch_order=data.draw(st.sampled_from(["completion", "admission"])),
    )
    play = Play(rules)
    trained = []
    while play.scheduler.batches < rules.steps:
        play.admit(play.scheduler.admit())
        while not isinstance(batch := play.scheduler.select(), Batch):
            act = data.draw(st.sampled_from(["finish", "finish", "finish", "fail", "resume"]))
            waiting = list(play.state.outstanding)
            if act == "resume":
                play.resume()
            elif waiting:
                group = data.draw(st.sampled_from(waiting))
                play.fail(group) if act == "fail" else play.finish(group)
            play.pull()
        updated = data.draw(st.booleans())
        play.state.apply(record(play.scheduler.batches + 1, play.scheduler.version, batch.groups, updated=updated))
        trained += batch.groups
        if data.draw(st.booleans()):  # a death within the step: it is taken again
            play.resume()
            for group in play.state.training.groups:
                play.scheduler.receive(group.group)
        play.scheduler.commit(batch, updated)
        play.state.finish_batch()
        assert (play.state.version, play.state.batches) == (play.scheduler.version, play.scheduler.batches)
    assert len(trained) == len(set(trained)) == rules.steps * rules.groups_per_step
    assert play.state.consumed == len(trained)
    assert play.state.admitted == play.scheduler.admitted
