"""Synchronous training with and without overlap: ready groups trained while others sample, against one pass a batch.

    python -m bench.sync_overlap --tool-latency lognormal:50:1.0

Both arms train `guess` in mode sync on one set of processes, alternating, with the same seed: the same rows, sampling
noise and tool latencies. They differ in the chunks alone: ours submits a chunk with every --overlap-min-sequences
rows, the peer has thresholds that are never reached, so each batch goes through forward/backward once, at its end.
Before any time is taken both must have trained the same first batch: tokens, rewards, loss and gradient norm.

A pair is one run of each arm; its time is the mean of train/batch_seconds over all steps but the first. What the ratio
leaves out: with a model as small as this one forward/backward is a small part of a batch, and on few cores the learner
takes its time from the samplers; a learner with a device of its own hides all but its last chunk.

Exit codes: 0 done, 1 a run failed or the arms differ, 2 bad options, 130 Ctrl-C. The last line on stdout is JSON.
"""

import asyncio
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench.command import BenchCommand, result_head, run_root
from bench.errors import BenchError
from bench.measures import check_audit
from pipeline.commands.launch import make_supervisor, make_trainer
from pipeline.commands.make_run_config import build
from pipeline.commands.run_config import MODES, RunConfig, task_defaults
from pipeline.commands.workload import open_workload
from pipeline.supervisor import Supervisor
from pipeline.version import VERSION

TASK = "guess"
NEVER = 2**31 - 1  # tokens of a chunk that no batch reaches
SAME = {  # metrics of the first batch, and how far they may be apart
    "train/generated_tokens": 0.0,
    "reward/mean": 0.0,
    "train/loss": 1e-5,
    "train/grad_norm": 1e-4,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What the bench is told."""

    pairs: int = 5
    steps: int = 12
    groups_per_step: int = 16
    group_size: int = 8
    overlap_min_sequences: int = 32
    tool_latency: str = "lognormal:50:1.0"
    device: str = "auto"


def bench(plan: Plan) -> None:
    with run_root(None) as root:
        print(report(plan, compare(plan, root)))


def all_configs(plan: Plan) -> list[RunConfig]:
    return [config_of(plan, overlaps, "unused") for overlaps in (True, False)]


def config_of(plan: Plan, overlaps: bool, run_dir: str) -> RunConfig:
    """What run.py makes of one arm's options; min_tokens is out of reach in both, min_sequences in the peer alone."""
    values = asdict(plan)
    del values["pairs"]
    chunks = {"overlap_min_sequences": plan.overlap_min_sequences if overlaps else None, "overlap_min_tokens": NEVER}
    return build(
        task_defaults(TASK) | MODES["sync"] | {"mode": "sync", "task": TASK} | values | chunks | {"run_dir": run_dir}
    )


def compare(plan: Plan, root: Path) -> list[tuple[float, float]]:
    """(seconds a batch of ours, of the peer) for each pair. Raises BenchError when the arms train different things."""
    pairs = []
    with make_supervisor(config_of(plan, True, "unused")) as model:
        for index in range(plan.pairs + 1):
            arms = (True, False) if index % 2 else (False, True)  # neither arm always follows the other
            runs = {overlaps: train(plan, model, overlaps, root / f"{index}-{overlaps}") for overlaps in arms}
            check_same(runs[True][0], runs[False][0])
            if index:  # the first pair warms the processes up
                pairs.append((batch_seconds(runs[True]), batch_seconds(runs[False])))
                print(
                    f"pair {index}: ours {1e3 * pairs[-1][0]:.1f} ms, peer {1e3 * pairs[-1][1]:.1f} ms", file=sys.stderr
                )
    return pairs


def train(plan: Plan, model: Supervisor, overlaps: bool, run_dir: Path) -> list[dict[str, float]]:
    """The metrics of each step of one audited run."""
    config = config_of(plan, overlaps, str(run_dir))
    workload = open_workload(config.workload)

    async def collect() -> list[dict[str, float]]:
        trainer = make_trainer(model, config, workload)
        return [step.metrics async for step in trainer.run(workload.train_rows(), plan.steps)]

    steps = asyncio.run(collect())
    check_audit(run_dir, plan.steps)
    chunks = max(step["train/backward_chunks"] for step in steps)
    if (chunks > 1) != overlaps:
        raise BenchError(f"{'Ours' if overlaps else 'The peer'} trained a batch in up to {chunks} chunks.")
    return steps


def check_same(ours: dict[str, float], peer: dict[str, float]) -> None:
    for name, tolerance in SAME.items():
        if abs(ours[name] - peer[name]) > tolerance:
            raise BenchError(f"The arms trained different first batches: {name} is {ours[name]} against {peer[name]}.")


def batch_seconds(steps: list[dict[str, float]]) -> float:
    return float(np.mean([step["train/batch_seconds"] for step in steps[1:]]))


def report(plan: Plan, pairs: list[tuple[float, float]]) -> str:
    """The table, and the same as one line of JSON."""
    ours, peer = np.array(pairs).T
    ratios = peer / ours
    low, middle, high = np.percentile(ratios, (10, 50, 90))
    config = config_of(plan, True, "unused")
    result = result_head("sync_overlap", plan) | {
        "ours_ms": 1e3 * float(np.median(ours)),
        "peer_ms": 1e3 * float(np.median(peer)),
        "ratio": float(middle),
        "ratio_p10": float(low),
        "ratio_p90": float(high),
        "ratios": ratios.tolist(),
        "device": config.device,
    }
    return "\n".join(
        (
            f"sync_overlap  {plan.groups_per_step} x {plan.group_size} trajectories a batch, chunks of "
            f"{plan.overlap_min_sequences} rows, tool latency {plan.tool_latency}  {config.device}  "
            f"peer=one pass a batch (headway {VERSION})",
            f"  ours {result['ours_ms']:.1f} ms   peer {result['peer_ms']:.1f} ms   ratio {middle:.2f}x   "
            f"median of {len(pairs)} pairs, p10-p90 {low:.2f}-{high:.2f}",
            json.dumps(result, allow_nan=False),
        )
    )


COMMAND = BenchCommand(
    doc=__doc__,
    plan=Plan,
    own={
        "pairs": (int, "runs of each arm"),
    },
    minima={"pairs": 1, "steps": 2},
    configs=all_configs,
    bench=bench,
)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
