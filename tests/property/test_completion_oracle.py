"""Random histories of a group against a plain oracle that reads the whole history anew at every step."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import GroupCompletion
from pipeline.rollouts.completion import GroupProgress


def closing(history, min_members, allowed):
    """Index of the fact with which the group closes, or None: straight from the words of the rule."""
    for now in range(len(history)):
        ends = [i for i, (kind, _, _) in enumerate(history[: now + 1]) if kind == "end"]
        if len(ends) < min_members:
            continue
        since = ends[min_members - 1]
        ended = {history[i][1] for i in ends}
        for kind, member, _ in history[: now + 1]:
            if kind == "start" and member not in ended:
                added = sum(
                    tokens for kind, who, tokens in history[since : now + 1] if kind == "tokens" and who == member
                )
                if added >= allowed:
                    return now
    return None


@st.composite
def histories(draw):
    """(size, facts): every member starts, generates and ends, in any order between members."""
    size = draw(st.integers(1, 5))
    lives = [
        [("start", member, 0)]
        + [("tokens", member, tokens) for tokens in draw(st.lists(st.integers(1, 6), max_size=4))]
        + [("end", member, 0)]
        for member in range(size)
    ]
    history = []
    while any(lives):
        member = draw(st.sampled_from([member for member in range(size) if lives[member]]))
        history.append(lives[member].pop(0))
    return size, history


@given(histories(), st.data())
def test_a_group_closes_exactly_when_the_rule_says(drawn, data):
    size, history = drawn
    min_members = data.draw(st.integers(1, size))
    allowed = data.draw(st.integers(0, 12))
    stragglers = data.draw(st.sampled_from(["truncate", "carry_over", "discard"]))
    group = GroupProgress(
        GroupCompletion(
            mode="deadline", min_members=min_members, on_stragglers=stragglers, max_straggler_tokens=allowed
        ),
        size,
    )
    closes = closing(history, min_members, allowed)
    ended, emitted, stopped = [], [], set()
    finals = 0
    for index, (kind, member, tokens) in enumerate(history):
        if kind == "start":
            if member in stopped:  # it was stopped before it started
                continue
            decision = group.started(member)
        elif kind == "tokens":
            if member in stopped and (kind, member, tokens) and index != closes:
                continue  # what is stopped makes no further request
            decision = group.generated(member, tokens)
        elif member in stopped:
            decision = group.gone(member) if stragglers == "discard" else group.ended(member)
        else:
            decision = group.ended(member)
        if kind == "end" and not (member in stopped and stragglers == "discard"):
            ended.append(member)
        assert group.closed == (closes is not None and index >= closes)
        if index == closes:
            assert set(decision.stop) == (set() if stragglers == "carry_over" else set(range(size)) - set(ended))
            stopped = set(decision.stop)
            if stragglers != "truncate":
                assert not decision.final and decision.emit == tuple(sorted(ended))
        if decision.emit is not None:
            assert set(decision.emit) == set(ended) - set(emitted)  # everything that has ended, and nothing twice
            emitted += decision.emit
            finals += decision.final
        if decision.final:
            assert index == len(history) - 1 or all(kind == "start" for kind, *_ in history[index + 1 :])
    assert finals == 1
    assert sorted(emitted) == sorted(set(range(size)) - (stopped if stragglers == "discard" else set()))
