"""The files that a run's supervisor has open, against what was counted before it began."""

import pytest
from running import make_trainer

import pipeline as rl
from pipeline.processes.system_limits import OTHERS, needed_descriptors
from pipeline.tasks import guess
from workers.machine.limits import open_descriptors

NUM_ENVIRONMENT_PROCESSES = 3


@pytest.mark.parametrize("slots", [None, 8])
def test_a_run_has_no_more_files_open_than_were_counted(kept, tmp_path, slots):
    """What processes of earlier tests have open already counts as well, but only once."""
    with kept.supervisor(device="cpu", slots=slots) as model:
        sampling = {"environment_processes": NUM_ENVIRONMENT_PROCESSES}
        trainer = make_trainer(model, tmp_path / "run", sampling=sampling)
        before, seen = open_descriptors(), []
        rl.run(trainer, guess.train_rows(0), steps=2, on_step=lambda step: seen.append(open_descriptors()))
        spec = trainer._check(guess.train_rows(0), 2)[0]
        counted = needed_descriptors(spec, NUM_ENVIRONMENT_PROCESSES, has_endpoint=False)
        # The margin is for moments in which a process starts or a checkpoint is made.
        assert len(seen) == 2 and max(seen) - before <= counted - OTHERS // 4
        assert spec.num_slots == (slots or 4)
