"""trajectories.jsonl: some of each batch as people read them, with their conversations and what they earned.

Which ones may be is fixed beforehand, so that only their messages are kept until they train: in each group a few
members, other ones in the next group. Of these a batch tells those that are spread over its groups, the next one's over
other groups.
"""

from collections.abc import Sequence
from math import isfinite
from typing import Any

from pipeline.data.mixed_rows import MixedRows
from pipeline.dataset import ENVIRONMENT_KEY, row_id
from pipeline.run_dir.json_lines import JsonLines
from pipeline.trainer_config import TrainerConfig
from pipeline.trajectory import Group, Trajectory
from pipeline.wording import shown


class TrajectoryLog:
    """rows: the dataset's, whose ids are told."""

    def __init__(self, lines: JsonLines, rows: Sequence[dict[str, Any]], config: TrainerConfig) -> None:
        self._lines = lines
        self._rows = rows
        self._per_batch = config.log_trajectories
        self._per_group = -(-config.log_trajectories // config.groups_per_step)
        self._group_size = config.group_size

    def wants(self, group: int, member: int) -> bool:
        """Whether that trajectory may be told of."""
        return (member - group - group // self._group_size) % self._group_size < self._per_group

    def write(self, step: int, version: int, groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> None:
        """The lines of one batch, which trains at `version`. Raises RunError when the disk is full.

        advantages: of each trajectory, by group.
        """
        pairs = zip(groups, advantages, strict=True)
        told = [
            (trajectory, advantage)
            for group, values in pairs
            for trajectory, advantage in zip(group.trajectories, values, strict=True)
            if trajectory.conversation is not None
        ]
        count = min(self._per_batch, len(told))
        for index in sorted((rank * len(told) // count + step) % len(told) for rank in range(count)):
            trajectory, advantage = told[index]
            self._lines.write({"step": step} | self._record(trajectory, advantage, version))
        self._lines.flush()

    def _record(self, trajectory: Trajectory, advantage: float, version: int) -> dict[str, Any]:
        row = self._rows[trajectory.row]
        named = row_id(row)
        of_mix = {ENVIRONMENT_KEY: row[ENVIRONMENT_KEY]} if isinstance(self._rows, MixedRows) else {}
        return {
            "group": trajectory.group,
            "member": trajectory.member,
            "row": trajectory.row,
            **({} if named is None else {"id": named}),
            **of_mix,
            "reward": trajectory.reward,
            "advantage": float(advantage),
            "truncated": trajectory.truncated,
            "turns": trajectory.num_turns,
            "tokens": trajectory.generated_tokens,
            "segments": [
                {"tokens": len(span.tokens), "version": span.version, "age": version - span.version}
                for span in trajectory.spans
                if span.kind == "generated"
            ],
            "messages": as_json(trajectory.conversation),
        }


def as_json(value: Any) -> Any:
    """`value`, of plain values, with texts in place of those that JSON has not: the log ends no run for what a message
    holds beside its text.
    """
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(as_json(key)): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and isfinite(value)):
        return value
    return f"{len(value):,} bytes" if isinstance(value, bytes) else shown(value)
