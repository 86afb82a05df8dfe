"""What of unfinished groups a resumed run need not do again, and its file, RUN_DIR/journal/rollouts.msgpack.

The journal has what is finished. This file adds, now and then and at a run's end, the members that wait for the rest of
their group, and those under way whose environment another process can rebuild (`Env.recovery`). It may be older than
the log, or missing: what it says of a trajectory counts only where the log says the same.
"""

import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from pipeline.errors import JournalError
from pipeline.journal.record_codec import pack_trajectory, unpack_trajectory
from pipeline.run_dir.run_files import ROLLOUTS
from pipeline.trajectory import Trajectory
from pipeline.user_warnings import warn_of_run

FORMAT = 2


@dataclass(frozen=True, slots=True)
class RunningMember:
    """A trajectory under way. version: the policy that it is pinned to; None if each segment chooses its own. state:
    plain values that its loop goes on from.
    """

    trajectory: Trajectory
    version: int | None
    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class KeptMembers:
    """Of one group. handed_over: members that went out in a part; discarded: that never will. ended: those that wait
    for the others; running: those that go on. attempts: how often each has started again; failures: how often each has
    failed, as far as that counts.
    """

    handed_over: Collection[int] = ()
    discarded: Collection[int] = ()
    ended: Mapping[int, Trajectory] = field(default_factory=dict)
    running: Mapping[int, RunningMember] = field(default_factory=dict)
    attempts: Mapping[int, int] = field(default_factory=dict)
    failures: Mapping[int, int] = field(default_factory=dict)


def pack_unfinished(
    group: int,
    ended: Collection[Trajectory],
    running: Collection[RunningMember],
    attempts: Mapping[int, int] | None = None,
) -> bytes:
    """An unfinished group's part of the file. attempts: how often each member has started again, if it has. What can't
    be written (a number beyond 64 bits in a message) is left out.
    """
    kept = []
    for one in running:
        try:
            kept.append(msgpack.packb([pack_trajectory(one.trajectory), one.version, dict(one.state)]))
        except (TypeError, ValueError, OverflowError):  # it starts again, then
            continue
    return msgpack.packb([group, [pack_trajectory(one) for one in ended], kept, dict(attempts or {})])


def pack_file(groups: Collection[bytes]) -> bytes:
    """The file's contents, from the parts of its groups."""
    body = msgpack.packb(list(groups))
    return msgpack.packb([FORMAT, zlib.crc32(body), body])


def read_kept(run_dir: Path) -> dict[int, KeptMembers]:
    """By group; empty without a file. One that can't be read is passed over with a warning: its trajectories start
    again.
    """
    path = run_dir / ROLLOUTS
    try:
        form, check, body = _values(path.read_bytes(), list)
        if form != FORMAT or check != zlib.crc32(body):
            raise ValueError("its checksum is wrong, or another version of Headway wrote it")
        return dict(_group(part) for part in _values(body, list))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, LookupError, JournalError) as error:
        warn_of_run(
            f"{path} can't be used ({type(error).__name__}: {error}); trajectories that were under way start again."
        )
        return {}


def _group(part: bytes) -> tuple[int, KeptMembers]:
    group, ended, running, attempts = _values(part, list)
    trajectories = [unpack_trajectory(one) for one in ended]
    members = [_running(packed) for packed in running]
    if type(group) is not int or any(one.group != group for one in [*trajectories, *(m.trajectory for m in members)]):
        raise ValueError(f"it holds trajectories of other groups beside those of group {group!r:.40}")
    if any(type(number) is not int for pair in dict(attempts).items() for number in pair):
        raise ValueError(f"it holds the attempts {attempts!r:.80}")
    return group, KeptMembers(
        ended={one.member: one for one in trajectories},
        running={one.trajectory.member: one for one in members},
        attempts=dict(attempts),
    )


def _running(packed: bytes) -> RunningMember:
    values, version, state = _values(packed, list)
    if type(version) not in (int, type(None)) or type(state) is not dict:
        raise ValueError(f"it holds a trajectory with the version {version!r:.40} and the state {state!r:.40}")
    return RunningMember(unpack_trajectory(values), version, state)


def _values(data: bytes, kind: type) -> Any:
    """Plain values, no larger than their bytes say. Raises ValueError for anything else."""
    try:
        found = msgpack.unpackb(data, strict_map_key=False)
    except Exception as error:  # msgpack raises a family of unrelated classes
        raise ValueError(f"it is no msgpack ({error})") from error
    if not isinstance(found, kind):
        raise ValueError(f"it holds a {type(found).__name__} in place of a {kind.__name__}")
    return found
