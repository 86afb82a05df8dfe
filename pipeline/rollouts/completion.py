"""When a group goes to the trainer: the rule of `GroupCompletion`, as a pure state machine. Tokens are its only clock.

Facts come in (a member started, generated, ended, is gone), decisions go out (members to stop, members to hand over).
Under "deadline", the end of the min_members-th member notes what every member has generated; from then on the group
closes as soon as a member that has started and not ended has added `max_straggler_tokens` since. The caller reports the
tokens of all requests that end in one instant before the ends of members in it. A member that starts again has so many
tokens anew; in a group that was closed by truncation meanwhile it is stopped when it has generated them.
"""

from collections.abc import Collection
from dataclasses import dataclass

from pipeline.config import GroupCompletion

GROUP_DEADLINE = "group_deadline"  # cause of a straggler that is truncated: it stays in its group
GROUP_DISCARD = "group_discard"  # cause of a straggler that is left out


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows from a fact, in this order: hand over the members `emit` (None: nothing yet), stop `stop`.

    final: no portion follows this one. cause: why the members of `stop` end; the rule hears of each by `ended` or
    `gone`.
    """

    emit: tuple[int, ...] | None = None
    final: bool = False
    stop: tuple[int, ...] = ()
    cause: str = ""


NOTHING = Decision()


class GroupProgress:
    """One group of `size` members under `rule`."""

    def __init__(self, rule: GroupCompletion, size: int) -> None:
        self._rule = rule
        self._unfinished = set(range(size))
        self._started: set[int] = set()
        self._again: set[int] = set()  # running, and not stopped since they started again
        self._tokens = [0] * size
        self._noted: list[int] | None = None  # tokens of each member when min_members had ended
        self._num_ended = 0
        self._to_emit: list[int] = []  # ended, and not handed over
        self.closed = False  # by the deadline

    @property
    def has_deadline(self) -> bool:
        """Whether the group may close before all have ended."""
        return self._rule.mode == "deadline"

    @property
    def discards(self) -> bool:
        """Whether members that are stopped leave nothing behind."""
        return self._rule.on_stragglers == "discard"

    def resume(self, handed_over: Collection[int], discarded: Collection[int]) -> Decision:
        """In an earlier run these members went out when the group was closed, and those left nothing behind."""
        self._unfinished.difference_update(handed_over, discarded)
        self._num_ended += len(handed_over)
        self.closed = bool(handed_over)
        if not self._unfinished:  # it ended before its last part went out
            return self._last()
        if self.closed and self.discards:
            return Decision(stop=tuple(sorted(self._unfinished)), cause=GROUP_DISCARD)
        return NOTHING

    def started(self, member: int) -> Decision:
        """The member makes its first request."""
        self._started.add(member)
        return self._close_if_due()

    def generated(self, member: int, tokens: int) -> Decision:
        """A request of the member has ended with so many tokens."""
        self._tokens[member] += tokens
        return self._close_if_due()

    def starts_again(self, member: int) -> None:
        """All that the member has generated is thrown away: what it generates from now on counts like tokens added
        since the note.
        """
        self._started.discard(member)
        self._again.add(member)
        self._tokens[member] = 0
        if self._noted is not None:
            self._noted[member] = 0

    def ended(self, member: int) -> Decision:
        """The member has its outcome: it was finished or truncated."""
        self._unfinished.remove(member)
        self._to_emit.append(member)
        self._num_ended += 1
        if not self._unfinished:
            return self._last()
        if self._num_ended == self._rule.min_members and self._rule.mode == "deadline":
            self._noted = list(self._tokens)
        return self._close_if_due()

    def gone(self, member: int) -> Decision:
        """The member was stopped and leaves nothing behind."""
        self._unfinished.remove(member)
        return NOTHING if self._unfinished else self._last()

    def _close_if_due(self) -> Decision:
        if self._noted is None:
            return NOTHING
        allowed = self._rule.max_straggler_tokens
        running = self._started & self._unfinished
        due = {member for member in running if self._tokens[member] - self._noted[member] >= allowed}
        if self.closed:
            return self._stop_again(due & self._again)
        if not due:
            return NOTHING
        self.closed = True
        self._again.clear()
        unfinished = tuple(sorted(self._unfinished))
        if self._rule.on_stragglers == "truncate":
            return Decision(stop=unfinished, cause=GROUP_DEADLINE)
        if self._rule.on_stragglers == "discard":
            return Decision(emit=self._take(), stop=unfinished, cause=GROUP_DISCARD)
        return Decision(emit=self._take())

    def _stop_again(self, members: set[int]) -> Decision:
        """In a closed group: members that have started again since, and have used up what they were allowed."""
        if self._rule.on_stragglers != "truncate" or not members:
            return NOTHING
        self._again -= members
        return Decision(stop=tuple(sorted(members)), cause=GROUP_DEADLINE)

    def _last(self) -> Decision:
        return Decision(emit=self._take(), final=True)

    def _take(self) -> tuple[int, ...]:
        members, self._to_emit = tuple(sorted(self._to_emit)), []
        return members
