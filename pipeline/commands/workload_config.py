"""What a run of the command line rolls out, as its options say: a built-in task, or data, environments, rewards and
agents of one's own.

`workload.py` turns it into rows and an environment.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pipeline.config_checks import check_choice, check_integer, check_number, is_finite_number, option
from pipeline.errors import ConfigError
from pipeline.tasks import TASKS
from pipeline.tasks.latency import FORMS, parse_latency
from pipeline.user_code.source import ADAPTERS
from pipeline.wording import label, shown

KINDS = ("task", "env", "reward", "agent")  # what says what is rolled out: one of these
OUTSIDE = "outside"  # an agent that comes by itself
FIELDS = ("prompt_field", "answer_field", "id_field", "allow_empty_prompts")  # how a data file is read
SOURCES = ("data", "eval_data", "holdout", *FIELDS)  # which rows there are
ROWS = (*SOURCES, "rows_seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig:
    """One environment, and where its rows come from. Paths are absolute; errors name fields as the subclass's own."""

    task: str | None = option(None, "a built-in task, with rows of its own")
    tool_latency: str = option("none", "how long the task's tool takes: none, fixed:MS or lognormal:MEDIAN_MS:SIGMA")
    env: str | None = option(
        None,
        "an environment of one's own: module:Class, path/to/file.py:Class, reasoning_gym:TASK or, alone, "
        "verifiers:NAME",
    )
    env_arguments: Mapping[str, Any] = field(
        default_factory=dict, metadata={"meaning": "keyword arguments of the environment, as a JSON object"}
    )
    data: str | None = option(
        None,
        "the rows: a JSONL, JSON, Parquet or CSV file, a directory saved by datasets, or module:callable; "
        "none: those that the environment brings",
    )
    reward: str | None = option(
        None, "rewards one answer to each row's prompt: module:function or path/to/file.py:function of (text, row)"
    )
    prompt_field: str | None = option(
        None, "the field that every row has its prompt in, text or messages; none: not checked, prompt with reward"
    )
    answer_field: str | None = option(None, "a field that every row must have; none: not checked")
    id_field: str | None = option(
        None, "the field that tells rows apart in logs and results; none: id, if rows have it"
    )
    allow_empty_prompts: bool = option(False, "let rows pass whose prompt is empty")
    system_prompt: str | None = option(None, "the system message before each prompt, with reward")
    holdout: int | float | None = option(
        None, "rows never trained on, a number or a share below 1, for evaluations here or by headway eval"
    )
    eval_data: str | None = option(None, "held-out rows from a file of their own, instead of holdout")

    @property
    def kind(self) -> str:
        """The field that says what is rolled out."""
        return next(name for name in KINDS if getattr(self, name, None))

    def check_environment(self, *others: str) -> None:
        """Raise ConfigError unless exactly one thing is rolled out, by task, env, reward or one of `others`, and every
        other field has an effect.
        """
        kinds = [name for name in ("task", "env", "reward", *others) if getattr(self, name)]
        if len(kinds) > 1:
            first, second = (label(self, name) for name in kinds[:2])
            raise ConfigError(
                f"{first} and {second} are both given, and each says what is rolled out; keep one (several "
                "environments are mixed by [[environment]] tables in a --config file)."
            )
        if not kinds:
            self._refuse_nothing(others)
        kind = kinds[0]
        if kind == "task":
            check_choice(self, "task", tuple(TASKS))
        if kind in ("reward", "agent") and self.data is None:
            raise ConfigError(
                f"{label(self, kind)} is {getattr(self, kind)!r}, but there are no rows; add --data FILE."
            )
        self._refuse_without_effect(kind)
        self._check_latency()
        self._check_holdout()

    def _refuse_nothing(self, others: tuple[str, ...]) -> None:
        if self.data is not None:
            wanted = "--env, --reward or --agent" if "agent" in others else "env or reward"
            raise ConfigError(
                f"{label(self, 'data')} is {self.data}, but nothing says what becomes of its rows; add {wanted}."
            )
        raise ConfigError(f"{label(self, 'env')} is missing: name what is rolled out by env, reward or task.")

    def _refuse_without_effect(self, kind: str) -> None:
        """kind: which of the exclusive fields is given."""
        if kind == "task":
            for name in SOURCES:
                self._refuse(name, f"with the task {self.task!r}, which has rows of its own, held-out ones among them")
        if kind == "env" and self.env.partition(":")[0] in ADAPTERS:
            for name in ("data", "eval_data"):
                self._refuse(name, f"with {self.env}, which brings its own rows and scores no others")
        if self.data is None and self.eval_data is None:
            for name in FIELDS:
                self._refuse(name, f"without {label(self, 'data')}, whose rows it is about")
        if self.prompt_field is None and kind != "reward":
            self._refuse("allow_empty_prompts", f"without {label(self, 'prompt_field')}: no prompt is checked")
        if kind != "reward":
            self._refuse("system_prompt", f"without {label(self, 'reward')}: an environment writes its own messages")
        if kind != "env":
            self._refuse("env_arguments", f"without {label(self, 'env')}, whose arguments they are")
        if kind != "task" and self.tool_latency != "none":
            raise ConfigError(
                f"{label(self, 'tool_latency')} is {self.tool_latency!r}, which only tools of built-in tasks obey; "
                "leave it out."
            )

    def _refuse(self, name: str, why: str) -> None:
        if getattr(self, name) not in (None, False, {}):
            raise ConfigError(f"{label(self, name)} has no effect {why}; leave it out.")

    def _check_latency(self) -> None:
        where, text = label(self, "tool_latency"), self.tool_latency
        try:
            parse_latency(text)
        except ConfigError as error:
            raise ConfigError(f"{where} is {text!r}; it must be {FORMS}, for example lognormal:50:1.0.") from error
        if text != "none" and "latency" not in TASKS[self.task].options:
            raise ConfigError(f"{where} is {text!r}, but the task {self.task!r} has no tool; leave it out.")

    def _check_holdout(self) -> None:
        where, held = label(self, "holdout"), self.holdout
        if held is None:
            return
        if not is_finite_number(held) or held <= 0 or (isinstance(held, float) and held >= 1):
            raise ConfigError(
                f"{where} is {shown(held)}; it is a number of rows (64) or a share of them below 1 (0.1)."
            )
        if self.eval_data is not None:
            raise ConfigError(
                f"{where} takes held-out rows from the rows to train on, and {label(self, 'eval_data')} from a file; "
                "keep one."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentTable(EnvironmentConfig):
    """One of several environments. Its rows carry its name as their "environment"."""

    name: str = option("", "how rows, trajectories.jsonl and errors call it; none: what env, reward or task is called")
    weight: float = option(1.0, "its share of the groups let in, beside the weights of the others")

    def __post_init__(self) -> None:
        self.check_environment()
        check_number(self, "weight", above=0.0)

    @property
    def called(self) -> str:
        """Its name, or the last part of what it rolls out."""
        return self.name or getattr(self, self.kind).rpartition(":")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig(EnvironmentConfig):
    """What a whole run rolls out. rows_seed: that built-in tasks and environments make their rows by. language: what
    the model is spoken to in, one of `Task.speaks`.
    """

    task: str | None = option(
        None,
        f"a built-in task: {', '.join(TASKS)}; none: guess with the model tiny, else calculator, unless env, reward "
        "or agent is given",
    )
    agent: str | None = option(
        None,
        f"an agent that drives rollouts through an OpenAI endpoint: module:function; {OUTSIDE}: it comes by itself",
    )
    environments: tuple[EnvironmentTable, ...] = ()  # a mix; all else is then left out
    endpoint_port: int = option(0, "the port that agents find the endpoint at, on this machine only; 0: a free one")
    rows_seed: int = 0
    language: str = "tiny"

    @property
    def holds_out(self) -> bool:
        """Whether there are held-out rows."""
        parts = self.environments or (self,)
        return any(part.task is not None or part.holdout is not None or part.eval_data is not None for part in parts)

    def __post_init__(self) -> None:
        if self.environments:
            return self._check_mix()
        self.check_environment("agent")
        check_integer(self, "endpoint_port", minimum=0, maximum=65535, unit="ports")
        if self.agent is None and self.endpoint_port:
            raise ConfigError(
                f"{label(self, 'endpoint_port')} has no effect without {label(self, 'agent')}; leave it out."
            )

    def _check_mix(self) -> None:
        for name in ("agent", "endpoint_port", *(f.name for f in fields(EnvironmentConfig))):
            if getattr(self, name) not in (None, False, 0, {}, "none"):
                raise ConfigError(
                    f"{label(self, name)} has no effect beside [[environment]] tables, which say all of it; write it "
                    "there, or leave it out."
                )
