"""What a trajectory is at, in words for those who wait for it."""

from pipeline.rollouts.doing import Doing, acting, in_line


def test_it_is_told_with_since_when_and_what_ends_it():
    doing = Doing("tool", "tool search", since=100.0)
    assert doing.told("ended by environment_timeout = 60 s", now=112.4) == (
        "tool search for 12 s, ended by environment_timeout = 60 s"
    )


def test_several_tools_are_named_once_each_and_none_is_the_last_turn():
    calls = [{"name": name} for name in ("search", "read", "search")]
    assert (acting(calls).cause, acting(calls).words) == ("tool", "tool search, read")
    assert (acting([]).cause, acting([]).words) == ("reward", "on_turn or reward")
    assert in_line().cause == "queue"
