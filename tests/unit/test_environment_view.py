"""What user code can do with its trajectory beside answering: rewrite it, end its training, see all of it."""

import pytest
from environment_session import Quiz, reset, session, turn

from pipeline.env import WRAP_UP, TurnResult, tool
from pipeline.errors import ConfigError


def user(text):
    return {"role": "user", "content": text}


def model(text):
    return {"role": "assistant", "content": text}


def test_rewrite_replaces_the_conversation_and_the_results_messages_follow():
    class Forgetful(Quiz):
        async def on_turn(self, traj):
            traj.rewrite([{"role": "system", "content": "short"}, user("again")])
            return TurnResult(messages="go")

        def on_truncated(self, traj, row, cause):
            self.seen.append(list(traj.messages))
            return 0.0

        seen = []

    async def steps(ask, host):
        await reset(ask)
        reply = await ask("turn", text="long")
        await ask("truncate", cause="context")
        return reply.result

    result = session(Forgetful, steps)
    expected = [{"role": "system", "content": "short"}, user("again"), user("go")]
    assert result == {"messages": expected, "rewrites": True, "max_turn_tokens": None}
    assert Forgetful.seen == [expected]


def test_a_turn_after_a_rewrite_only_appends():
    class Once(Quiz):
        async def on_turn(self, traj):
            if traj.num_turns == 1:
                traj.rewrite("new")
            return TurnResult(messages="go")

    async def steps(ask, host):
        await reset(ask)
        await ask("turn", text="one")
        return (await ask("turn", text="two")).result

    assert session(Once, steps) == {"messages": [user("go")], "max_turn_tokens": None}


@pytest.mark.parametrize("where", ["reward", "later"])
def test_rewrite_outside_on_turn_is_refused(where):
    class Late(Quiz):
        async def on_turn(self, traj):
            self.kept = traj
            return None if where == "reward" else TurnResult(messages="go")

        def reward(self, traj, row):
            traj.rewrite("too late")

        def on_truncated(self, traj, row, cause):
            with pytest.raises(ConfigError, match="outside on_turn"):
                self.kept.rewrite("too late")
            return 0.0

    async def steps(ask, host):
        await reset(ask)
        reply = await ask("turn", text="one")
        return reply if where == "reward" else await ask("truncate", cause="turns")

    error = session(Late, steps).error
    assert ("traj.rewrite was called outside on_turn" in error) if where == "reward" else error is None


def test_the_end_of_training_travels_with_every_answer():
    class Spoiled(Quiz):
        async def on_turn(self, traj):
            if traj.num_turns == 2:
                traj.loss_mask_end = traj.num_generated_tokens - traj.last_turn.num_tokens
            return None if traj.num_turns == 3 else TurnResult(messages="go")

        def on_truncated(self, traj, row, cause):
            traj.loss_mask_end = 0
            return 0.0

    async def steps(ask, host):
        await reset(ask)
        ended = [(await ask("turn", num_tokens=tokens)).result.get("loss_mask_end") for tokens in (3, 4, 5)]
        await reset(ask)
        return [*ended, (await ask("truncate", cause="turns")).result["loss_mask_end"]]

    assert session(Spoiled, steps) == [None, 3, 3, 0]


@pytest.mark.parametrize("value", [-1, True, 1.5])
def test_an_end_of_training_that_is_no_count_fails_the_trajectory(value):
    class Wrong(Quiz):
        async def on_turn(self, traj):
            traj.loss_mask_end = value
            return TurnResult(messages="go")

    async def steps(ask, host):
        await reset(ask)
        return (await ask("turn")).error

    assert f"traj.loss_mask_end is {value!r}; it counts generated tokens" in session(Wrong, steps)


def test_what_was_written_without_the_environment_is_in_its_view():
    class Watching(Quiz):
        seen = []

        async def on_turn(self, traj):
            self.seen.append(([one.text for one in traj.turns], list(traj.messages[1:]), traj.num_generated_tokens))
            return TurnResult(messages="go")

        def on_truncated(self, traj, row, cause):
            return float(traj.text == "unfinished")

    async def steps(ask, host):
        await reset(ask)
        cut = turn(text="cut", num_tokens=5, stopped=False)
        await ask("turn", text="answer", num_tokens=2, unseen=[cut, {"messages": [user("wrap up")]}])
        return (await ask("truncate", cause="context", unseen=[turn(text="unfinished")])).result

    assert session(Watching, steps) == {"reward": 1.0}
    assert Watching.seen == [(["cut", "answer"], [model("cut"), user("wrap up"), model("answer")], 7)]


def test_the_request_for_the_final_answer_is_the_environments():
    class Asking(Quiz):
        wrap_up = [{"role": "system", "content": "answer!"}]

    async def steps(ask, host):
        return (await reset(ask)).result["wrap_up"]

    assert session(Asking, steps) == [{"role": "system", "content": "answer!"}]
    assert session(Quiz, steps) == [user(WRAP_UP)]


def test_an_endless_tool_result_is_cut_before_it_travels_and_says_so():
    class Talkative(Quiz):
        @tool
        async def look(self, where: str) -> str:
            return "é" * 5000 if where == "far" else "ok"

    async def steps(ask, host):
        await reset(ask)
        return (await ask("turn", calls=[("look", {"where": "far"}), ("look", {"where": "near"})])).result["messages"]

    far, near = session(Talkative, steps, max_tool_chars=100)
    assert far == {"role": "tool", "name": "look", "content": "é" * 100, "cut": True}
    assert near == {"role": "tool", "name": "look", "content": "ok"}


def test_an_environments_own_tool_message_is_cut_there_too():
    class Verbose(Quiz):
        def on_turn(self, traj):
            return TurnResult([{"role": role, "content": "x" * 5000} for role in ("tool", "user")])

    async def steps(ask, host):
        await reset(ask)
        return (await ask("turn")).result["messages"]

    result, other = session(Verbose, steps, max_tool_chars=100)
    assert result == {"role": "tool", "content": "x" * 100, "cut": True}
    assert other == user("x" * 5000)
