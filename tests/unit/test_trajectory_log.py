"""trajectories.jsonl: which trajectories it tells of, what of them, and that any text comes back as it was."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from played_rollouts import Played as PlayedRollouts
from played_trajectory import MORE, STOP, Environment, Played, go_on, segment

from pipeline.commands.make_run_config import parse
from pipeline.data.mixed_rows import mix_rows
from pipeline.errors import ConfigError
from pipeline.run_dir.json_lines import JsonLines
from pipeline.training.trajectory_log import TrajectoryLog, as_json
from pipeline.trajectory import Group, Span, Trajectory

ROWS = [{"id": f"row {index}"} for index in range(8)]


def read(path):
    """As a strict reader has it: bytes cut at line feeds, and no constants beyond JSON's."""

    def refuse(constant):
        raise ValueError(constant)

    *lines, rest = path.read_bytes().split(b"\n")
    assert rest == b"", "the last line has an end"
    return [json.loads(line, parse_constant=refuse) for line in lines]


def log_batch(path, *, log_trajectories, step=8, groups=4, size=3, rows=ROWS, lost=()):
    """The lines of one batch at version 5, whose trajectories are those that the rollouts would have kept."""
    config = SimpleNamespace(log_trajectories=log_trajectories, groups_per_step=groups, group_size=size)
    lines = JsonLines(path)
    log = TrajectoryLog(lines, rows, config)
    batch = []
    for number in range(10, 10 + groups):
        members = [Trajectory(number, member, number % 8, reward=0.5, num_turns=1) for member in range(size)]
        for one in members:
            one.spans = [Span("prompt", [1, 2]), Span("generated", [3, 4, 5], 4, 4), Span("generated", [6], 5, 5)]
            one.conversation = [{"role": "user", "content": "?"}] if log.wants(number, one.member) else None
        batch.append(Group(number, number % 8, 4, [one for one in members if (number, one.member) not in lost]))
    advantages = [[group.group + 0.5 for _ in group.trajectories] for group in batch]
    log.write(step, 5, batch, advantages)
    lines.close()
    return read(path)


def test_a_line_tells_what_the_trajectory_was_and_earned(tmp_path):
    (line,) = log_batch(tmp_path / "trajectories.jsonl", log_trajectories=1)
    assert line == {
        "step": 8,
        "group": 10,
        "member": 1,
        "row": 2,
        "id": "row 2",
        "reward": 0.5,
        "advantage": 10.5,
        "truncated": None,
        "turns": 1,
        "tokens": 4,
        "segments": [{"tokens": 3, "version": 4, "age": 1}, {"tokens": 1, "version": 5, "age": 0}],
        "messages": [{"role": "user", "content": "?"}],
    }


def test_of_a_mix_a_line_names_the_environment(tmp_path):
    rows = mix_rows({"sums": [{}] * 4, "games": [{"id": "g"}] * 4})
    lines = log_batch(tmp_path / "trajectories.jsonl", log_trajectories=4, rows=rows)
    assert [(line["row"], line["environment"]) for line in lines] == [
        (2, "sums"),
        (3, "sums"),
        (4, "games"),
        (5, "games"),
    ]


def test_a_row_without_an_id_has_none_in_its_line(tmp_path):
    (line,) = log_batch(tmp_path / "trajectories.jsonl", log_trajectories=1, rows=[{}] * 8)
    assert "id" not in line and line["row"] == 2


@pytest.mark.parametrize(
    ("log_trajectories", "told"),
    [
        (1, [(10, 1)]),
        (2, [(10, 1), (12, 1)]),  # spread over the groups
        (4, [(10, 1), (11, 2), (12, 1), (13, 2)]),
        (12, [(group, member) for group in range(10, 14) for member in range(3)]),
    ],
)
def test_so_many_are_told_of_from_different_groups_and_members(tmp_path, log_trajectories, told):
    lines = log_batch(tmp_path / "trajectories.jsonl", log_trajectories=log_trajectories)
    assert [(line["group"], line["member"]) for line in lines] == told


def test_the_next_batch_tells_of_other_groups(tmp_path):
    told = [log_batch(tmp_path / f"{step}", log_trajectories=1, step=step)[0]["group"] for step in range(8, 13)]
    assert told == [10, 11, 12, 13, 10]


def test_one_that_was_left_out_of_its_group_is_missing(tmp_path):
    lines = log_batch(tmp_path / "trajectories.jsonl", log_trajectories=4, lost=[(11, 2)])
    assert [line["group"] for line in lines] == [10, 12, 13]


AWKWARD = "\u2028 \u2029 \x85 \x0b \x0c \x1c \r\n \n \0 \ud800 \U0001f600 \\u2028"


@given(
    st.lists(st.text(st.characters(exclude_categories=())), min_size=1, max_size=5).map(
        lambda texts: [*texts, AWKWARD]
    ),
    st.booleans(),
)
def test_any_text_comes_back_one_line_each(tmp_path_factory, texts, for_people):
    """Case HR03, for every log of a run: all are written by JsonLines."""
    path = tmp_path_factory.mktemp("lines") / "log.jsonl"
    lines = JsonLines(path, for_people=for_people)
    for text in texts:
        lines.write({"messages": [{"role": "user", "content": text}], text: 1})
    lines.close()
    assert read(path) == [{"messages": [{"role": "user", "content": text}], text: 1} for text in texts]
    assert len(path.read_text(encoding="utf-8").splitlines()) == len(texts)  # a reader that knows more line ends


def test_letters_stand_as_themselves_where_people_read(tmp_path):
    path = tmp_path / "log.jsonl"
    lines = JsonLines(path, for_people=True)
    lines.write({"text": "Grüße, 你好\u2028"})
    lines.close()
    assert path.read_text(encoding="utf-8") == '{"text": "Grüße, 你好\\u2028"}\n'


def test_the_conversation_ends_with_the_last_turn():
    played = Played([segment(5, STOP), segment(6, STOP)], Environment([go_on()])).run()
    said = [{"role": "assistant", "content": text} for text in ("5 0", "6 0")]
    assert played.loop.turns.conversation == ["?", said[0], MORE, said[1]]


def test_a_turn_that_was_cut_is_in_the_conversation_and_an_empty_one_is_not():
    cut = Played([segment(5, 6)], max_generated_tokens=2).run()
    assert cut.loop.turns.conversation == ["?", {"role": "assistant", "content": "5 6"}]
    full = Played([segment(5, STOP)], Environment([go_on()]), max_generated_tokens=2).run()
    assert full.loop.turns.conversation == ["?", {"role": "assistant", "content": "5 0"}, MORE]
    assert Played([segment()]).run().loop.turns.conversation == ["?"]


def test_rollouts_keep_the_conversations_that_are_wanted_and_no_others():
    script = [{"prompt": 3, "priority": 0, "members": [{"turns": [2, 2], "tool_ticks": 1}] * 2} for _ in range(2)]
    played = PlayedRollouts(
        script,
        completion={"mode": "wait"},
        budget={},
        concurrency=4,
        keeps_conversation=lambda group, member: (group, member) == (1, 0),
    )
    kept = {
        (one.group, one.member): one.conversation
        for _, group in played.results
        for one in group.trajectories
        if one.conversation is not None
    }
    assert list(kept) == [(1, 0)]
    assert [message["role"] for message in kept[1, 0][1:]] == ["assistant", "user", "assistant"]


def test_more_trajectories_than_a_batch_has_are_refused():
    assert parse(["--log-trajectories", "64", "--device", "cpu"]).trainer.log_trajectories == 64
    with pytest.raises(ConfigError, match="--log-trajectories is 65, but a batch has 8 groups of 8 trajectories"):
        parse(["--log-trajectories", "65", "--device", "cpu"])


def test_what_json_has_not_is_told_as_text():
    """A message may hold more than its text, and templates may even read it."""
    odd = {"role": "user", "content": "see", "image": b"123", "score": float("nan"), 7: [True, None, (0.5, 1)]}
    told = as_json([odd])
    assert json.loads(json.dumps(told, allow_nan=False)) == [
        {"role": "user", "content": "see", "image": "3 bytes", "score": "nan", "7": [True, None, [0.5, 1]]}
    ]
