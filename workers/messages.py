"""The records that Headway's processes send each other: typed records of plain values. A leaf: no torch.

`message_codec.py` puts them on the wire. Bulk data (token ids, log-probs) does not travel here: a field `position`,
with a length, names where it lies in the sender's shared-memory queue (`shm/queue.py`); `consumed` gives back what its
sender has read from the queue the other way.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class GenerateRequest(NamedTuple):
    """Ask for one segment: at most `max_tokens` tokens after the context of `num_tokens` ids at `position`."""

    request: int  # unique in the run; the reply names it
    group: int  # negative in evaluations, so that noise and KV never mix with training's
    member: int
    version: int
    slot: int
    position: int
    num_tokens: int
    max_tokens: int
    generated: int  # tokens this trajectory has generated so far: where its noise goes on
    kv_max_age: int  # KV may be used whose oldest part is so many versions older; 0: of this version only


class Segment(NamedTuple):
    """One finished request; at `position` lie `num_tokens` int32 ids, then as many float32 behaviour log-probs."""

    request: int
    version: int
    kv_version: int  # the oldest version that computed any of the KV that the tokens were sampled over
    position: int
    num_tokens: int
    cached: int  # context tokens whose KV was already there
    stopped: bool  # True: the last token is a stop id; False: max_tokens reached
    seconds: float  # from its first forward pass to its last token
    queue_seconds: float  # from arrival at the sampler to its first forward pass
    evictions: int  # times that it gave its KV back to older requests, for want of room
    dropped: int  # tokens of its own that it then had to sample again, as they were over KV of older versions


class ToolRecord(NamedTuple):
    """One tool call that an environment made."""

    name: str
    seconds: float
    error: str | None


class EnvironmentCall(NamedTuple):
    """One call to a trajectory's environment. `call` is reset, restore, turn, truncate or drop.

    reset: argument {"row": dict, "seed": int}. turn: {"text": str, "tool_calls": [{"id", "name", "arguments",
    "error"}], "num_tokens": int, "stopped": bool}. truncate: {"cause": str}. drop: {} (close without a reward). turn
    and truncate may hold "unseen": what the conversation got since the last call without the environment, in order:
    turns as above, and {"messages": [...]}. restore, in place of a reset, when the process was lost: its argument with
    "messages" (the reset's), "turns": [{"turn": the argument, "messages": what followed, "rewrites": bool}], and, if
    there were any, the last "snapshot" and "loss_mask_end".
    """

    request: int
    group: int
    member: int
    call: str
    argument: dict[str, Any]


class EnvironmentReply(NamedTuple):
    """Its answer. `error` is null or one sentence; the other fields are then empty, but for {"timed_out": true} as the
    result of a call that used its time up.

    reset: result {"messages": [...], "tools": [schema, …], "wrap_up": [...], "recovery": str}, "wrap_up" for the final
    answer's request. turn: {"messages": [...], "max_turn_tokens": int | null} (with "rewrites": true the messages are
    the whole conversation, in place of what was), or, when the episode has ended, {"messages": null, "reward": float}.
    truncate: {"reward": float}. turn and truncate may hold "metrics": {name: float}, summed into `rollout/<name>`, and
    "loss_mask_end": the generated tokens that are trained. reset and turn may hold "snapshot": what a later restore
    needs. After a reward the environment is closed and gone.
    """

    request: int
    result: dict[str, Any]
    tools: list[ToolRecord]
    seconds: float
    error: str | None


@dataclass(slots=True)
class Message:
    """Base of all messages; see `KINDS` for the table."""


@dataclass(slots=True)
class Hello(Message):
    """Worker → supervisor, first: I am up."""

    role: str  # the module that serves it
    pid: int


@dataclass(slots=True)
class Start(Message):
    """Supervisor → worker, second: everything the role needs, as plain values (see the role's main)."""

    config: dict[str, Any]


@dataclass(slots=True)
class Ready(Message):
    """Worker → supervisor: started; `detail` holds what the role has to report (weights handles, sizes)."""

    detail: dict[str, Any]


@dataclass(slots=True)
class Failed(Message):
    """Worker → supervisor, last: why it ends, in one sentence; the trace is in its log.

    is_final: a rule was broken, so its successor would end the same way.
    """

    why: str
    is_final: bool


@dataclass(slots=True)
class Stop(Message):
    """Supervisor → worker: end now, in order."""


@dataclass(slots=True)
class Consumed(Message):
    """Worker → supervisor: nothing to say but how much of the other's queue has been read."""

    consumed: int = 0


@dataclass(slots=True)
class Payload(Message):
    """A piece of a payload that is too large to be written at once; the message that follows takes all pieces."""

    position: int
    length: int


@dataclass(slots=True)
class EndRun(Message):
    """Supervisor → worker: the run is over; close what its start message named, answer, and wait for the next start."""


@dataclass(slots=True)
class RunEnded(Message):
    """Worker → supervisor: nothing of the run is open any more."""


@dataclass(slots=True)
class Generate(Message):
    """Supervisor → sampler."""

    requests: list[GenerateRequest]
    consumed: int = 0


@dataclass(slots=True)
class Release(Message):
    """Supervisor → sampler: these trajectories have ended (free their KV); these versions are no longer leased."""

    trajectories: list[list[int]]  # [group, member]
    versions: list[int]
    consumed: int = 0


@dataclass(slots=True)
class Segments(Message):
    """Sampler → supervisor: what one engine step finished."""

    segments: list[Segment]
    consumed: int = 0


@dataclass(slots=True)
class ForwardBackward(Message):
    """Supervisor → learner: gradients of the rows at `position`, accumulated until the next `OptimStep`.

    Payload: int32 row lengths [num_rows]; then, over the rows' tokens end to end [num_tokens]: int32 token ids, float32
    loss weights, float32 scales (the normaliser in the weight; 0: not trained), float32 behaviour log-probs, int32
    versions (-1: not generated). All but the id at t belong to the prediction of token t+1; the last entry of a row is
    0, 0, 0, -1.
    """

    batch: int
    num_rows: int
    num_tokens: int
    position: int
    length: int
    zero_gradients: bool


@dataclass(slots=True)
class GradientsDone(Message):
    """Learner → supervisor: the forward/backward of `batch` has ended."""

    batch: int
    metrics: dict[str, float]
    consumed: int = 0


@dataclass(slots=True)
class OptimStep(Message):
    """Supervisor → learner: step from version `from_version` and publish into `slot`, if the gate allows.

    `groups` are the batch's; the reservations of all others must be met after it. The learner reads them from the
    ledger at `epoch` or later.
    """

    batch: int
    from_version: int
    to_version: int
    slot: int
    groups: list[int]
    epoch: int
    lr: float
    gradient_scale: float


@dataclass(slots=True)
class Published(Message):
    """Learner → supervisor: the update is whole: weights in the slot, ledger written."""

    version: int
    slot: int
    metrics: dict[str, float]
    consumed: int = 0


@dataclass(slots=True)
class Save(Message):
    """Supervisor → learner: write the weights of `version`, float32, as the safetensors file `path`, and the
    optimizer's state as `optimizer_path`.
    """

    version: int
    path: str
    optimizer_path: str


@dataclass(slots=True)
class Saved(Message):
    """Learner → supervisor: they are on disk, synced. Or `error` says in one sentence why not; nothing is left then.

    checksums: of the weights' file and of the optimizer's (`model_files/checksum.py`), made of what was to be written,
    not of what the disk holds.
    """

    version: int
    num_bytes: int
    checksums: list[int]
    error: str | None
    consumed: int = 0


@dataclass(slots=True)
class ReplayStep(Message):
    """Supervisor → learner: the step of an update that was taken once before, on the gradients of the
    `ForwardBackward`s before it. Only on the way to the version that the start message names.

    slot: where the version that it makes is to be resident; -1: nowhere.
    """

    batch: int
    from_version: int
    slot: int
    lr: float
    gradient_scale: float


@dataclass(slots=True)
class Replayed(Message):
    """Learner → supervisor: that was done. difference: the largest of a weight to what the slot held of this version
    already, which a learner that died has published; 0.0 if it held nothing.
    """

    version: int
    difference: float
    consumed: int = 0


@dataclass(slots=True)
class Environments(Message):
    """Supervisor → environment process."""

    calls: list[EnvironmentCall]


@dataclass(slots=True)
class EnvironmentReplies(Message):
    """Environment process → supervisor."""

    replies: list[EnvironmentReply] = field(default_factory=list)


# Kind numbers are part of the protocol: never reuse one.
KINDS: dict[int, type[Message]] = {
    1: Hello,
    2: Start,
    3: Ready,
    4: Failed,
    5: Stop,
    6: Consumed,
    7: Payload,
    8: EndRun,
    9: RunEnded,
    10: Generate,
    11: Release,
    12: Segments,
    20: ForwardBackward,
    21: GradientsDone,
    22: OptimStep,
    23: Published,
    24: Save,
    25: Saved,
    26: ReplayStep,
    27: Replayed,
    30: Environments,
    31: EnvironmentReplies,
}
