"""Headway: asynchronous reinforcement learning for language models on one machine.

    import pipeline as rl

These are the names that users import. No torch is loaded here: models live in the worker processes.
"""

from pipeline.advantages import Batchwise, GroupCentered
from pipeline.chat.tiny import TerseChat, TinyChat
from pipeline.config import (
    Adam,
    Budget,
    Checkpointing,
    Cosine,
    ForwardBackwardBatch,
    GroupCompletion,
    KVCache,
    Sampling,
    Schedule,
    Truncation,
    cosine,
)
from pipeline.data.load_rows import load_rows
from pipeline.data.mixed_rows import mix_rows
from pipeline.data.split_rows import split_rows
from pipeline.endpoint.openai_endpoint import OpenAIEndpoint
from pipeline.env import Env, ToolCall, TrajectoryView, Turn, TurnResult, tool
from pipeline.errors import ConfigError, ConfigTypeError, InfrastructureError, RunError, TrajectoryError
from pipeline.evaluation.evaluator import Evaluation, Evaluator
from pipeline.losses import CISPO, GSPO, PPO, CustomLoss, DecoupledPPO, ImportanceSampling, PolicyGradient
from pipeline.rollouts.rollout_engine import RolloutEngine
from pipeline.run_warnings import RunWarning
from pipeline.single_turn import SingleTurn
from pipeline.supervisor import Supervisor
from pipeline.trainer import AsyncTrainer, run
from pipeline.training.training_loop import Step
from pipeline.trajectory import Group, Span, Trajectory
from pipeline.user_code.probe import env_rows
from pipeline.user_code.source import EnvSource
from pipeline.version import VERSION as __version__
from shm.errors import HeadwayError
from workers.errors import WorkerDied
from workers.model_config import ModelConfig

__all__ = [
    "Adam",
    "AsyncTrainer",
    "Batchwise",
    "Budget",
    "CISPO",
    "Checkpointing",
    "ConfigError",
    "ConfigTypeError",
    "Cosine",
    "CustomLoss",
    "DecoupledPPO",
    "Env",
    "EnvSource",
    "Evaluation",
    "Evaluator",
    "ForwardBackwardBatch",
    "GSPO",
    "Group",
    "GroupCentered",
    "GroupCompletion",
    "HeadwayError",
    "ImportanceSampling",
    "InfrastructureError",
    "KVCache",
    "ModelConfig",
    "OpenAIEndpoint",
    "PPO",
    "PolicyGradient",
    "RolloutEngine",
    "RunError",
    "RunWarning",
    "Sampling",
    "Schedule",
    "SingleTurn",
    "Span",
    "Step",
    "Supervisor",
    "TerseChat",
    "TinyChat",
    "ToolCall",
    "Trajectory",
    "TrajectoryError",
    "TrajectoryView",
    "Truncation",
    "Turn",
    "TurnResult",
    "WorkerDied",
    "__version__",
    "cosine",
    "env_rows",
    "load_rows",
    "mix_rows",
    "run",
    "split_rows",
    "tool",
]
