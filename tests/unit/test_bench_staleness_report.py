"""The staleness bench without runs: its arms, its paired summary, and the table that the docs show."""

import pytest

from bench.staleness import BOUNDS, COMMAND, Plan, arms_of, config_of
from bench.staleness_report import StalenessArm, caption, docs_section, markdown_table, summary
from pipeline.commands.make_run_config import parse as parse_run
from pipeline.errors import ConfigError


def arm(seed, bound, speed, reward):
    return StalenessArm(
        seed=seed,
        max_staleness=bound,
        concurrency=64 * (1 + bound),
        steps_per_second=speed,
        seconds=100 / speed,
        bound_wait_frac=0.1 * bound,
        age_mean=0.9 * bound,
        age_p99=bound,
        age_max=bound,
        reward_last=reward,
        holdout_reward=reward,
        holdout_games=1024,
        load=0.0,
    )


# Seed 1 ran while the machine was twice as fast: only a paired ratio doesn't show it.
ARMS = [arm(0, 0, 1.0, 0.8), arm(0, 2, 2.5, 0.7), arm(1, 2, 6.0, 0.9), arm(1, 0, 2.0, 0.8)]


def test_every_seed_runs_every_bound_and_each_begins_in_turn():
    arms = arms_of(Plan(seeds=4))
    assert sorted(arms) == sorted((bound, seed) for seed in range(4) for bound in BOUNDS)
    assert [bound for bound, seed in arms[:: len(BOUNDS)]] == list(BOUNDS)


def test_bounds_0_and_2_are_the_modes_of_run_py(tmp_path):
    for bound, mode in ((0, "sync"), (2, "async")):
        ours = config_of(Plan(tool_latency="none", device="cpu"), bound, 0, tmp_path)
        theirs = parse_run(["--mode", mode, "--device", "cpu", "--run-dir", ours.run_dir])
        schedule = theirs.trainer.engine.schedule
        assert (ours.trainer.max_staleness, ours.trainer.engine.schedule.concurrency) == (bound, schedule.concurrency)
        if mode == "async":
            assert ours == theirs


def test_ratios_and_differences_are_of_the_same_seed():
    synchronous, asynchronous = summary(ARMS)
    assert synchronous["steps_per_second_ratio"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert asynchronous["steps_per_second_ratio"] == {"median": 2.75, "min": 2.5, "max": 3.0}
    difference = asynchronous["holdout_reward_difference"]
    assert difference == pytest.approx({"median": 0.0, "min": -0.1, "max": 0.1})
    assert asynchronous["runs"] == 2


def test_table_shows_medians_and_ranges():
    *_, last = markdown_table(summary(ARMS)).splitlines()
    assert last == "| 2 | 192 | 4.25 (2.50 to 6.00) | 2.75x | 1.80 | 20% | 0.800 (0.700 to 0.900) |"


def test_docs_say_where_the_numbers_come_from():
    report = {
        "task": "guess",
        "options": {"steps": 900, "seeds": 2, "tool_latency": "fixed:5"},
        "device": "cpu",
        "cores": 2,
        "arms": [{"holdout_games": 1024}],
        "summary": summary(ARMS),
    }
    assert "900 steps of `guess` with seeds 0 to 1, tool latency fixed:5, cpu, 2 cores" in caption(report)
    assert markdown_table(report["summary"]) in docs_section(report, "COMMAND")
    assert "`COMMAND`" in docs_section(report, "COMMAND") and "`COMMAND`" in docs_section(None, "COMMAND")


def test_bad_options_are_refused_before_anything_runs():
    for arguments in (["--steps", "1"], ["--seeds", "0"], ["--tool-latency", "long"], ["--bounds", "3"]):
        with pytest.raises(ConfigError, match=arguments[0]):
            COMMAND.parse(arguments)
