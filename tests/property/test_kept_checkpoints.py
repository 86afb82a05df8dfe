"""What of checkpoints and journal stays is enough to come back, after any history, and no more than that."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.checkpoints.kept import best_versions, what_stays

actions = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.integers(1, 5)),
        st.just(("save", 0)),
        st.just(("failed save", 0)),
        st.tuples(st.just("hold"), st.integers(0, 8)),  # a lease, an owed group: so many versions back
        st.tuples(st.just("let go"), st.integers(0, 8)),
        st.just(("evaluate", 0)),
        st.tuples(st.just("score"), st.integers(0, 3)),
        st.tuples(st.just("damage"), st.integers(0, 3)),  # or removed by hand
        st.just(("prune", 0)),
    ),
    max_size=60,
)


class Disk:
    """What a run has written and not removed: checkpoints, and the updates that are in each file of the journal."""

    def __init__(self) -> None:
        self.complete: dict[int, int] = {}
        self.journal: dict[int, list[int]] = {0: []}  # file -> versions that its updates began at
        self.version = 0

    def reaches(self, base: int, ordinal: int, version: int) -> bool:
        """Whether replay from `base` comes to `version`: every update between is in a file that is there."""
        if any(number not in self.journal for number in range(ordinal, max(self.journal) + 1)):
            return False
        found = [one for number in sorted(self.journal) if number >= ordinal for one in self.journal[number]]
        return found == list(range(base, self.version)) and base <= version <= self.version

    def can_come_to(self, version: int) -> bool:
        """From any checkpoint, or from the model's own weights."""
        return any(self.reaches(*base, version) for base in [(0, 0), *self.complete.items()])


@given(actions, st.integers(1, 4), st.integers(0, 3))
@settings(max_examples=300, deadline=None)
def test_what_recovery_needs_stays_and_nothing_else(history, keep, keep_best):
    disk, held, unscored, rewards = Disk(), [], set(), {}
    damaged = 0
    for action, number in history:
        if action == "update":
            disk.journal[max(disk.journal)] += range(disk.version, disk.version + number)
            disk.version += number
        elif action in ("save", "failed save"):
            if disk.version not in disk.complete:
                ordinal = max(disk.journal) + 1
                disk.journal[ordinal] = []
                if action == "save":
                    disk.complete[disk.version] = ordinal
                    damaged = 0
        elif action == "hold":
            wanted = max(0, disk.version - number)
            if wanted >= min(held, default=disk.version):  # a version that nobody holds is not published any more
                held.append(wanted)
        elif action == "let go" and held:
            held.pop(number % len(held))
        elif action == "evaluate":
            unscored.add(disk.version)
        elif action == "score" and unscored:
            one = sorted(unscored)[0]
            unscored.discard(one)
            rewards[one] = number / 2
        elif action == "damage" and disk.complete and keep > 1 and damaged < keep - 1:
            newest = max(disk.complete)
            del disk.complete[newest]
            damaged += 1
        elif action == "prune":
            needed = min([*held, disk.version])
            before = dict(disk.complete)
            stays = what_stays(
                before, oldest_needed=needed, keep=keep, keep_best=keep_best, rewards=rewards, unscored=unscored
            )
            assert stays.versions <= before.keys()
            disk.complete = {version: before[version] for version in stays.versions}
            disk.journal = {file: found for file, found in disk.journal.items() if file >= stays.journal}
            assert set(sorted(before)[-keep:]) <= stays.versions
            assert set(best_versions(before, rewards, keep_best)) <= stays.versions
            waiting = len(unscored) if keep_best else 0
            assert len(stays.versions) <= keep + 1 + keep_best + waiting
            if keep > 1 or not damaged:
                assert disk.can_come_to(needed)
        assert disk.can_come_to(disk.version)


def test_the_second_newest_serves_alone():
    complete = {10: 1, 20: 2, 30: 3}
    assert what_stays(complete, oldest_needed=30, keep=2) == what_stays(complete, oldest_needed=20, keep=2)
    stays = what_stays(complete, oldest_needed=30, keep=2)
    assert (stays.versions, stays.journal) == ({20, 30}, 2)


def test_an_older_one_stays_while_a_version_before_the_next_is_needed():
    complete = {10: 1, 20: 2, 30: 3}
    assert what_stays(complete, oldest_needed=19, keep=1).versions == {10, 30}
    assert what_stays(complete, oldest_needed=19, keep=1).journal == 1
    assert what_stays(complete, oldest_needed=20, keep=1).versions == {20, 30}
    assert what_stays(complete, oldest_needed=30, keep=1).versions == {30}


def test_before_the_first_the_journal_is_whole():
    assert what_stays({10: 1}, oldest_needed=10, keep=2).journal == 0  # for when it is damaged
    assert what_stays({10: 1}, oldest_needed=9, keep=1).journal == 0
    assert what_stays({10: 1}, oldest_needed=10, keep=1).journal == 1
    assert what_stays({}, oldest_needed=0, keep=1).journal == 0
    assert what_stays({0: 1, 10: 2}, oldest_needed=9, keep=1).journal == 1  # version 0 was saved, too
    assert what_stays({0: 1}, oldest_needed=0, keep=2).journal == 0  # for when that is damaged


def test_the_best_stay_and_equal_ones_are_the_newer():
    complete = {10: 1, 20: 2, 30: 3, 40: 4}
    rewards = {0: 9.0, 10: 0.5, 20: 0.5, 30: 0.25}
    assert best_versions(complete, rewards, 2) == [20, 10]
    stays = what_stays(complete, oldest_needed=40, keep=1, keep_best=1, rewards=rewards, unscored={30})
    assert (stays.versions, stays.journal) == ({20, 30, 40}, 4)
    assert what_stays(complete, oldest_needed=40, keep=1, rewards=rewards, unscored={30}).versions == {40}
