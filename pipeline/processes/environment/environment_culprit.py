"""Who holds up an environment process, judged from two looks at its activity: a pure rule.

A call that has used its time and the grace is cancelled by its own host long before, unless the host can't: its loop is
in a step that does not end (a plain reward that spins, an `async` tool that blocks), or some code holds the interpreter
and lets nothing else run (a regular expression that backtracks). In the second case those who wait for the interpreter
look as late as the one that has it; but only that one uses the processor.
"""

from collections.abc import Collection
from dataclasses import dataclass

from pipeline.environments.activity import Entry, Look

SILENT_NS = 3 * 10**9  # a loop without a sign of life for longer does not run


@dataclass(frozen=True, slots=True)
class Verdict:
    """The process can't go on. blamed: whose code it is (empty: nobody's that is known). why: in a few words.
    loop_runs: the others there could still go on.
    """

    blamed: tuple[Entry, ...]
    why: str
    loop_runs: bool = False


def judge(
    before: Look,
    look: Look,
    *,
    now_ns: int,
    limit_ns: int,
    step_ns: int,
    silence_ns: int,
    busy_threads: Collection[int],
    halted: bool,
) -> Verdict | None:
    """None: nothing is to be done. before: the look before this one, some time ago.

    limit_ns: what a call may take, and the grace to end in when it is cancelled. step_ns: the same for one that holds
    the loop, which can't be cancelled, so that nothing is gained by waiting for longer. silence_ns: how long the loop
    may stand still. busy_threads: those that used the processor between the looks. halted: somebody has stopped the
    process (SIGSTOP).
    """
    stayed = {*before.beside, before.loop}
    beside = [entry for entry in look.beside if entry in stayed]
    late = [entry for entry in beside if now_ns - entry.since_ns > limit_ns]
    silent_ns = now_ns - look.heartbeat_ns
    if before.heartbeat_ns != look.heartbeat_ns or silent_ns < min(SILENT_NS, silence_ns):  # the loop runs
        return Verdict(tuple(late), "did not end when it was cancelled", loop_runs=True) if late else None
    in_loop = look.loop if look.loop in stayed else None
    step_is_late = in_loop is not None and now_ns - in_loop.since_ns > (limit_ns if halted else step_ns)
    if not step_is_late and silent_ns <= silence_ns:
        return None
    if halted:
        return Verdict((), "was stopped (SIGSTOP, or a debugger) for longer than environment_timeout allows")
    holders = [entry for entry in (in_loop, *beside) if entry is not None and entry.thread in busy_threads]
    late_holders = [entry for entry in holders if now_ns - entry.since_ns > (step_ns if entry is in_loop else limit_ns)]
    blamed = late_holders or holders or ([in_loop] if in_loop is not None else late)
    return Verdict(tuple(blamed), "could not be cancelled" if blamed else "stood still")
