"""The endpoint's server on a real socket, with played rollouts: who is let in, what is refused how, and the end."""

import asyncio
import json
import socket
import stat

import aiohttp
import pytest

from pipeline.chat.format import ModelTurn
from pipeline.endpoint import server as server_module
from pipeline.endpoint.chat_reply import Answer
from pipeline.endpoint.chat_request import Served
from pipeline.endpoint.refusal import Refusal
from pipeline.endpoint.server import EndpointServer
from pipeline.endpoint.sessions import Sessions
from pipeline.errors import RunError

KEY = "the-key-of-harnesses"
ASK = {"model": "headway", "messages": [{"role": "user", "content": "?"}]}


class Driven:
    """A rollout whose turns come when the test says so."""

    def __init__(self):
        self.answered = asyncio.Event()
        self.asked = asyncio.Event()
        self.ended = []  # rewards, sentences
        self.wanted = []  # is_wanted of each request
        self.finished = 0
        self.error = None

    async def complete(self, request, is_wanted):
        self.wanted.append(is_wanted)
        self.asked.set()
        await self.answered.wait()
        if self.error is not None:
            raise self.error
        self.finished += 1
        return Answer(ModelTurn([5, 6], "hello", []), True, [-0.5, -1.0], [3, 3], 4, 2)

    def score(self, reward, metrics):
        self.ended.append((reward, metrics))

    def give_up(self, sentence):
        self.ended.append(sentence)

    def touch(self):
        pass

    def text_of(self, ids):
        return "x" * len(ids)


class Played:
    """A server with one rollout, and a client."""

    def __init__(self, http, address_file=None):
        self.errors = []
        self.sessions = Sessions(asyncio.get_running_loop().time)
        self.server = EndpointServer(
            port=0,
            key=KEY,
            calls_agents=False,
            idle_timeout=60.0,
            served=Served("headway", 1.0, 1.0, -1),
            sessions=self.sessions,
            on_error=self.errors.append,
            address_file=address_file,
        )
        self.driven = Driven()
        self.session, self.token = self.sessions.open(self.driven, {"row": {"n": 1}})
        self._http = http

    async def call(self, method, path, body=None, token=None, **more):
        """(status, the JSON answer)"""
        headers = {"Authorization": f"Bearer {token or self.token}"} | more.pop("headers", {})
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        async with self._http.request(method, self.server.url + path, data=data, headers=headers, **more) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text else None

    async def raw(self, data):
        """The first line of the answer to these bytes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", int(self.server.url.rpartition(":")[2]))
        writer.write(data)
        line = await reader.readline()
        writer.close()
        return line

    async def refused(self, *request, **more):
        """(status, code, param)"""
        status, answer = await self.call(*request, **more)
        return status, answer["error"]["code"], answer["error"]["param"]


def play(script, **options):
    async def whole():
        async with asyncio.timeout(30.0), aiohttp.ClientSession() as http:
            played = Played(http, **options)
            await played.server.start()
            try:
                return await script(played)
            finally:
                await played.server.close()

    return asyncio.run(whole())


def test_what_is_there():
    async def script(played):
        played.driven.answered.set()
        status, models = await played.call("GET", "/v1/models")
        assert status == 200 and [one["id"] for one in models["data"]] == ["headway"]
        status, answer = await played.call("POST", "/v1/chat/completions", ASK)
        assert status == 200 and answer["choices"][0]["message"]["content"] == "hello"
        assert await played.call("POST", "/v1/reward", {"reward": 1, "metrics": {"a": 2}}) == (200, {"ok": True})
        assert await played.call("POST", "/v1/reward", {"error": "lost"}) == (200, {"ok": True})
        assert played.driven.ended == [(1, {"a": 2}), "lost"]
        status, offer = await played.call("POST", "/rollouts", {}, token=KEY)
        assert status == 200 and offer == {
            "rollout": 1,
            "base_url": played.server.url + "/v1",
            "api_key": played.token,
            "model": "headway",
            "row": {"n": 1},
        }
        assert await played.call("POST", "/rollouts", {"wait_seconds": 0.01}, token=KEY) == (204, None)
        assert played.server.take_metrics() == {"endpoint/requests": 6, "endpoint/refused": 0}
        assert played.server.take_metrics() == {"endpoint/requests": 0, "endpoint/refused": 0} and not played.errors

    play(script)


def test_what_is_refused_is_counted():
    async def script(played):
        complete, reward, rollouts = ("POST", "/v1/chat/completions"), ("POST", "/v1/reward"), ("POST", "/rollouts")
        refused = played.refused
        assert await refused(*complete, ASK, token="wrong") == (401, "invalid_api_key", None)
        assert await refused(*complete, ASK, token=KEY) == (401, "invalid_api_key", None)
        assert await refused(*complete, ASK, headers={"Authorization": f"Basic {played.token}"}) == (
            401,
            "invalid_api_key",
            None,
        )
        assert await refused(*complete, ASK, headers={"Authorization": "Bearer "}) == (401, "invalid_api_key", None)
        assert await refused(*rollouts, {}, token=played.token) == (401, "invalid_api_key", None)
        assert await refused("GET", "/v1/models", token="ä") == (401, "invalid_api_key", None)
        assert await refused(*complete, b"{") == (400, "invalid_json", None)
        assert await refused(*complete, b"\xac{}") == (400, "invalid_json", None)
        assert await refused(*complete, ASK | {"n": 2}) == (400, "unsupported", "n")
        assert await refused(*complete, ASK | {"model": "x"}) == (404, "model_not_found", "model")
        assert await refused(*reward, {}) == (400, "missing", "reward")
        assert await refused(*reward, {"reward": 1, "error": "x"}) == (400, "invalid_value", "error")
        assert await refused(*reward, {"error": 5}) == (400, "invalid_value", "error")
        assert await refused(*reward, {"rewards": 1}) == (400, "unsupported", "rewards")
        assert await refused(*rollouts, {"wait_seconds": -1}, token=KEY) == (400, "invalid_value", "wait_seconds")
        assert await refused(*rollouts, {"rows": 1}, token=KEY) == (400, "unsupported", "rows")
        assert await refused("GET", "/v1/chat/completions") == (404, "unknown_url", None)
        assert await refused("POST", "/v1/completions", {}) == (404, "unknown_url", None)
        assert await refused("POST", "/", {}) == (404, "unknown_url", None)
        assert await refused("GET", "/v1/models", headers={"Host": "evil.example"}) == (403, "wrong_host", None)
        other = {"Host": "127.0.0.1.evil.example:80"}
        assert await refused("GET", "/v1/models", headers=other) == (403, "wrong_host", None)
        played.sessions.close(played.session)
        assert await refused(*complete, ASK) == (401, "token_spent", None)
        assert await refused(*reward, {"reward": 1}) == (409, "rollout_ended", None)
        assert played.driven.ended == [] and not played.driven.wanted and not played.errors
        assert played.server.take_metrics() == {"endpoint/requests": 23, "endpoint/refused": 23}

    play(script)


def test_a_token_of_any_bytes_is_just_a_wrong_one():
    async def script(played):
        for path in ("/v1/chat/completions", "/v1/reward", "/rollouts"):
            assert b"401" in await played.raw(
                b"POST %s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\xed\xa0\x80\r\n"
                b"Content-Length: 2\r\n\r\n{}" % path.encode()
            )
        assert not played.errors
        assert played.server.take_metrics() == {"endpoint/requests": 3, "endpoint/refused": 3}

    play(script)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_cant_be_unpacked_is_refused(encoding):
    async def script(played):
        headers = {"Content-Encoding": encoding}
        body = b"this is not packed"
        answer = await played.refused("POST", "/v1/chat/completions", body, headers=headers)
        assert answer == (400, "invalid_json", None) and not played.errors

    play(script)


def test_a_body_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(server_module, "MAX_BODY_BYTES", 2**20)

    async def script(played):
        body = ASK | {"user": "x" * 2**20}
        assert await played.refused("POST", "/v1/chat/completions", body) == (413, "request_too_large", None)
        assert (await played.call("GET", "/v1/models", headers={"Host": "localhost"}))[0] == 200

    play(script)


def test_the_address_is_there_for_its_owner_while_the_server_is(tmp_path):
    path = tmp_path / "endpoint.json"

    async def script(played):
        assert json.loads(path.read_text()) == {"url": played.server.url, "api_key": KEY, "model": "headway"}
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

    play(script, address_file=path)
    assert not list(tmp_path.iterdir())


def test_clients_are_told_not_to_try_again_what_is_refused():
    async def script(played):
        headers = {"Authorization": "Bearer wrong"}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.get(played.server.base_url + "/models") as answer,
        ):
            assert (answer.status, answer.headers["x-should-retry"]) == (401, "false")

    play(script)


def test_only_this_machine_is_let_in():
    async def script(played):
        assert played.server._socket.getsockname()[0] == "127.0.0.1"

    play(script)


def test_a_client_that_goes_away_ends_nothing_that_has_begun():
    async def script(played):
        asking = asyncio.ensure_future(played.call("POST", "/v1/chat/completions", ASK))
        await played.driven.asked.wait()
        assert played.driven.wanted[0]()
        asking.cancel()
        while played.driven.wanted[0]():
            await asyncio.sleep(0.01)
        played.driven.answered.set()
        while not played.driven.finished:
            await asyncio.sleep(0.01)
        assert (await played.call("POST", "/v1/chat/completions", ASK))[0] == 200, "and it may ask again"
        assert not played.errors

    play(script)


def test_a_harness_that_goes_away_leaves_the_rollout_to_others():
    async def script(played):
        await played.call("POST", "/rollouts", {}, token=KEY)
        first = asyncio.ensure_future(played.call("POST", "/rollouts", {}, token=KEY))
        while not played.sessions.num_takers:
            await asyncio.sleep(0.01)
        second = asyncio.ensure_future(played.call("POST", "/rollouts", {}, token=KEY))
        while played.sessions.num_takers < 2:
            await asyncio.sleep(0.01)
        first.cancel()
        while played.sessions.num_takers > 1:
            await asyncio.sleep(0.01)
        _, token = played.sessions.open(Driven(), {"row": {"n": 2}})
        assert (await second)[1]["api_key"] == token

    play(script)


def test_a_rollout_whose_offer_could_not_be_sent_is_offered_again(monkeypatch):
    async def broken(response, data=b""):
        monkeypatch.undo()
        raise ConnectionResetError

    async def script(played):
        monkeypatch.setattr(server_module.web.Response, "write_eof", broken)
        request = f"POST /rollouts HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n\r\n"
        await played.raw(request.encode())
        assert not played.session.taken and not played.errors
        status, offer = await played.call("POST", "/rollouts", {}, token=KEY)
        assert (status, offer["api_key"]) == (200, played.token) and played.session.taken

    play(script)


def test_what_a_rollout_fails_with_is_told_its_client():
    async def script(played):
        played.driven.answered.set()
        played.driven.error = RunError("The sampler is gone.")
        status, answer = await played.call("POST", "/v1/chat/completions", ASK)
        assert status == 503 and answer["error"]["message"] == "The rollout has failed: The sampler is gone."
        played.driven.error = Refusal(400, "No room.", code="context_length_exceeded")
        assert await played.refused("POST", "/v1/chat/completions", ASK) == (400, "context_length_exceeded", None)
        assert not played.errors, "the trajectory itself ends the run"

    play(script)


def test_a_mistake_of_the_server_itself_ends_the_run():
    async def script(played):
        played.driven.text_of = None
        played.driven.answered.set()
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {played.token}"}) as http:
            async with http.post(played.server.base_url + "/chat/completions", json=ASK | {"logprobs": True}) as answer:
                assert answer.status == 500
        assert [type(error) for error in played.errors] == [TypeError]

    play(script)


def test_the_end_is_told_to_all_who_wait_and_to_those_who_come():
    async def script(played):
        await played.call("POST", "/rollouts", {}, token=KEY)
        waiting = [
            asyncio.ensure_future(played.refused("POST", "/rollouts", {}, token=KEY)),
            asyncio.ensure_future(played.refused("POST", "/v1/chat/completions", ASK)),
        ]
        await played.driven.asked.wait()
        while not played.sessions.num_takers:
            await asyncio.sleep(0.01)
        played.server.fail(RunError("The learner is gone."))
        assert await asyncio.gather(*waiting) == [(503, "run_ended", None)] * 2
        status, answer = await played.call("POST", "/v1/reward", {"reward": 1})
        assert status == 503 and answer["error"]["message"] == "The learner is gone."
        port = int(played.server.url.rpartition(":")[2])
        began = asyncio.get_running_loop().time()
        await played.server.close()
        assert asyncio.get_running_loop().time() - began < server_module.CLOSE_SECONDS
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        while played.server._sampling:  # cancelled, as nobody will have their answers
            await asyncio.sleep(0.01)

    play(script)


def test_a_port_that_is_taken_is_named():
    async def script(played):
        port = int(played.server.url.rpartition(":")[2])
        with pytest.raises(
            RunError, match=f"OpenAIEndpoint.port is {port}, which can't be had: Address already in use"
        ):
            server_module._bound(port)

    play(script)


def test_nonsense_on_the_wire_disturbs_nobody(capfd):
    async def script(played):
        host, port = "127.0.0.1", int(played.server.url.rpartition(":")[2])
        for nonsense in (
            b"\x00\x01\x02\r\n\r\n",
            b"GET\r\n\r\n",
            b"POST /v1/reward HTTP/1.1\r\nContent-Length: 9\r\n\r\n{",
        ):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(nonsense)
            await writer.drain()
            writer.close()
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET /v1/models HTTP/1.0\r\n\r\n")  # without a Host
        assert b"403" in (await reader.readline())
        writer.close()
        assert (await played.call("GET", "/v1/models"))[0] == 200 and not played.errors

    play(script)
    assert capfd.readouterr() == ("", "")
