"""What a learner that comes back finds of the slots: given back meanwhile, or half told of."""

from learner_in_process import InProcess, Recorded, Training, some_rows, spec
from test_learner_recovery import batches, run

from shm.ledger import State


def test_holds_that_are_given_back_while_the_learner_comes_back_leave_no_version_that_is_not_there():
    """Where slots die with it: as by a sampler's end, which gives back what its requests held."""

    async def give_back():
        with Training(spec(num_slots=4), InProcess([("stepped", 1, True)]), Recorded()) as training:
            training.blocks.slots_outlive_learner = False
            await training.learner.start(0, ())
            for n, chunks in batches(3).items():
                if n == 2:
                    training.slots.lease(1)
                await training.step(n, chunks)
            for slot in range(4):
                training.blocks.ledger.write_slot(slot, -1, State.EMPTY)
            training.workers.kill()
            assert sorted(training.slots.resident) == [1, 3]
            training.slots.release(1)
            await training.settled()
            assert training.events.restarts == 2
            for version in training.slots.resident:
                found = training.blocks.ledger.slot(training.slots.slot_of(version))
                assert (found.version, found.state) == (version, State.READY)

    run(give_back())


def test_one_that_was_killed_while_it_told_of_a_slot_is_followed_by_one_that_fills_it(monkeypatch):
    monkeypatch.setattr("shm.ledger._NAPS", 0)  # nobody makes the record whole meanwhile

    async def tear():
        with Training(spec(), InProcess(), Recorded()) as training:
            shape = training.blocks.ledger.shape
            training.blocks.ledger._words[shape.slots_word] += 1  # of slot 0, which the first version goes into
            await training.learner.start(0, ())
            assert training.blocks.ledger.slot(0).state is State.READY
            await training.step(1, [some_rows(1, version=0)])

    run(tear())
