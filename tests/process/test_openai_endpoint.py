"""Agents written elsewhere, on real processes, through OpenAI's client: what is trained is what they were given."""

import asyncio
import json
import re
import socket
import sys
from itertools import groupby
from pathlib import Path

import agents
import aiohttp
import pytest
from openai import APIError, AsyncOpenAI, AuthenticationError
from running import audit, events_of

import pipeline as rl
from bench.small_models import write_small_model
from pipeline.chat.format import ParsedTurn
from pipeline.chat.model_chat import load_chat
from pipeline.evaluation.without_training import EvaluationRun
from pipeline.run_dir.run_directory import make_run_dir

ROOT = Path(__file__).parent.parent.parent
SECONDS = 60.0
ENTROPY = 0.01  # a gradient for a model whose rewards are all equal
QUESTIONS = ("What is twelve plus thirty?", "Where is it?")


class CallingChat:
    """A model's own chat format, but each turn that begins with an even id is read as a call: random weights make none
    of their own.
    """

    def __init__(self, chat):
        self._chat = chat

    def __getattr__(self, name):
        return getattr(self._chat, name)

    def parse_turn(self, turn_ids):
        text, _ = self._chat.parse_turn(turn_ids)
        if turn_ids[0] % 2:
            return ParsedTurn(text, [])
        return ParsedTurn("", [{"name": "look", "arguments": {"where": text}, "error": None}])


@pytest.fixture(scope="module")
def model(kept, tmp_path_factory):
    directory = write_small_model(tmp_path_factory.mktemp("model"))
    chat = CallingChat(load_chat(directory))
    with kept.supervisor(directory, chat=chat, device="cpu", check_weights=True) as supervisor:
        yield supervisor


def rows(directory, *questions):
    return [
        {"question": question, "directory": str(directory), "name": str(index)}
        for index, question in enumerate(questions or QUESTIONS)
    ]


def trainer(model, run_dir, endpoint, trained=None, *, budget=None, concurrency=4, max_retries=2, **options):
    """trained: a list that gets every trajectory that is trained."""
    engine = rl.RolloutEngine(
        model,
        env=endpoint,
        schedule=rl.Schedule(concurrency=concurrency),
        budget=budget or rl.Budget(max_context_tokens=2048),
        max_retries=max_retries,
    )
    defaults = {"groups_per_step": 1, "group_size": 2, "max_staleness": 1}
    return rl.AsyncTrainer(
        engine=engine,
        run_dir=str(run_dir),
        optimizer=rl.Adam(lr=1e-3),
        loss=rl.CISPO(normalize="token"),
        completion=rl.GroupCompletion(mode="wait"),
        entropy_coefficient=ENTROPY,
        validate_batch=None if trained is None else lambda batch, metrics: trained.extend(batch),
        **(defaults | options),
    )


async def steps_of(made, rows, steps):
    return [step async for step in made.run(rows, steps)]


def given(directory):
    """What each rollout's client was given."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in directory.glob("*.json")]


def sampled(trajectory):
    """A trajectory's turns in order, each as its client must have been given it."""
    found = []
    for (kind, _), spans in groupby(enumerate(trajectory.spans), lambda item: (item[1].kind, item[1].run)):
        spans = list(spans)
        if kind == "generated":
            first, run = spans[0][0], spans[0][1].run
            context = [token for span in trajectory.spans[:first] if span.run == run for token in span.tokens]
            found.append(
                {
                    "ids": [token for _, span in spans for token in span.tokens],
                    "logprobs": [logprob for _, span in spans for logprob in span.logprobs],
                    "prompt_tokens": len(context),
                }
            )
    return found


def by_ids(rollouts):
    return sorted(rollouts, key=json.dumps)


# --- a harness of the user's own -------------------------------------------------------------------------------------


class Harness:
    """Two rollouts at a time, until the run ends. `refused` has what else it tried, with the wrong tokens."""

    def __init__(self, endpoint, tries=False):
        self.endpoint = endpoint
        self.tries = tries
        self.offers = []
        self.refused = []
        self.requests = 0
        self.last = None  # how the run's end was told

    async def run(self):
        async with asyncio.timeout(SECONDS):
            while self.endpoint.url is None:
                await asyncio.sleep(0.01)
        async with aiohttp.ClientSession() as self.http:
            await asyncio.gather(self.work(), self.work())

    async def work(self):
        while (offer := await self.take()) is not None:
            self.offers.append(offer)
            if self.tries:
                await self.try_others_tokens(offer)
            outcome = await agents.converse(
                offer["row"], offer["base_url"], offer["api_key"], streams=offer["rollout"] % 2 == 0
            )
            self.requests += 3
            assert await self.post(offer["base_url"] + "/reward", offer["api_key"], outcome) == (200, {"ok": True})
            if self.tries:
                await self.try_again(offer, outcome)

    async def take(self):
        status, offer = await self.post(self.endpoint.url + "/rollouts", self.endpoint.api_key, {"wait_seconds": 60})
        if status == 503:
            self.last = offer["error"]
            return None
        assert status == 200, offer
        return offer

    async def post(self, url, token, body):
        self.requests += 1
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        async with self.http.post(url, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def refuse(self, url, token, body, *wanted):
        status, answer = await self.post(url, token, body)
        self.refused.append((status, answer["error"]["code"]))
        assert self.refused[-1] == wanted, answer

    async def try_others_tokens(self, offer):
        """Of nobody, of the endpoint, none at all; and the rollout's token where the key belongs."""
        for token in (offer["api_key"][:-1], self.endpoint.api_key, None):
            for path in ("/chat/completions", "/reward"):
                await self.refuse(offer["base_url"] + path, token, {"reward": 9}, 401, "invalid_api_key")
        await self.refuse(self.endpoint.url + "/rollouts", offer["api_key"], {}, 401, "invalid_api_key")
        async with AsyncOpenAI(base_url=offer["base_url"], api_key="wrong") as client:
            with pytest.raises(AuthenticationError, match="no rollout of this run"):
                await agents.ask(client, None, [agents.user("?")])
        self.requests += 1
        self.refused.append((401, "invalid_api_key"))

    async def try_again(self, offer, outcome):
        """With what is spent."""
        await self.refuse(offer["base_url"] + "/reward", offer["api_key"], outcome, 409, "rollout_ended")
        await self.refuse(offer["base_url"] + "/chat/completions", offer["api_key"], {}, 401, "token_spent")


def test_what_is_trained_is_what_a_harness_was_given(model, tmp_path):
    endpoint, trained = rl.OpenAIEndpoint(), []
    made = trainer(model, tmp_path / "run", endpoint, trained, max_staleness=0)
    harness = Harness(endpoint, tries=True)

    async def whole():
        working = asyncio.ensure_future(harness.run())
        steps = await steps_of(made, rows(tmp_path), 2)
        await asyncio.wait_for(working, SECONDS)
        return steps

    steps = asyncio.run(whole())
    assert len(trained) == len(harness.offers) == 4
    notes = given(tmp_path)
    assert by_ids(map(sampled, trained)) == by_ids(notes), "ids, log-probs and lengths of contexts, of every answer"
    assert all(len(answers) == 3 for answers in notes)
    assert {span.kind for one in trained for span in one.spans} == {"prompt", "generated", "framing"}
    assert all(one.run == 0 for one in trained), "each conversation went on: it is one row"
    assert any(one.metrics["calls"] for one in trained), "the model has called tools"
    for step in steps:
        assert step.metrics["mismatch/max_abs_logprob"] < 1e-4
    assert sum(step.metrics["rollout/calls"] for step in steps) == sum(one.metrics["calls"] for one in trained)
    # Every request is counted, and every refused one; the last ones came when no step followed.
    assert {offer["trajectory"] for offer in harness.offers} == {"0.0", "0.1", "1.0", "1.1"}
    assert len(harness.refused) == 4 * 10
    refused = sum(step.metrics["endpoint/refused"] for step in steps)
    requests = sum(step.metrics["endpoint/requests"] for step in steps)
    assert len(harness.refused) - 2 * 2 <= refused <= len(harness.refused)
    assert refused < requests <= harness.requests
    assert harness.last["code"] == "run_ended" and audit(tmp_path / "run") == 0
    logs = "".join(path.read_text(errors="replace") for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert not [token for offer in harness.offers for token in (offer["api_key"], endpoint.api_key) if token in logs]
    assert not (tmp_path / "run" / "endpoint.json").exists()


def test_the_end_of_a_run_is_told_to_who_waits_and_closes_the_port(model, tmp_path):
    endpoint = rl.OpenAIEndpoint(api_key="a-key-of-the-users-own", model_name="mine")
    made = trainer(model, tmp_path / "run", endpoint, concurrency=1)

    async def whole():
        harness = Harness(endpoint)
        training = asyncio.ensure_future(steps_of(made, rows(tmp_path), 1))
        async with asyncio.timeout(SECONDS), aiohttp.ClientSession() as harness.http:
            while endpoint.url is None:
                await asyncio.sleep(0.01)
            address = json.loads((tmp_path / "run" / "endpoint.json").read_text())
            assert address == {"url": endpoint.url, "api_key": "a-key-of-the-users-own", "model": "mine"}
            offer = await harness.take()
            assert offer["model"] == "mine"
            ledger, num_slots = model._run.ledger, model._run.spec.num_slots
            assert not any(ledger.read_lease(slot) for slot in range(num_slots)), "it has asked for nothing"
            waits = asyncio.ensure_future(harness.take())
            await asyncio.sleep(0.1)
            async with AsyncOpenAI(base_url=offer["base_url"], api_key=offer["api_key"], max_retries=0) as client:
                assert [one.id async for one in client.models.list()] == ["mine"]
                made.request_stop()
                await waits
                assert harness.last["message"] == "The run has ended." and harness.last["code"] == "run_ended"
                with pytest.raises(APIError):
                    await client.models.list()
            assert await training == [] and made.stopped
            port = int(offer["base_url"].split(":")[-1].removesuffix("/v1"))
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port)).close()
        assert endpoint.url is None

    asyncio.run(whole())


# --- agents that Headway calls ---------------------------------------------------------------------------------------


def run_agent(model, tmp_path, name, *, steps=1, idle_timeout=60.0, **options):
    """(the trained trajectories, the last step's metrics)"""
    trained = []
    endpoint = rl.OpenAIEndpoint(f"agents:{name}", idle_timeout=idle_timeout)
    made = trainer(model, tmp_path / "run", endpoint, trained, **options)
    done = rl.run(made, rows(tmp_path), steps=steps)
    assert audit(tmp_path / "run") == 0
    return trained, done[-1].metrics


def test_an_agent_by_import_path(model, tmp_path):
    trained, metrics = run_agent(model, tmp_path, "converse", steps=2, max_staleness=0)
    assert by_ids(map(sampled, trained)) == by_ids(given(tmp_path)) and len(trained) == 4
    assert metrics["rollout/calls"] == sum(one.metrics["calls"] for one in trained[2:])
    assert metrics["endpoint/refused"] == 0 and metrics["mismatch/max_abs_logprob"] < 1e-4


def test_an_agent_that_branches_and_calls_at_once(model, tmp_path):
    trained, metrics = run_agent(model, tmp_path, "branching")
    assert by_ids(map(sampled, trained)) == by_ids(given(tmp_path)) and len(trained) == 2
    for one in trained:
        first, *others = one.spans
        assert one.run == 3, "the second question, and two ways on from the first: rows of their own"
        question = one.run_tokens(0)
        for run in (2, 3):
            prompt = next(span for span in one.spans if span.run == run)
            assert prompt.kind == "prompt" and prompt.tokens[: len(question)] == question, "exact ids"
    assert metrics["train/datums"] == 8 and metrics["mismatch/max_abs_logprob"] < 1e-4


def test_a_plain_agent_runs_in_a_thread(model, tmp_path):
    trained, _ = run_agent(model, tmp_path, "plain")
    assert [one.reward for one in trained] == [float(one.generated_tokens) for one in trained]


@pytest.mark.parametrize(("name", "reward"), [("endless", 0.0), ("careful", 0.5)])
def test_an_agent_that_no_budget_is_left_for(name, reward, model, tmp_path):
    truncation = rl.Truncation(train="reward")
    budget = rl.Budget(max_turns=3, max_context_tokens=2048)
    trained, metrics = run_agent(model, tmp_path, name, budget=budget, truncation=truncation)
    assert [(one.truncated, one.num_turns, one.reward) for one in trained] == [("turns", 3, reward)] * 2
    assert metrics["truncated/turns"] == 1.0 and metrics["endpoint/refused"] == 2


@pytest.mark.parametrize(
    ("name", "sentence", "timeout"),
    [
        ("failing", "AgentEnv.on_turn of trajectory 0.. failed with ValueError: the agent has lost its way", 60.0),
        ("speechless", "the reward is 'one', which is no finite number", 60.0),
        ("silent", "The agent of trajectory 0.. neither made a request nor returned a reward within idle_timeout", 0.5),
        ("asleep", "The agent of trajectory 0.. neither made a request nor returned a reward within idle_timeout", 0.5),
    ],
)
def test_an_agent_that_fails_is_named(name, sentence, timeout, model, tmp_path):
    with pytest.raises(rl.TrajectoryError, match=sentence):
        run_agent(model, tmp_path, name, idle_timeout=timeout)


def test_agents_whose_process_dies_start_again_with_another_token(model, tmp_path):
    trained, metrics = run_agent(model, tmp_path, "mortal")
    assert by_ids(map(sampled, trained)) == by_ids(given(tmp_path)) and len(trained) == 2
    assert (tmp_path / "died").exists() and metrics["recovery/restarts"] == 1
    retries = events_of(tmp_path / "run", "retry")
    assert {event["trajectory"] for event in retries} <= {"0.0", "0.1"} and len(retries) == metrics[
        "recovery/begun_anew"
    ]
    assert any(event["tokens"] > 0 for event in retries), "what it had sampled is thrown away"


def test_an_agent_that_lets_no_other_run_costs_its_own_group(model, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.processes.environment.environment_watch.GRACE_SECONDS", 0.5)
    monkeypatch.setattr(rl.OpenAIEndpoint, "silence_timeout", lambda endpoint, timeout: 4.0)
    options = {"on_failure": "replace", "max_staleness": 0, "max_retries": 0}
    trained, metrics = run_agent(model, tmp_path, "spinning", **options)
    assert by_ids(map(sampled, trained)) == by_ids(given(tmp_path)) and {one.group for one in trained} == {1}
    (failed,) = events_of(tmp_path / "run", "failed")
    assert "let no other agent run for half of idle_timeout, 4 s" in failed["cause"] and failed["group"] == 0
    assert metrics["groups/failed"] == 1 and metrics["recovery/restarts"] == 1


def test_an_agent_that_cannot_be_had_ends_the_start(model, tmp_path):
    says = "The agent 'agents:nowhere' can't be imported: agents .* has no 'nowhere'"
    with pytest.raises(rl.HeadwayError, match=says):
        run_agent(model, tmp_path, "nowhere")
    assert events_of(tmp_path / "run", "admitted") == []


def test_an_evaluation_of_agents(model, tmp_path):
    engine = rl.RolloutEngine(model, env=rl.OpenAIEndpoint("agents:converse"), schedule=rl.Schedule(concurrency=4))
    run = EvaluationRun(engine, rl.Evaluator(rows(tmp_path), every=0, final_group_size=2))
    found = asyncio.run(run.run(make_run_dir(str(tmp_path / "eval"), {})))
    assert (found.rows, found.trajectories) == (2, 4)
    tokens = [sum(len(answer["ids"]) for answer in answers) for answers in given(tmp_path)]
    assert found.generated_tokens_mean == sum(tokens) / 4 and len(tokens) == 4


# --- docs/endpoint.md ------------------------------------------------------------------------------------------------


def test_the_pages_agent_and_harness(model, tmp_path):
    for block in re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "endpoint.md").read_text(), re.M | re.S):
        (tmp_path / block.split()[1]).write_text(block)
    data = [{"question": question, "answer": "e"} for question in QUESTIONS]
    agent, trained = str(tmp_path / "my_agents.py:solve"), []
    rl.run(trainer(model, tmp_path / "called", rl.OpenAIEndpoint(agent), trained), data, steps=1)
    harnessed = trainer(model, tmp_path / "run", rl.OpenAIEndpoint(), trained)

    async def whole():
        training = asyncio.ensure_future(steps_of(harnessed, data, 1))
        async with asyncio.timeout(SECONDS):
            while not (tmp_path / "run" / "endpoint.json").exists():
                await asyncio.sleep(0.01)
        command = (sys.executable, "harness.py", str(tmp_path / "run"))
        harness = await asyncio.create_subprocess_exec(*command, cwd=tmp_path)
        (step,) = await asyncio.wait_for(training, SECONDS)
        assert await asyncio.wait_for(harness.wait(), SECONDS) == 0
        assert step.metrics["rollout/solved"] == sum(one.reward for one in trained[2:])

    asyncio.run(whole())
    assert len(trained) == 4 and all(one.reward in (0.0, 1.0) and one.num_turns == 1 for one in trained)
