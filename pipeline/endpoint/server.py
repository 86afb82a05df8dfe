"""The endpoint's HTTP server: on the loopback interface, in the run's own loop, from a run's start to its end.

Requests are read, checked and answered here; what they do to a rollout is in `sessions.py` and `agent_loop.py`. When
the run ends, whoever waits is told so, and the port is closed. No token is logged, as nothing of a request is.
"""

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web  # an extra: whoever uses an endpoint imports this module, nobody else

from pipeline.config_checks import is_finite_number
from pipeline.endpoint.chat_reply import Answer, Envelope, completion, stream
from pipeline.endpoint.chat_request import ChatRequest, Served, read_chat_request
from pipeline.endpoint.refusal import (
    CONFLICT,
    FORBIDDEN,
    NOT_FOUND,
    TOO_LARGE,
    UNAUTHORIZED,
    UNAVAILABLE,
    Refusal,
    refuse,
)
from pipeline.endpoint.request_body import no_json, read_body
from pipeline.endpoint.sessions import Driven, Session, Sessions, same_token
from pipeline.errors import RunError
from pipeline.wording import shown

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")  # what a client may call this host; under any other name a web page may have led it here
MAX_BODY_BYTES = 64 * 2**20  # some ten million tokens
POLL_SECONDS = 30.0  # a harness waits so long for a rollout, unless it says otherwise; below clients' own time-outs
MAX_POLL_SECONDS = 3600.0
CLOSE_SECONDS = 2.0  # what answers have to reach clients in, at the end
NO_RETRY = {"x-should-retry": "false"}  # OpenAI's clients would ask again what will be refused again

_log = logging.getLogger("headway.endpoint")  # aiohttp's complaints about broken requests go nowhere
_log.addHandler(logging.NullHandler())
_log.propagate = False


class EndpointServer:
    """The server of one run. `start` it, `fail` it with what ended the run, `close` it.

    key: the bearer token of harnesses; calls_agents: there are none, Headway calls an agent for each rollout. on_error
    gets what goes wrong in its own code. address_file: is there while it runs, and tells a harness where it is and the
    key; nobody else may read it. Raises RunError for a port that can't be had.
    """

    def __init__(
        self,
        *,
        port: int,
        key: str,
        calls_agents: bool,
        idle_timeout: float,
        served: Served,
        sessions: Sessions,
        on_error: Callable[[Exception], None],
        address_file: Path | None = None,
    ) -> None:
        self.sessions = sessions
        self.calls_agents = calls_agents
        self.idle_timeout = idle_timeout
        self._key = key
        self._served = served
        self._on_error = on_error
        self._address_file = address_file
        self._num_requests = self._num_refused = 0
        self._socket = _bound(port)
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why the run is over
        self._sampling: set[asyncio.Task[Answer]] = set()
        self._runner: web.ServerRunner | None = None
        self._handlers: dict[tuple[str, str], Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]] = {
            ("POST", "/rollouts"): self._offer,
            ("POST", "/v1/chat/completions"): self._complete,
            ("POST", "/v1/reward"): self._reward,
            ("GET", "/v1/models"): self._models,
        }

    @property
    def is_over(self) -> bool:
        """Whether its run has ended."""
        return self._ended.done()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._socket.getsockname()[1]}"

    @property
    def base_url(self) -> str:
        """What OpenAI's clients are given."""
        return f"{self.url}/v1"

    async def start(self) -> None:
        loop = asyncio.get_running_loop()

        def make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
            return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=MAX_BODY_BYTES)

        # handler_cancellation: whoever waits for a rollout, or for its turn, and goes away gives it up.
        server = web.Server(
            self._answer, request_factory=make_request, handler_cancellation=True, access_log=None, logger=_log
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=CLOSE_SECONDS)
        await self._runner.setup()
        await web.SockSite(self._runner, self._socket).start()
        if self._address_file is not None:
            self._write_address(self._address_file)

    def _write_address(self, path: Path) -> None:
        """Whole or not at all: a harness may look for it again and again."""
        address = {"url": self.url, "api_key": self._key, "model": self._served.model}
        part = path.with_suffix(".part")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(address, file)
        os.replace(part, path)

    def fail(self, error: BaseException) -> None:
        """The run is over: who waits is told, and who asks from now on."""
        if not self._ended.done():
            self._ended.set_result(str(error))

    async def close(self) -> None:
        """Answer who is there, then close the port."""
        self.fail(RunError("The run has ended."))
        try:
            if self._runner is not None:
                await self._runner.cleanup()
        finally:
            self._socket.close()
            if self._address_file is not None:
                self._address_file.unlink(missing_ok=True)
            for task in self._sampling:
                task.cancel()

    def take_metrics(self) -> dict[str, float]:
        """Since the last call; see docs/metrics.md."""
        metrics = {"endpoint/requests": self._num_requests, "endpoint/refused": self._num_refused}
        self._num_requests = self._num_refused = 0
        return metrics

    # --- any request ---------------------------------------------------------------------------------------------

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """The outermost frame of a request."""
        self._num_requests += 1
        try:
            return await self._until_end(self._route(request))
        except Refusal as refusal:
            self._num_refused += 1
            return web.json_response(refusal.body(), status=refusal.status, headers=NO_RETRY)
        except ConnectionError:  # the client has gone in the middle of its answer
            raise
        except Exception as error:
            self._on_error(error)
            raise

    async def _until_end(self, work: Awaitable[web.StreamResponse]) -> web.StreamResponse:
        """The work's response; Refusal when the run ends first."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise self._run_ended()
        finally:
            task.cancel()

    def _run_ended(self) -> Refusal:
        return Refusal(UNAVAILABLE, self._ended.result(), code="run_ended")

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        if self._ended.done():
            raise self._run_ended()
        host = request.headers.get("Host", "")
        if host not in NAMES and host.rpartition(":")[0] not in NAMES:
            raise Refusal(FORBIDDEN, f"This is {self.url}; it isn't called {shown(host)}.", code="wrong_host")
        handler = self._handlers.get((request.method, request.path))
        if handler is None:
            known = ", ".join(f"{method} {path}" for method, path in self._handlers)
            raise Refusal(
                NOT_FOUND,
                f"{request.method} {request.path:.100} is nothing here; there are {known}.",
                code="unknown_url",
            )
        return await handler(request)

    def _session(self, request: web.BaseRequest) -> Session:
        session = self.sessions.find(_token(request))
        session.driven.touch()
        return session

    # --- each path -----------------------------------------------------------------------------------------------

    async def _offer(self, request: web.BaseRequest) -> web.StreamResponse:
        """The next rollout for a harness; 204 when none comes in time."""
        if not same_token(_token(request), self._key):
            raise Refusal(UNAUTHORIZED, "The token is not the endpoint's key.", code="invalid_api_key")
        body = await _body(request, ("wait_seconds",))
        seconds = body.get("wait_seconds", POLL_SECONDS)
        if not is_finite_number(seconds) or not 0.0 <= seconds <= MAX_POLL_SECONDS:
            raise refuse(
                "wait_seconds",
                f"wait_seconds is {shown(seconds)}; it is a number of seconds from 0 to {MAX_POLL_SECONDS:g}.",
            )
        self.sessions.hear()
        taken = await self.sessions.take(seconds)
        self.sessions.hear()
        if taken is None:
            return web.Response(status=204)
        session, token = taken
        try:
            session.driven.touch()
            offer = {"rollout": session.number, "base_url": self.base_url, "api_key": token}
            response = web.json_response(offer | {"model": self._served.model} | (session.offer or {}))
            await response.prepare(request)
            await response.write_eof()
        except (ConnectionError, asyncio.CancelledError):  # it never heard of this rollout
            self.sessions.put_back(session, token)
            raise
        return response

    async def _complete(self, request: web.BaseRequest) -> web.StreamResponse:
        session = self._session(request)
        asked = read_chat_request(await _body(request), self._served)
        answer = await self._sampled(session.driven, asked)
        session.num_answers += 1
        envelope = Envelope(f"chatcmpl-{session.number}-{session.num_answers}", int(time.time()), self._served.model)
        if not asked.stream:
            return web.json_response(completion(answer, asked, envelope, session.driven.text_of))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for part in stream(answer, asked, envelope, session.driven.text_of):
            await response.write(part)
        await response.write_eof()
        return response

    async def _sampled(self, driven: Driven, asked: ChatRequest) -> Answer:
        """The turn. A client that goes away ends nothing that has begun: what is sampled is recorded in any case."""
        wanted = True
        task = asyncio.ensure_future(driven.complete(asked, lambda: wanted))
        self._sampling.add(task)
        task.add_done_callback(self._sampling_ended)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            wanted = False
            raise
        except Refusal:
            raise
        except Exception as error:  # the trajectory has failed with it, and tells the run
            raise Refusal(UNAVAILABLE, f"The rollout has failed: {error}", code="rollout_failed") from None

    def _sampling_ended(self, task: asyncio.Task[Answer]) -> None:
        self._sampling.discard(task)
        if not task.cancelled():
            task.exception()  # seen, if the client has gone

    async def _reward(self, request: web.BaseRequest) -> web.StreamResponse:
        token = _token(request)
        if self.sessions.is_spent(token):
            raise Refusal(CONFLICT, "This rollout has ended: it has its reward, or failed.", code="rollout_ended")
        driven = self._session(request).driven
        body = await _body(request, ("reward", "metrics", "error"))
        if body.get("error") is not None:
            if body.get("reward") is not None:
                raise refuse("error", "Both a reward and an error are given; a rollout has one or the other.")
            if not isinstance(body["error"], str):
                raise refuse("error", f"error is {shown(body['error'])}; it is a sentence.")
            driven.give_up(body["error"])
        elif "reward" not in body:
            raise refuse("reward", "There is no reward; post a number, or an error.", "missing")
        else:
            driven.score(body["reward"], body.get("metrics"))
        return web.json_response({"ok": True})

    async def _models(self, request: web.BaseRequest) -> web.StreamResponse:
        self._session(request)
        model = {"id": self._served.model, "object": "model", "created": 0, "owned_by": "headway"}
        return web.json_response({"object": "list", "data": [model]})


def _bound(port: int) -> socket.socket:
    """A socket on the loopback interface; port 0: any that is free."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((HOST, port))
    except OSError as error:
        made.close()
        raise RunError(
            f"OpenAIEndpoint.port is {port}, which can't be had: {error.strerror}. Name another one, or 0 for any."
        ) from None
    return made


def _token(request: web.BaseRequest) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Refusal(
            UNAUTHORIZED, "The request has no token; send Authorization: Bearer TOKEN.", code="invalid_api_key"
        )
    return token.strip()


async def _body(request: web.BaseRequest, fields: tuple[str, ...] | None = None) -> dict[str, Any]:
    """The object in the body. fields: those that it may have; None: whoever reads them checks them."""
    try:
        data = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise Refusal(
            TOO_LARGE, f"The body has more than {MAX_BODY_BYTES // 2**20} MiB.", code="request_too_large"
        ) from None
    except web.RequestPayloadError:  # its Content-Encoding is another than it says
        raise no_json("it can't be unpacked") from None
    body = read_body(data)
    for name in body:
        if fields is not None and name not in fields:
            raise refuse(name, f"{name!r:.80} isn't supported; there are {', '.join(fields)}.", "unsupported")
    return body
