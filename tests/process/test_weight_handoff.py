"""Weights that a sampler can't take over: it is replaced, or the run ends; nothing is ever sampled under a version that
was not there whole, and the learner waits for nobody.
"""

import failing_sampler
import pytest
from running import audit, events_of, make_trainer, steps_taken

import pipeline as rl
from pipeline.processes.worker import run_workers
from pipeline.tasks import guess

ROWS = guess.train_rows(0)
SECONDS = 120.0  # bound on a run


@pytest.fixture(scope="module")
def model():
    """Whose sampler fails by plan, and checks a checksum of its weights before every step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(run_workers.MODULES, "sampler", "failing_sampler")
        patch.setenv("PYTHONPATH", failing_sampler.__file__.rpartition("/")[0])
        with rl.Supervisor(device="cpu", check_weights=True, max_restarts=1) as supervisor:
            yield supervisor


def train(model, run_dir, cannot_use, *, steps):
    """Synchronously: a sampler that may lag takes over no more than it comes to, so it might skip the version."""
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "logs" / "cannot-use").write_text(cannot_use)
    return steps_taken(make_trainer(model, run_dir, max_staleness=0), ROWS, steps, seconds=SECONDS)


def versions_sampled(run_dir):
    return {event["version"] for event in events_of(run_dir, "segment")}


def test_sampler_killed_while_it_takes_a_version_over_is_replaced_and_gets_it_whole(model, tmp_path):
    assert train(model, tmp_path / "run", "2 killed", steps=5) == [1, 2, 3, 4, 5]
    assert [event["worker"] for event in events_of(tmp_path / "run", "restart")] == ["sampler 0"]
    assert 2 in versions_sampled(tmp_path / "run")
    assert audit(tmp_path / "run") == 0


def test_version_that_no_sampler_can_take_over_is_in_no_rollout_and_ends_the_run(model, tmp_path):
    with pytest.raises(rl.RunError, match=r"Samplers died 2 times .* RuntimeError: version 3 can't be used"):
        train(model, tmp_path / "run", "3 raises", steps=10)
    assert versions_sampled(tmp_path / "run") == {0, 1, 2}
    started = [event["version"] for event in events_of(tmp_path / "run", "started")]
    assert max(event["version"] for event in events_of(tmp_path / "run", "published")) >= 3 and max(started) >= 3
    assert audit(tmp_path / "run") == 0
