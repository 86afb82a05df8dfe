"""Headway: asynchronous reinforcement learning for language models on one machine.

    import pipeline as rl

These are the names that users import. No torch is loaded here: models live in the worker processes. A name's module is
imported when the name is first used (PEP 562): an environment process, which knows little of all this, is up in a third
of the time.
"""

import importlib

from pipeline.version import VERSION as __version__

# As `typing` has it, which takes ten times as long to load as the rest of this file: until a command has its signal
# handlers, Python itself answers to Ctrl-C.
TYPE_CHECKING = False
if TYPE_CHECKING:  # for editors and type checkers; a test holds it against the table below
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
    from pipeline.single_turn import SingleTurn
    from pipeline.supervisor import Supervisor
    from pipeline.trainer import AsyncTrainer, run
    from pipeline.training.training_loop import Step
    from pipeline.trajectory import Group, Span, Trajectory
    from pipeline.user_code.probe import env_rows
    from pipeline.user_code.source import EnvSource
    from pipeline.user_warnings import ConfigWarning, RunWarning
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
    "ConfigWarning",
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

_NAMES_OF = {  # by module
    "pipeline.advantages": "Batchwise GroupCentered",
    "pipeline.chat.tiny": "TerseChat TinyChat",
    "pipeline.config": "Adam Budget Checkpointing Cosine ForwardBackwardBatch GroupCompletion KVCache Sampling "
    "Schedule Truncation cosine",
    "pipeline.data.load_rows": "load_rows",
    "pipeline.data.mixed_rows": "mix_rows",
    "pipeline.data.split_rows": "split_rows",
    "pipeline.endpoint.openai_endpoint": "OpenAIEndpoint",
    "pipeline.env": "Env ToolCall TrajectoryView Turn TurnResult tool",
    "pipeline.errors": "ConfigError ConfigTypeError InfrastructureError RunError TrajectoryError",
    "pipeline.evaluation.evaluator": "Evaluation Evaluator",
    "pipeline.losses": "CISPO GSPO PPO CustomLoss DecoupledPPO ImportanceSampling PolicyGradient",
    "pipeline.rollouts.rollout_engine": "RolloutEngine",
    "pipeline.single_turn": "SingleTurn",
    "pipeline.supervisor": "Supervisor",
    "pipeline.trainer": "AsyncTrainer run",
    "pipeline.training.training_loop": "Step",
    "pipeline.trajectory": "Group Span Trajectory",
    "pipeline.user_code.probe": "env_rows",
    "pipeline.user_code.source": "EnvSource",
    "pipeline.user_warnings": "ConfigWarning RunWarning",
    "shm.errors": "HeadwayError",
    "workers.errors": "WorkerDied",
    "workers.model_config": "ModelConfig",
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
