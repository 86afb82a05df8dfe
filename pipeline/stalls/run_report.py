"""A run's processes as a stall sees them: what moves, and their state as plain values for stall-<time>.json (ledger,
queues, sockets, stacks).
"""

import asyncio
import os
import time
from typing import Any

from pipeline.processes.active_run import ActiveRun
from pipeline.processes.worker.run_workers import process_name
from pipeline.processes.worker.worker_handle import WorkerHandle
from pipeline.stalls.tasks import task_lines
from shm.errors import LedgerError
from shm.ledger import Activity, Ledger, WorkerRow, WorkerState
from workers.processes.process_stat import read_stat, thread_states
from workers.processes.stacks import StackMemory

AT_WORK = (Activity.BUSY, Activity.PUBLISHING)
LOOK_SECONDS = 0.02  # between two looks whether all have answered


def moves_of(run: ActiveRun) -> tuple[Any, ...]:
    """What changes when anything gets on: what was done, tokens through models, the learner at a batch, starts."""
    rows = {name: _read(row) for name, row in run.time_rows.items()}
    learner = rows[process_name(run.workers.learner)]
    beat = learner.heartbeat_ns if learner is not None and learner.activity in AT_WORK else 0
    counters = [row and row.counter for row in rows.values()]
    starts = [read_stat(handle.pid).ticks for handle in run.workers.all if handle.is_starting]
    return (run.events.num_moves, counters, beat, starts)


def _read(row: WorkerRow) -> WorkerState | None:
    """None: its writer was halted or killed in the middle of it."""
    try:
        return row.read()
    except LedgerError:
        return None


async def run_report(run: ActiveRun) -> dict[str, Any]:
    """Takes a second or two: as long as processes need to say where they are."""
    return {
        "ledger": ledger_state(run.ledger),
        "queues": queue_states(run),
        "sockets": {process_name(handle): handle.socket_state() for handle in run.workers.all if handle.started},
        "processes": await process_states(run.workers.all, run.time_rows),
        "tasks": task_lines(),
    }


def queue_states(run: ActiveRun) -> dict[str, Any]:
    """What was asked of each process and is not answered, and the room in its rings."""
    environments = run.environments.state() if run.environments is not None else []
    samplers = {f"sampler-{client.index}": client.state() for client in run.samplers}
    return {"learner": run.learner.state()} | samplers | {"environments": environments}


def ledger_state(ledger: Ledger) -> dict[str, Any]:
    """What stands in it; a record whose writer was killed in the middle of it is told as torn."""
    slots = range(ledger.shape.num_slots)
    return {
        "policy_version": ledger.policy_version(),
        "slots": [_slot(ledger, slot) for slot in slots],
        "reservations": _or_torn(lambda: dict(zip(("epoch", "owed"), ledger.reservations(), strict=True))),
    }


def _slot(ledger: Ledger, slot: int) -> dict[str, Any]:
    def read() -> dict[str, Any]:
        found = ledger.slot(slot)
        return {"version": found.version, "state": found.state.name}

    return _or_torn(read) | {"leases": ledger.read_lease(slot)}


def _or_torn(read: Any) -> dict[str, Any]:
    try:
        return read()
    except LedgerError as error:
        return {"torn": str(error)}


async def process_states(handles: list[WorkerHandle], rows: dict[str, WorkerRow]) -> dict[str, Any]:
    """By process name, the supervisor first; all are asked for their stacks at once."""
    own = StackMemory()
    try:
        own.write_own()
        found = {"supervisor": _process(os.getpid(), None) | {"stacks": own.read()}}
    finally:
        own.close()
    asked = [(handle, handle.stacks) for handle in handles if handle.stacks is not None and handle.ask_for_stacks()]
    while not all(stacks.is_closed or stacks.is_whole() for _, stacks in asked):
        await asyncio.sleep(LOOK_SECONDS)
    for handle in handles:
        name = process_name(handle)
        found[name] = _process(handle.pid, rows.get(name)) if handle.started else {"state": "gone"}
        found[name] |= {"incarnation": handle.incarnation, "ready": handle.ready}
    for handle, stacks in asked:
        found[process_name(handle)]["stacks"] = [] if stacks.is_closed else stacks.read()
    return found


def _process(pid: int, row: WorkerRow | None) -> dict[str, Any]:
    stat = read_stat(pid)
    found = {"pid": pid, "state": stat.state, "processor_ticks": stat.ticks, "threads": thread_states(pid)}
    if row is not None:
        found["row"] = _row(row)
    return found


def _row(row: WorkerRow) -> dict[str, Any]:
    state = _read(row)
    if state is None:
        return {"torn": True}
    silent = (time.monotonic_ns() - state.heartbeat_ns) / 1e9 if state.heartbeat_ns else None
    return {
        "pid": state.pid,
        "incarnation": state.incarnation,
        "seconds_since_heartbeat": silent and round(silent, 3),
        "activity": state.activity.name,
        "counter": state.counter,
    }
