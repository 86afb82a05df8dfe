"""What a trajectory says of its own tokens."""

from pipeline.trajectory import Group, Span, Trajectory


def test_counts_and_tokens_follow_the_current_run():
    made = Trajectory(0, 0, 0)
    assert (made.generated_tokens, made.context_tokens, made.run_tokens()) == (0, 0, [])
    made.spans += [Span("prompt", [1, 2]), Span("generated", [3], 0, 0, [-0.1]), Span("framing", [4])]
    assert (made.generated_tokens, made.context_tokens, made.run_tokens()) == (1, 4, [1, 2, 3, 4])
    made.spans += [Span("prompt", [5], run=1), Span("generated", [6, 7], 0, 0, [-0.1, -0.2], run=1)]
    assert (made.generated_tokens, made.context_tokens, made.run_tokens()) == (3, 3, [5, 6, 7])
    assert made.run_tokens(0) == [1, 2, 3, 4]


def test_a_group_names_its_members():
    assert Group(3, 0, 0, [Trajectory(3, 2, 0), Trajectory(3, 0, 0)]).members == [2, 0]
