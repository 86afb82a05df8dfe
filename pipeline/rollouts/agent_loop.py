"""A trajectory that an agent drives by its requests, in place of an environment: from its token to its reward.

A request whose messages go on from what is recorded is answered behind those exact ids; any other starts a new
conditioning run. The model's words are never encoded again. Requests of one trajectory are answered one after another.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.endpoint.chat_reply import Answer
from pipeline.endpoint.chat_request import ChatRequest
from pipeline.endpoint.recorded_states import Place, RecordedStates, State
from pipeline.endpoint.refusal import BAD_REQUEST, CONFLICT, NO_ROOM, Refusal, refuse
from pipeline.endpoint.sessions import Session, Sessions
from pipeline.environments.values import finite
from pipeline.errors import (
    ConfigError,
    ConfigTypeError,
    HopelessError,
    TemplateError,
    TookTooLongError,
    TrajectoryError,
)
from pipeline.processes.environment.environment_handle import Dropped, EnvironmentHandle, EnvironmentLost
from pipeline.rollouts.doing import Doing, in_line
from pipeline.rollouts.sampled_turns import CUT, TURN, SampledTurns
from pipeline.trajectory import Trajectory

# The reward of a rollout that a limit ended and that nobody scores: what Env.on_truncated gives, too.
UNSCORED = 0.0
AGENT_TURN = {"text": "", "tool_calls": [], "num_tokens": 0, "stopped": True}  # the call in which an agent runs


@dataclass(eq=False, slots=True)
class AgentLoop:
    """State of one running trajectory; `Rollouts` use it as they use a `TrajectoryLoop`.

    environment: runs the agent, where Headway calls it; None: a harness takes the rollout from `sessions` and posts
    its reward. idle_timeout: seconds without a request or a reward after which it fails.
    """

    turns: SampledTurns
    sessions: Sessions
    environment: EnvironmentHandle | None
    base_url: str
    idle_timeout: float
    discarded: bool = False  # stopped, and it leaves nothing behind
    _session: Session | None = None
    _over: asyncio.Future[float] | None = None  # its reward
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _states: RecordedStates = field(default_factory=RecordedStates)
    _num_requests: int = 0  # under way
    _heard_at: float = 0.0  # when its agent was last heard of
    _called: bool = False  # where Headway calls its agent: it has

    @property
    def trajectory(self) -> Trajectory:
        return self.turns.trajectory

    @property
    def doing(self) -> Doing:
        """What it waits for: queue (nobody has taken it yet), sampling, or tool (its agent)."""
        if self.turns.sampling is not None:
            return self.turns.sampling
        if self._session is None:
            return in_line()
        if self.environment is None and not self._session.taken:
            return Doing("queue", "waiting for a harness to take it (POST /rollouts)", self._heard_at)
        return Doing("tool", "its agent, between two requests,", self._heard_at)

    @property
    def stopped_by(self) -> str | None:
        """The cause given to `stop`."""
        return self.turns.stopped_by

    # --- what Rollouts do with it ----------------------------------------------------------------------------------

    async def run(self, row: dict[str, Any], seed: int) -> None:
        """To the end: reward, truncation cause and spans are then in the trajectory. Raises TrajectoryError, and
        EnvironmentLost when it is to start again from nothing.

        A discarded trajectory just ends: it has no reward.
        """
        if self.discarded:  # before its first step
            return
        self._over = asyncio.get_running_loop().create_future()
        self.touch()
        offer = self._offer(row, seed) if self.environment is None else None
        self._session, token = self.sessions.open(self, offer)
        calling = None if self.environment is None else asyncio.ensure_future(self._call_agent(row, seed, token))
        try:
            await self._wait()
        finally:
            self.sessions.close(self._session)
            if calling is not None:
                calling.cancel()
        async with self._lock:  # what is being sampled is recorded, too
            error = self._over.exception()
        if self.discarded:
            return
        if error is not None:
            raise error
        self.trajectory.reward = self._over.result()

    def _offer(self, row: dict[str, Any], seed: int) -> dict[str, Any]:
        """What a harness is told of it."""
        try:
            json.dumps(row, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise HopelessError(
                f"The row of trajectory {self._name} can't be sent to a harness as JSON: {error}."
            ) from None
        return {"trajectory": self._name, "row": row, "seed": seed}

    def stop(self, cause: str, *, discard: bool = False) -> None:
        """End with `cause` when the running request is done, or now. discard: without a reward, as does a trajectory
        that has made no request yet.
        """
        self.turns.stopped_by, self.discarded = cause, discard or not self.turns.begun
        if not self.turns.sampling:
            self._end_stopped()

    def close(self) -> None:
        """Nothing of it goes on."""
        if self.environment is not None:
            self.environment.drop()

    # --- what its agent does with it -------------------------------------------------------------------------------

    async def complete(self, request: ChatRequest, is_wanted: Callable[[], bool] = lambda: True) -> Answer:
        """The model's next turn, when the requests before it are answered, if it is still wanted then. Raises Refusal;
        any other error ends the trajectory, too.
        """
        self._num_requests += 1
        self.sessions.num_requests += 1
        try:
            async with self._lock:
                self._refuse_if_over()
                if not is_wanted():
                    raise Refusal(BAD_REQUEST, "Its client has gone.", code="client_gone")
                return await self._take_turn(request)
        except Refusal:
            raise
        except Exception as error:  # whoever awaits the trajectory gets it
            self._fail(error)
            raise
        finally:
            self._num_requests -= 1
            self.sessions.num_requests -= 1
            self.touch()

    def score(self, reward: Any, metrics: Any) -> None:
        """End it. Raises Refusal for what is no reward, or no metrics."""
        if self.environment is not None:
            raise Refusal(BAD_REQUEST, "This rollout's agent returns its reward; post none.", code="unsupported")
        self._refuse_if_over(CONFLICT)
        try:
            value = finite(reward, "reward")
        except ValueError as error:
            raise refuse("reward", f"{error}.") from None
        self._settle(value, _checked(metrics))

    def give_up(self, sentence: str) -> None:
        """End it as failed, as its harness asks."""
        self._refuse_if_over(CONFLICT)
        self._fail(TrajectoryError(f"The harness gave up trajectory {self._name}: {sentence}"))

    def touch(self) -> None:
        self._heard_at = self.sessions.hear()

    def text_of(self, ids: Sequence[int]) -> str:
        return self.turns.chat.decode(ids)

    # --- the end ---------------------------------------------------------------------------------------------------

    def _settle(self, reward: float, metrics: dict[str, float]) -> None:
        nothing = self.turns.generated == 0 and not self.turns.sampling
        if nothing and self.trajectory.truncated is None:
            sentence = f"Trajectory {self._name} has a reward, but its agent made no request, so nothing was sampled."
            self._fail(TrajectoryError(sentence))
            raise Refusal(BAD_REQUEST, sentence, code="nothing_sampled")
        for name, value in metrics.items():
            self.trajectory.metrics[name] = self.trajectory.metrics.get(name, 0.0) + value
        self._over.set_result(reward)

    def _fail(self, error: Exception) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_exception(error)
            self._over.exception()  # seen: at the end of a run nobody may be left to await it

    def _end_stopped(self) -> None:
        if self._over is not None and not self._over.done():
            self.trajectory.truncated = self.turns.stopped_by
            self._over.set_result(UNSCORED)

    def _refuse_if_over(self, status: int = BAD_REQUEST) -> None:
        if self.turns.stopped_by is not None:
            raise Refusal(status, f"This rollout was ended by {self.turns.stopped_by}.", code="rollout_ended")
        if self._over.done():
            raise Refusal(status, "This rollout has ended: it has its reward, or failed.", code="rollout_ended")

    async def _wait(self) -> None:
        """Until it is over; TrajectoryError when nothing is heard for too long."""
        now = asyncio.get_running_loop().time
        while not self._over.done():
            left = self._idle_since() + self.idle_timeout - now()
            if left <= 0.0:
                self._fail(self._idle_error())
                break
            await asyncio.wait({self._over}, timeout=left)

    def _idle_since(self) -> float:
        """When its agent, or where it has none yet any harness, was last heard of: now, while a request is under way,
        or its environment process is not ready for it.
        """
        waits = self.environment is None and not self._session.taken
        harness_is_there = waits and (self.sessions.num_requests or self.sessions.num_takers)
        not_called = self.environment is not None and not self._called
        if self._num_requests or harness_is_there or not_called:
            return asyncio.get_running_loop().time()
        return self.sessions.heard_at if waits else self._heard_at

    def _idle_error(self) -> TrajectoryError:
        within = f"within idle_timeout = {self.idle_timeout:g} s"
        if self.environment is None and not self._session.taken:
            return HopelessError(
                f"No harness asked for trajectory {self._name}, or for anything else, {within} (POST /rollouts)."
            )
        asked = "made neither a request nor" if self.environment is None else "neither made a request nor returned"
        return TookTooLongError(f"The agent of trajectory {self._name} {asked} a reward {within}.")

    @property
    def _name(self) -> str:
        return f"{self.trajectory.group}.{self.trajectory.member}"

    # --- a turn ----------------------------------------------------------------------------------------------------

    async def _take_turn(self, request: ChatRequest) -> Answer:
        turns, trajectory = self.turns, self.trajectory
        if turns.is_last_turn:
            raise self._truncate("turns", f"Budget.max_turns is {turns.budget.max_turns}, and as many are made")
        if turns.generated >= turns.budget.max_generated_tokens:
            raise self._truncate("generated_tokens", f"the rollout has generated its {turns.generated} tokens")
        place = self._states.find(request.messages, request.tools)
        if self._go_on(place, request) is not None:
            raise self._no_room()
        trajectory.truncated = None  # a request before this one may have been too long
        num_prompt = len(turns.context)
        self._states.note_prompt(place, turns.history, trajectory.run, num_prompt)
        turn, stopped, end = await turns.sample(_least(request.turn_cap, turns.budget.max_turn_tokens))
        if turns.stopped_by is not None:
            self._end_stopped()
        if end not in (TURN, CUT) and (turns.stopped_by is None or not turn.ids):
            trajectory.truncated = end
        if not turn.ids:
            self._refuse_if_over()
            raise self._no_room() if end == "context" else self._truncate(end, "the sampler gave no token")
        self._states.note_turn(place, turns.history, turn, trajectory.run, len(turns.context))
        return Answer(
            turn,
            stopped,
            logprobs=[logprob for segment in turns.segments for logprob in segment.logprobs],
            versions=[segment.version for segment in turns.segments for _ in segment.tokens],
            prompt_tokens=num_prompt,
            cached_tokens=turns.segments[0].cached,
        )

    def _go_on(self, place: Place, request: ChatRequest) -> str | None:
        """Put the request's conversation before the model. Returns a cause, and changes nothing, if it is too long."""
        turns, messages, tools = self.turns, request.messages, request.tools
        try:
            if not turns.begun:
                turns.open(messages, tools)
                return None
            state = place.state
            if state is None:
                return turns.start_again(messages, tools)
            is_current = (state.run, state.num_tokens) == (self.trajectory.run, len(turns.context))
            if not is_current:
                return turns.branch(self._ids(state), state.history, state.turn, place.messages, tools)
            return None if state.turn is None else turns.reply(state.turn, place.messages)
        except (ConfigError, ConfigTypeError, TemplateError) as error:  # these messages can't be rendered
            raise refuse("messages", str(error), "invalid_messages") from None

    def _ids(self, state: State) -> list[int]:
        return self.trajectory.run_tokens(state.run)[: state.num_tokens]

    def _no_room(self) -> Refusal:
        limit = self.turns.budget.max_context_tokens
        return self._truncate("context", f"the messages leave no room to answer within {limit} tokens of context")

    def _truncate(self, cause: str, why: str) -> Refusal:
        """The rollout is truncated, unless a later request is answered."""
        self.trajectory.truncated = cause
        return Refusal(
            BAD_REQUEST, f"{why[0].upper()}{why[1:]}: post the reward (cause: {cause}).", code=NO_ROOM, param="messages"
        )

    # --- an agent that Headway calls -------------------------------------------------------------------------------

    async def _call_agent(self, row: dict[str, Any], seed: int, token: str) -> None:
        """Its environment's `reset` gets what it needs, its only turn is the agent's run."""
        told = {"row": row, "base_url": self.base_url, "api_key": token}
        try:
            await self.environment.call("reset", {"row": told, "seed": seed})
            self._called = True
            self.touch()
            reply = await self.environment.call("turn", AGENT_TURN)
        except Dropped:
            return
        except Exception as error:
            if isinstance(error, EnvironmentLost) and self.turns.stopped_by is not None:
                return  # what is being sampled ends it
            if isinstance(error, TrajectoryError) and self.trajectory.truncated is not None and not self._over.done():
                # It was refused a request that no budget was left for, and raised: that is a truncation.
                self._over.set_result(UNSCORED)
            self._fail(error)
            return
        if not self._over.done():
            try:
                self._settle(reply.result["reward"], reply.result.get("metrics", {}))
            except Refusal:  # nothing was sampled: the trajectory has failed with that
                pass


def _checked(metrics: Any) -> dict[str, float]:
    """Numbers by name. Raises Refusal."""
    if metrics is None:
        return {}
    if not isinstance(metrics, dict):
        raise refuse("metrics", "metrics is no object; it holds numbers by name.")
    try:
        return {name: finite(value, f"metric {name!r:.80}") for name, value in metrics.items()}
    except ValueError as error:
        raise refuse("metrics", f"{error}.") from None


def _least(*caps: int | None) -> int | None:
    return min((cap for cap in caps if cap is not None), default=None)
