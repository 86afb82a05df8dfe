"""docs/your-environment.md as a user follows it, from its first block to its last, on a random small model."""

import json

import pytest

from bench.small_models import write_small_model
from tests.e2e.page_runner import MODEL, blocks, file_of, follow, make_checkout, read_page

PAGE = read_page("your-environment.md")
LANGUAGES = ("sh", "python", "toml")


@pytest.fixture(scope="module")
def followed(kept, tmp_path_factory):
    """The directory after the whole page, with what each block printed."""
    directory = tmp_path_factory.mktemp("checkout")
    make_checkout(directory)
    texts = [block for _, block in blocks(PAGE, *LANGUAGES)]
    write_small_model(directory / MODEL, corpus=texts, num_merged=200)
    return directory, [follow(block, language, directory) for language, block in blocks(PAGE, *LANGUAGES)]


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def test_every_run_of_the_page_trains_all_its_steps(followed):
    directory, _ = followed
    for name in ("sums", "orders", "chain", "mix", "agent"):
        end = lines(directory / "runs" / name / "events.jsonl")[-1]
        assert (end["event"], end["status"], end["steps"]) == ("end", "completed", 2), name


def test_the_data_command_describes_the_file_and_trajectories_are_where_the_page_says(followed):
    directory, shown = followed
    assert "6 rows" in next(text for text in shown if text is not None)
    logged = lines(directory / "runs" / "sums" / "trajectories.jsonl")
    assert {line["id"] for line in logged} <= {f"s{number}" for number in range(1, 7)}
    assert all("What is" in line["messages"][0]["content"] for line in logged)


def test_the_mix_trains_groups_of_both_environments(followed):
    directory, _ = followed
    admitted = [e for e in lines(directory / "runs" / "mix" / "events.jsonl") if e["event"] == "admitted"]
    from_sums = sum(str(event["id"]).startswith("s") and "-" not in str(event["id"]) for event in admitted)
    assert abs(from_sums - 0.75 * len(admitted)) <= 1


def test_an_agents_calls_are_what_was_trained(followed):
    directory, _ = followed
    events = lines(directory / "runs" / "agent" / "events.jsonl")
    trajectories = [event for event in events if event["event"] == "trajectory"]
    segments = [event for event in events if event["event"] == "segment"]
    assert len(trajectories) >= 8
    assert sum(event["tokens"] for event in trajectories) <= sum(event["tokens"] for event in segments)
    assert all(sum(s["trajectory"] == t["trajectory"] for s in segments) == 2 for t in trajectories)


def test_files_that_the_page_shows_are_named_in_its_text():
    for language, block in blocks(PAGE, "python", "toml"):
        path = file_of(block)
        if language == "toml":
            assert path, block
        if path is not None:
            assert PAGE.count(path) > 1, path
