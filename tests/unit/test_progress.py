"""One live line on a terminal, plain lines elsewhere, and a summary that names the files."""

import errno
import io

import pytest
from rich.console import Console

from pipeline.commands.progress import PLAIN_SECONDS, WAIT_SECONDS, Progress, step_line
from pipeline.evaluation.evaluator import Evaluation

METRICS = {
    "reward/mean": 0.25,
    "sampling/generated_tokens_per_second": 5120.4,
    "staleness/span_age_p50": 1.0,
    "staleness/span_age_p99": 2.0,
    "staleness/span_age_max": 2.0,
    "staleness/wait_seconds": 0.5,
}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def make(steps=3, terminal=False, width=200, waits_for=lambda: "", **options):
    output, clock = io.StringIO(), Clock()
    console = Console(file=output, force_terminal=terminal, width=width, highlight=False)
    options |= {"waits_for": waits_for, "console": console, "clock": clock}
    progress = Progress(steps=steps, mode="async", concurrency=192, **options)
    return progress, output, clock


def test_line_holds_step_reward_speed_ages_and_waits():
    assert step_line("async", 12, 400, 4.321, METRICS) == (
        "async 12/400 | reward 0.250 | 4.32 steps/s | 5120 tokens/s | age p50 1 p99 2 max 2 | bound waited 0.50 s"
    )
    assert step_line("sync", 1, 2, 1.0, {}) == "sync 1/2 | 1.00 steps/s"


def test_plain_lines_come_at_most_every_other_second_but_always_for_the_last_step():
    progress, output, clock = make(steps=4)
    for n, now in enumerate((0.5, 1.0, 0.5 + PLAIN_SECONDS, 2.6), 1):
        clock.now = now
        progress.show(n, METRICS)
    progress.close("completed", None)
    lines = output.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in lines[:3]] == ["async 1/4", "async 3/4", "async 4/4"]
    assert lines[3] == "completed after 4 of 4 steps in 2.6 s"
    assert lines[4] == "reward: 0.250 over the first 4 steps, 0.250 over the last 4; 1.54 steps/s"


def test_it_names_whom_the_trainer_waits_for():
    progress, output, _ = make(waits_for=lambda: "group 7 [tool]")
    progress.show(1, METRICS)
    progress.close("failed", None)
    assert output.getvalue().splitlines()[0].endswith("| waits: group 7 [tool]")


def test_a_long_wait_is_told_again_and_again_on_no_terminal():
    progress, output, clock = make(waits_for=lambda: "group 7 [tool]")
    progress.show(1, METRICS)
    for now in (WAIT_SECONDS - 1, WAIT_SECONDS, WAIT_SECONDS + 1, 2 * WAIT_SECONDS):
        clock.now = now
        progress.remind()
    waits = [line.split(" | waits: ")[1] for line in output.getvalue().splitlines()]
    assert waits == ["group 7 [tool]", "group 7 [tool] | 10 s since step 1", "group 7 [tool] | 20 s since step 1"]


def test_a_long_start_tells_how_long_it_takes():
    progress, output, clock = make(waits_for=lambda: "the processes to start")
    clock.now = WAIT_SECONDS
    progress.remind()
    assert output.getvalue() == "async: starting | waits: the processes to start | 10 s since the start\n"


def test_a_long_wait_is_legible_on_a_narrow_terminal():
    progress, output, clock = make(terminal=True, width=80, waits_for=lambda: "the learner, which trains batch 2")
    clock.now = 1.0
    progress.show(1, METRICS)
    clock.now += WAIT_SECONDS
    progress.close("completed", None)
    shown = "".join(output.getvalue().splitlines())
    assert "the learner, which trains batch 2 | 10 s since step 1" in shown


def test_steps_that_take_long_are_told_in_seconds_a_step():
    assert step_line("async", 2, 3, 0.1, {}) == "async 2/3 | 0.10 steps/s"
    assert step_line("async", 2, 3, 1 / 83, {}) == "async 2/3 | 83 s/step"
    progress, output, clock = make()
    clock.now = 40.0
    progress.show(1, METRICS)  # the start-up is in it, so it tells no speed
    assert output.getvalue().startswith("async 1/3 | reward 0.250 | 5120 tokens/s | ")
    progress.close("stopped", None)
    assert output.getvalue().splitlines()[-1].endswith("; 40 s/step")


def test_summary_tells_of_batches_without_a_gradient():
    progress, output, _ = make()
    for n, updated in enumerate((0, 1, 0), 1):
        progress.show(n, METRICS | {"train/updated": updated})
    progress.close("completed", None)
    wanted = "no gradient: 2 of 3 batches left the weights as they were (equal rewards in each group)"
    assert output.getvalue().splitlines()[-1] == wanted


def test_nothing_is_told_while_the_trainer_waits_for_nobody():
    progress, output, clock = make()
    clock.now = 10 * WAIT_SECONDS
    progress.remind()
    assert output.getvalue() == ""


def test_summary_names_the_files_that_exist(tmp_path):
    (tmp_path / "events.jsonl").write_text("")
    (tmp_path / "logs").mkdir()
    progress, output, _ = make()
    progress.close("stopped", tmp_path)
    lines = output.getvalue().splitlines()
    assert lines[0].startswith("stopped after 0 of 3 steps") and lines[1] == f"files: {tmp_path}"
    assert [line.split()[0] for line in lines[2:]] == ["events.jsonl", "logs"]


def test_summary_tells_the_latest_evaluation():
    progress, output, _ = make()
    evaluation = Evaluation(900, 900, 64, 512, 0.9375, 0.24, 0.03, 8.5, 0.0, 3.5)
    progress.close("completed", None, evaluation)
    wanted = "evaluation: reward 0.938 of 512 trajectories on 64 held-out rows, at version 900"
    assert output.getvalue().splitlines()[1] == wanted


@pytest.mark.parametrize("left_unsaved", [False, True])
def test_summary_tells_of_what_the_last_checkpoint_lacks(tmp_path, left_unsaved):
    progress, output, _ = make()
    progress.close("stopped", tmp_path, checkpoint=tmp_path / "version-7", left_unsaved=left_unsaved)
    lines = output.getvalue().splitlines()
    assert lines[2 + left_unsaved].startswith("to go on: ")
    assert ("is trained again when the run is resumed" in lines[2]) == left_unsaved


@pytest.mark.parametrize("lost", ["config.json", "checkpoints"])
def test_what_cannot_be_read_of_the_run_hides_no_error_of_its_own(tmp_path, lost):
    for name in {"config.json", "checkpoints"} - {lost}:
        (tmp_path / name).touch()
    (tmp_path / lost).symlink_to(lost)  # nobody comes to its end
    progress, output, _ = make()
    progress.close("failed", tmp_path)
    assert output.getvalue().splitlines()[:2] == ["failed after 0 of 3 steps in 0.0 s", f"files: {tmp_path}"]


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(errno.ENOSPC, "No space left on device")])
def test_lines_that_nobody_gets_hide_no_error_of_the_run(tmp_path, error):
    progress, _, _ = make()

    def refuse(text, **options):
        raise error

    progress._console.print = refuse
    progress.close("failed", tmp_path)
    with pytest.raises(type(error)):  # a run that has ended well says that its output was lost
        progress.close("completed", tmp_path)


def test_summary_names_the_checkpoint(tmp_path):
    checkpoint = tmp_path / "checkpoints" / "version-7"
    checkpoint.mkdir(parents=True)
    progress, output, _ = make()
    progress.close("completed", tmp_path, checkpoint=checkpoint)
    lines = output.getvalue().splitlines()
    assert lines[1] == f"checkpoint: {checkpoint}"
    assert lines[3].split() == ["checkpoints", "the", "weights:", "headway", "export", "RUN_DIR", "OUT_DIR"]


def test_terminal_shows_one_line_that_is_rewritten():
    progress, output, clock = make(terminal=True)
    for n in (1, 2, 3):
        clock.now = n
        progress.show(n, METRICS)
    progress.close("completed", None)
    text = output.getvalue()
    assert "async 3/3 | reward 0.250 | 1.00 steps/s" in text
    assert text.endswith("\n") and text.count("async") - text.count("\x1b[2K") == 1  # each redraw erases the one before
    assert "completed after 3 of 3 steps" in text


def test_summary_shows_the_concurrency_achieved_beside_the_one_asked_for():
    progress, output, clock = make()
    for n, (seconds, running) in enumerate(((1.0, 100.0), (3.0, 60.0)), 1):
        clock.now += seconds
        progress.show(n, METRICS | {"sampling/interval_seconds": seconds, "sampling/concurrency_mean": running})
    progress.close("completed", None)
    assert output.getvalue().splitlines()[-1] == "concurrency: 70.0 trajectories on average, of 192 asked for"


def test_a_resumed_run_counts_its_steps_from_where_it_was():
    progress, output, clock = make(steps=6, steps_before=4, waits_for=lambda: "the processes to start")
    clock.now = WAIT_SECONDS
    progress.remind()
    for n in (5, 6):
        clock.now += 0.5
        progress.show(n, METRICS)
    progress.close("completed", None)
    lines = output.getvalue().splitlines()
    assert lines[0] == "async: resuming after step 4 | waits: the processes to start | 10 s since the start"
    assert [line.split(" | ")[0] for line in lines[1:3]] == ["async 5/6", "async 6/6"]
    assert lines[3] == "completed after 6 of 6 steps, 2 of them since the resume, in 11.0 s"


def test_a_run_that_was_refused_before_it_began_shows_nothing_of_itself():
    progress, output, _ = make(steps_before=2)
    progress.close("failed", None)
    assert output.getvalue() == ""


def test_a_run_that_did_not_complete_tells_how_to_go_on(tmp_path):
    run_dir, command = tmp_path / "a run", f"to go on: python run.py --resume '{tmp_path}/a run'"
    for status, checkpoint, told in (
        ("stopped", run_dir / "checkpoints" / "version-3", [command]),
        ("failed", run_dir / "checkpoints" / "version-3", [command]),
        ("completed", run_dir / "checkpoints" / "version-3", []),
        ("failed", None, []),
    ):
        progress, output, _ = make()
        progress.close(status, run_dir, checkpoint=checkpoint)
        assert [line for line in output.getvalue().splitlines() if line.startswith("to go on")] == told
