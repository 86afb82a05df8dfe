"""Agents for the tests of the endpoint, as users write them: each speaks through OpenAI's own client.

Each writes what its client was given down, a line of JSON per answer, in a file named after the row and its token's
start: what was trained is compared with it.
"""

import asyncio
import json
import os
import signal
import time
import uuid

import openai.resources.chat  # noqa: F401  OpenAI's clients import it at their first request, which takes a second
from openai import AsyncOpenAI, AuthenticationError, BadRequestError, OpenAI

MODEL = "headway"
TURN_TOKENS = 12
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look somewhere.",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]},
    },
}


def user(text):
    return {"role": "user", "content": text}


class Notes:
    """What a rollout's client was given: ids, log-probs and the length of the prompt of each answer."""

    def __init__(self, row):
        self.answers = []
        self._path = os.path.join(row["directory"], f"{row['name']}-{uuid.uuid4().hex}.json")

    def add(self, ids, logprobs, prompt_tokens):
        self.answers.append({"ids": ids, "logprobs": logprobs, "prompt_tokens": prompt_tokens})

    def write(self):
        with open(self._path, "w", encoding="utf-8") as file:
            json.dump(self.answers, file)


async def ask(client, notes, messages, *, streams=False, **more):
    """The model's message, as OpenAI's client gives it."""
    asked = {"model": MODEL, "messages": messages, "tools": [LOOK], "max_tokens": TURN_TOKENS, "logprobs": True} | more
    if streams:
        return await ask_for_stream(client, notes, asked)
    answer = await client.chat.completions.create(**asked)
    (choice,) = answer.choices
    notes.add(
        answer.model_extra["headway"]["token_ids"],
        [one.logprob for one in choice.logprobs.content],
        answer.usage.prompt_tokens,
    )
    assert answer.usage.completion_tokens == len(choice.logprobs.content)
    assert (choice.finish_reason == "tool_calls") <= bool(choice.message.tool_calls)
    return choice.message.model_dump()


async def ask_for_stream(client, notes, asked):
    """Put together from chunks, as agents do it."""
    message, calls, logprobs, ids, usage = {"role": "assistant", "content": ""}, {}, [], None, None
    chunks = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    async for chunk in chunks:
        usage = chunk.usage or usage
        ids = chunk.model_extra.get("headway", {}).get("token_ids", ids)
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            logprobs += [one.logprob for one in choice.logprobs.content] if choice.logprobs else []
            for part in choice.delta.tool_calls or []:
                call = calls.setdefault(part.index, {"id": part.id, "type": "function", "function": {"arguments": ""}})
                call["function"]["name"] = part.function.name
                call["function"]["arguments"] += part.function.arguments
    notes.add(ids, logprobs, usage.prompt_tokens)
    return message | ({"tool_calls": list(calls.values())} if calls else {})


def results(message):
    """A tool's result for each call, or words that go on."""
    calls = message.get("tool_calls") or []
    texts = [f"nothing at {json.loads(call['function']['arguments'])['where'][:3]!r}" for call in calls]
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": text} for call, text in zip(calls, texts, strict=True)
    ] or [user("Go on.")]


async def converse(row, base_url, api_key, *, streams=False, turns=3):
    """A conversation that goes on from turn to turn, whose tools answer the model's calls."""
    notes = Notes(row)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [user(row["question"])]
        for _ in range(turns):
            message = await ask(client, notes, messages, streams=streams)
            messages += [message, *results(message)]
    notes.write()
    calls = sum(message["role"] == "tool" for message in messages)
    return {"reward": float(len(messages[1]["content"] or "") % 3), "metrics": {"calls": calls}}


async def branching(row, base_url, api_key):
    """Two calls at once, then several ways on from one of them."""
    notes = Notes(row)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        question = [user(row["question"])]
        first, _ = await asyncio.gather(ask(client, notes, question), ask(client, notes, [user("Something else.")]))
        for word in ("left", "right"):
            await ask(client, notes, [*question, first, user(word)])
    notes.write()
    return 1.0


def plain(row, base_url, api_key):
    """Not async: it holds up nobody."""
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        answer = client.chat.completions.create(model=MODEL, messages=[user(row["question"])], max_tokens=4)
    return int(answer.usage.completion_tokens)


async def endless(row, base_url, api_key):
    """Goes on until no budget is left, and does not mind the refusal."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [user(row["question"])]
        while True:
            answer = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=TURN_TOKENS)
            messages += [answer.choices[0].message.model_dump(), user("And?")]


async def careful(row, base_url, api_key):
    """The same, but scores what it has when it is refused."""
    try:
        await endless(row, base_url, api_key)
    except BadRequestError as error:
        assert error.code == "context_length_exceeded", error
    return 0.5


async def mortal(row, base_url, api_key):
    """The first one takes its process along after an answer; whoever comes later finds its token spent."""
    token, died = (os.path.join(row["directory"], name) for name in ("token", "died"))
    try:
        with open(token, "x", encoding="utf-8") as file:
            file.write(api_key)
    except FileExistsError:
        if os.path.exists(died):
            with open(token, encoding="utf-8") as file:
                spent = file.read()
            async with AsyncOpenAI(base_url=base_url, api_key=spent) as client:
                try:
                    await client.models.list()
                except AuthenticationError as error:
                    assert error.code == "token_spent"
                else:
                    raise AssertionError("the token of a rollout that is lost is still good") from None
    else:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            await ask(client, Notes(row), [user(row["question"])])
        open(died, "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return await converse(row, base_url, api_key)


async def spinning(row, base_url, api_key):
    """Agents of the first row let no other one run."""
    while row["name"] == "0":
        pass
    return await converse(row, base_url, api_key)


async def failing(row, base_url, api_key):
    raise ValueError("the agent has lost its way")


async def speechless(row, base_url, api_key):
    return "one"


async def silent(row, base_url, api_key):
    await asyncio.sleep(3600)


def asleep(row, base_url, api_key):
    time.sleep(3600)
