"""Groups that go to the trainer in parts: batches counted in trajectories, and what becomes of stragglers."""

from collections import Counter

import pytest
from running import audit, events_of, make_trainer

import pipeline as rl
from pipeline.tasks import guess

ROWS = guess.train_rows(0)
MEMBERS, GROUPS, STEPS = 4, 3, 5
ALLOWED = {"keep": {"allow_unbounded_staleness": True}, "mask_span": {}}


@pytest.fixture(scope="module")
def model():
    with rl.Supervisor(device="cpu", check_weights=True) as supervisor:
        yield supervisor


def train(model, tmp_path, on_stragglers, policy):
    """Members 0 and 1 of each group end at once; the others go on until their budget, or the group, ends them."""
    (tmp_path / "marks").mkdir()
    trainer = make_trainer(
        model,
        tmp_path / "run",
        env="process_envs:Uneven",
        arguments={"directory": str(tmp_path / "marks")},
        budget=rl.Budget(max_turns=12, max_turn_tokens=1, max_context_tokens=128),
        completion=rl.GroupCompletion(mode="deadline", on_stragglers=on_stragglers, max_straggler_tokens=2),
        advantage=rl.Batchwise(),
        truncation=rl.Truncation(train="reward"),
        groups_per_step=GROUPS,
        group_size=MEMBERS,
        max_staleness=1,
        stale_policy=policy,
        allow_trajectory_loss=True,
        **ALLOWED[policy],
    )
    steps = rl.run(trainer, ROWS, STEPS)
    assert audit(tmp_path / "run") == 0
    return steps, events_of(tmp_path / "run", "batch")


@pytest.mark.filterwarnings("ignore::pipeline.config_checks.ConfigWarning")
@pytest.mark.parametrize("policy", ["keep", "mask_span"])
def test_stragglers_are_carried_over_and_train_once_each(model, tmp_path, policy):
    steps, batches = train(model, tmp_path, "carry_over", policy)
    for batch in batches:
        assert sum(map(len, batch["members"])) == GROUPS * MEMBERS  # counted in trajectories
        assert len(batch["members"]) == len(batch["groups"])
    taken = Counter(
        (group, member)
        for batch in batches
        for group, members in zip(batch["groups"], batch["members"], strict=True)
        for member in members
    )
    assert set(taken.values()) == {1}
    in_batches = {batch["step"]: set(batch["groups"]) for batch in batches}
    assert any(in_batches[step] & in_batches[step + 1] for step in range(1, STEPS))  # a group trained in two of them
    assert {member for _, member in taken} == set(range(MEMBERS))
    assert not events_of(tmp_path / "run", "discarded")
    assert all(step.metrics["groups/deadline_frac"] > 0 for step in steps)
    (end,) = events_of(tmp_path / "run", "end")
    whole = Counter(group for group, _ in taken)
    assert end["consumed"] == sum(count == MEMBERS for count in whole.values())


@pytest.mark.filterwarnings("ignore::pipeline.config_checks.ConfigWarning")
@pytest.mark.parametrize("policy", ["keep", "mask_span"])
def test_stragglers_are_discarded_and_their_group_trains_without_them(model, tmp_path, policy):
    _, batches = train(model, tmp_path, "discard", policy)
    assert {tuple(members) for batch in batches for members in batch["members"]} == {(0, 1)}
    assert [len(batch["groups"]) for batch in batches] == [GROUPS] * STEPS
    discarded = events_of(tmp_path / "run", "discarded")
    assert {event["trajectory"].partition(".")[2] for event in discarded} == {"2", "3"}
    assert {event["cause"] for event in discarded} == {"group_discard"}
