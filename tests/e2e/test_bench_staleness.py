"""The staleness bench, tiny: real runs, audited, and JSON as the last line."""

import json

from bench import staleness


def test_tiny_bench(kept, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(staleness, "BOUNDS", (0, 4))  # two tell enough
    options = ("--steps", "3", "--seeds", "1", "--eval-games", "16", "--tool-latency", "fixed:5", "--device", "cpu")
    with kept.serve():
        assert staleness.COMMAND.main([*options, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert [(row["max_staleness"], row["concurrency"]) for row in report["summary"]] == [(0, 64), (4, 320)]
    synchronous, asynchronous = report["arms"]
    assert synchronous["age_max"] == 0 < asynchronous["age_max"] <= 4
    for arm in report["arms"]:
        assert arm["steps_per_second"] > 0 and arm["holdout_games"] == 16
    assert "| `max_staleness` |" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["staleness-0-seed-0", "staleness-4-seed-0"]
