"""A verifiers taskset of a test: its environment is the user, who asks twice. Found by its name as a module."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["TwoQuestions", "TwoQuestionsEnv"]

AGAIN = "And half of it?"


class QuestionData(vf.TaskData):
    number: int


class QuestionConfig(vf.TaskConfig):
    fails: bool = False


class Question(vf.Task[QuestionData, vf.State, QuestionConfig]):
    @vf.reward(weight=2.0)
    async def is_even(self, trace: vf.Trace) -> float:
        """Of the second answer's length: both happen to a random model."""
        if self.config.fails:
            raise ValueError(f"no scorer for {self.data.number}")
        return float(len(trace.last_reply) % 2 == 0)

    @vf.metric
    async def answers(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class TwoQuestionsConfig(vf.TasksetConfig):
    task: QuestionConfig = QuestionConfig()
    num_tasks: int = 4
    seconds: float | None = None  # for an agent's answer


class TwoQuestions(vf.Taskset[Question, TwoQuestionsConfig]):
    def load(self) -> Iterator[Question]:
        for number in range(self.config.num_tasks):
            data = QuestionData(
                prompt=f"What is {number} + {number}?",
                system_prompt="Be short.",
                number=number,
                timeout=vf.TaskTimeout(agent=self.config.seconds),
            )
            yield Question(data, self.config.task)


class TwoQuestionsEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class TwoQuestionsEnv(vf.Env[TwoQuestionsEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as conversation:
            await conversation.turn()
            await conversation.turn(AGAIN)
