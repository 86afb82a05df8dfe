"""A verifiers taskset of a test whose tool is in a server: one for each rollout, or one that the taskset shares."""

from collections.abc import Iterator

import verifiers.v1 as vf
from adding_server import Adder

__all__ = ["Adding"]


class SumData(vf.TaskData):
    answer: int


class SumConfig(vf.TaskConfig):
    own: vf.ToolsetConfig | None = vf.ToolsetConfig()


class Sum(vf.Task[SumData, vf.State, SumConfig]):
    @classmethod
    def toolsets(cls, config: SumConfig) -> list[vf.Toolset]:
        return [] if config.own is None else [Adder(config.own)]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(str(self.data.answer) in trace.last_reply)


class AddingConfig(vf.TasksetConfig):
    task: SumConfig = SumConfig()
    shared: vf.SharedToolsetConfig | None = None


class Adding(vf.Taskset[Sum, AddingConfig]):
    @classmethod
    def toolsets(cls, config: AddingConfig) -> list[vf.Toolset]:
        return [] if config.shared is None else [Adder(config.shared)]

    def load(self) -> Iterator[Sum]:
        for number in range(3):
            yield Sum(SumData(prompt=f"{number} + 40?", answer=number + 40), self.config.task)
