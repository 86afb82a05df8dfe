"""Whom the trainer waits for within a batch: the group, and what the trajectory that holds it up is at."""

from pipeline.rollouts.rollouts import Rollouts
from pipeline.schedule import Blocked, Scheduler
from pipeline.stalls.waits import Culprit
from pipeline.trainer_config import TrainerConfig


class Culprits:
    """Of one run: who it is now, whenever asked."""

    def __init__(self, config: TrainerConfig, scheduler: Scheduler, rollouts: Rollouts, num_slots: int) -> None:
        self._config = config
        self._scheduler = scheduler
        self._rollouts = rollouts
        self._num_slots = num_slots

    def of_batch(self, blocked: Blocked) -> Culprit:
        """blocked: why no batch may train."""
        held = self._rollouts.doing(blocked.group)
        if blocked.why == "ready":
            detail = f"too few finished groups; group {blocked.group} is the oldest unfinished one ({held.words})"
            if self._config.stale_policy == "wait":
                detail += f"; {self._scheduler.pending} of {self._config.groups_per_step} are finished"
            return Culprit("ready", blocked.group, held.trajectory, detail)
        deadline = self._scheduler.deadline(blocked.group)
        who = "it is" if held.trajectory is None else f"trajectory {held.trajectory} is in:"
        detail = f"group {blocked.group} must train by version {deadline}; {who} {held.words}"
        return Culprit(held.cause, blocked.group, held.trajectory, detail)

    def of_slot(self) -> Culprit:
        """Who keeps the next version from a slot."""
        held = self._rollouts.holding_oldest()
        all_leased = f"all {self._num_slots} weight slots are leased"
        if held is None:
            return Culprit("slot", None, None, f"{all_leased}, by an evaluation at least; its end gives one back")
        detail = f"{all_leased}; trajectory {held.trajectory} holds the oldest version, and is in: {held.words}"
        return Culprit("slot", held.group, held.trajectory, detail)
