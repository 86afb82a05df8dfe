"""An environment host driven by hand: what the tests of it share."""

import asyncio

from pipeline.env import Env, tool
from pipeline.environments.host import EnvironmentHost
from workers.messages import EnvironmentCall

ROW = {"answer": "yes"}


def less_line(error, file):
    """`error` without the place where user code failed, a line of `file`, which ends it."""
    sentence, end, rest = error.rpartition(f" ({file} line ")
    assert end and rest.removesuffix(")").isdigit(), error
    return sentence


class Quiz(Env):
    """Plain methods, one async tool; what it does is set by class attributes of the tests' subclasses."""

    closed: list

    @tool
    async def look(self, where: str) -> str:
        return f"nothing {where}"

    def reset(self, row):
        return f"question {self.rng.randrange(1000)}"

    def reward(self, traj, row):
        return float(row["answer"] in traj.text)

    def close(self):
        self.closed.append(self)


def session(env_class, steps, timeout=60.0, grace=60.0, max_tool_chars=None, run=asyncio.run):
    """Run `await steps(ask, host)` where ask(call, **argument) is one call for trajectory 4.2; returns its result.
    run: what runs a coroutine to its end.
    """
    env_class.closed = []

    async def play():
        host = EnvironmentHost(
            env_class, timeout=timeout, name=env_class.__name__, grace=grace, max_tool_chars=max_tool_chars
        )

        async def ask(call, member=2, **argument):
            if call == "turn":
                argument = turn(**argument)
            return await host.handle(EnvironmentCall(7, 4, member, call, argument))

        result = await steps(ask, host)
        await host.close()
        return result

    return run(play())


def turn(text="", calls=(), num_tokens=3, stopped=True, **more):
    calls = [{"name": name, "arguments": arguments, "error": None} for name, arguments in calls]
    return {"text": text, "tool_calls": calls, "num_tokens": num_tokens, "stopped": stopped} | more


async def reset(ask):
    reply = await ask("reset", row=ROW, seed=11)
    assert reply.error is None, reply.error
    return reply
