"""Runs of `process_envs.Babble`: long replies of random words, cut into requests of SEGMENT_TOKENS, and a record of
each segment, for tests that look at who sampled what.
"""

import asyncio
import os
import signal
from dataclasses import dataclass, field

import numpy as np
import torch
from running import published_weights

import pipeline as rl
from pipeline.chat.tiny import TerseChat
from pipeline.processes.active_run import ActiveRun
from pipeline.processes.sampler.sampler_client import SegmentResult
from pipeline.rollouts.rollout_log import RolloutLog
from pipeline.rollouts.trajectory_requests import TrajectoryRequests
from tests.mixed_twin import Recomputed
from workers.generation.engine_requests import EngineRequest
from workers.model import Weights, bind_weights

SEED = 42
SECONDS = 60.0  # bound on every wait
SEGMENT_TOKENS, TURN_TOKENS, TURNS = 24, 72, 2
LEAST_VERSIONS = (0, 1, 2, 3, 0, 0)  # what must be committed before group 0 asks for its next segment
CHAT = TerseChat([f"w{index}" for index in range(60)], stop_words=())


def make_trainer(model, run_dir, *, turns=TURNS, seed=SEED, sampling=None, **options):
    engine = rl.RolloutEngine(
        model,
        env="process_envs:Babble",
        schedule=rl.Schedule(concurrency=64),
        budget=rl.Budget(
            max_turns=turns, max_turn_tokens=TURN_TOKENS, segment_tokens=SEGMENT_TOKENS, max_context_tokens=256
        ),
        seed=seed,
        **(sampling or {}),
    )
    return rl.AsyncTrainer(
        engine=engine,
        optimizer=rl.Adam(lr=1e-2),
        loss=rl.CISPO(normalize="token"),
        completion=rl.GroupCompletion(mode="wait"),
        run_dir=str(run_dir),
        **options,
    )


@dataclass
class Recorder:
    """Every segment of every trajectory, the weights of every version, and what was still leased at the end."""

    segments: dict[tuple[int, int], list[SegmentResult]] = field(default_factory=dict)
    trajectories: dict[tuple[int, int], rl.Trajectory] = field(default_factory=dict)
    weights: dict[int, Weights] = field(default_factory=dict)
    leases: list[int] | None = None

    def watch(self, monkeypatch) -> "Recorder":
        log_segment, log_trajectory, close = RolloutLog.segment, RolloutLog.trajectory, ActiveRun.close

        def segment(log, group, member, one, *rest):
            self.segments.setdefault((group, member), []).append(one)
            log_segment(log, group, member, one, *rest)

        def trajectory(log, one):
            self.trajectories[one.group, one.member] = one
            log_trajectory(log, one)

        async def closing(run, **how):
            self.leases = [run.ledger.read_lease(slot) for slot in range(run.spec.num_slots)]
            await close(run, **how)

        monkeypatch.setattr(RolloutLog, "segment", segment)
        monkeypatch.setattr(RolloutLog, "trajectory", trajectory)
        monkeypatch.setattr(ActiveRun, "close", closing)
        return self

    def keep_weights(self, model, version: int) -> None:
        flat = torch.from_numpy(published_weights(model, version))
        self.weights[version] = bind_weights(flat, model.model_config)

    def prove(self, model, kv_max_age: int, seed: int = SEED) -> None:
        """Every segment by recomputation from the weights that were published under its version's name."""
        for (group, member), segments in self.segments.items():
            proof = Recomputed(self.weights, model.model_config, seed)
            context, generated, left = [], 0, list(segments)
            for span in self.trajectories[group, member].spans:
                if span.kind == "generated":
                    one = left.pop(0)
                    assert (span.tokens, span.version, span.kv_version) == (one.tokens, one.version, one.kv_version)
                    tokens = np.array(context, dtype=np.int32)
                    asked = EngineRequest(0, group, member, one.version, tokens, len(one.tokens), generated, kv_max_age)
                    proof.prove(asked, one)
                    generated += len(one.tokens)
                context += span.tokens
            assert not left


async def until(condition):
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.002)


async def stop_sampler_in_mid_reply(model):
    """A sampler that has a first request of group 0 stands still until the next version is published."""
    await until(lambda: model._run is not None and model._run.slots.committed == 0)
    run = model._run
    while True:
        await until(lambda: any(request.group == 0 for client in run.samplers for request in client._sent.values()))
        (client,) = [one for one in run.samplers if any(request.group == 0 for request in one._sent.values())]
        pid = run.workers.samplers[client.index].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(0.02)  # what it had answered already arrives
            if any(request.group == 0 and request.generated == 0 for request in client._sent.values()):
                assert run.slots.committed == 0
                await until(lambda: run.slots.committed >= 1)
                return
        finally:
            os.kill(pid, signal.SIGCONT)


def hold_requests_of_group_0(monkeypatch):
    """Its further segments are asked for when enough has been published meanwhile."""
    generate = TrajectoryRequests.generate

    async def later(requests, context, max_tokens, generated):
        await until(lambda: requests._run.slots.committed >= LEAST_VERSIONS[generated // SEGMENT_TOKENS])
        return await generate(requests, context, max_tokens, generated)

    def held(requests, context, max_tokens, generated):
        if requests._group != 0:
            return generate(requests, context, max_tokens, generated)
        return asyncio.ensure_future(later(requests, context, max_tokens, generated))

    monkeypatch.setattr(TrajectoryRequests, "generate", held)
