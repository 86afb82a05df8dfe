"""Everything one run of the command line is told, resolved: what run.py can set, and what config.json records.

Values come from, later ones winning: the config classes' defaults, the task's recipe, the mode, a TOML file, the
command line (`make_run_config.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.advantages import Batchwise, GroupCentered
from pipeline.commands.shared_config import SharedConfig, check_eval_rows
from pipeline.config_checks import check_choice, check_class, check_integer, check_number, option, required
from pipeline.errors import ConfigError
from pipeline.losses import CISPO, GSPO, PPO, CustomLoss, DecoupledPPO, ImportanceSampling, Loss, PolicyGradient
from pipeline.models.model_directory import TINY_NAME
from pipeline.run_dir.config_json import config_json
from pipeline.tasks import TASKS
from pipeline.trainer_config import TrainerConfig

# The two modes differ in these options and nothing else.
MODES: dict[str, dict[str, Any]] = {
    "async": {"max_staleness": 2, "concurrency": 192},
    "sync": {"max_staleness": 0, "concurrency": 64},
}

# The names of the advantages on the command line.
ADVANTAGES: dict[str, GroupCentered | Batchwise] = {
    "group": GroupCentered(),
    "group_std": GroupCentered(standardize=True),
    "group_batch_std": GroupCentered(standardize="batch"),
    "batch": Batchwise(),
    "batch_std": Batchwise(standardize=True),
}

# The names of the losses on the command line.
LOSSES_BY_NAME: dict[str, type[Loss]] = {
    "cispo": CISPO,
    "ppo": PPO,
    "decoupled_ppo": DecoupledPPO,
    "importance_sampling": ImportanceSampling,
    "policy_gradient": PolicyGradient,
    "gspo": GSPO,
    "custom": CustomLoss,
}


def advantage_named(name: str) -> GroupCentered | Batchwise:
    """Raises ConfigError for a name that is none."""
    if name not in ADVANTAGES:
        raise ConfigError(f"RunConfig.advantage is {name!r}; it must be one of {', '.join(ADVANTAGES)}.")
    return ADVANTAGES[name]


def loss_named(name: str) -> type[Loss]:
    """Raises ConfigError for a name that is none."""
    if name not in LOSSES_BY_NAME:
        raise ConfigError(f"RunConfig.loss is {name!r}; it must be one of {', '.join(LOSSES_BY_NAME)}.")
    return LOSSES_BY_NAME[name]


# What every task trains with unless its recipe or the user says otherwise.
COMMON: dict[str, Any] = {"groups_per_step": 8, "group_size": 8, "normalize": "token", "completion": "wait"}

TASK_EVAL_ROWS = 64  # of the hundreds that a task holds out, unless the user says otherwise

# How models with a chat template start on a built-in task.
TEXT_RECIPE: dict[str, Any] = {
    "steps": 200,
    "advantage": "group_std",  # a first call that runs counts among those that don't: see docs/decisions/tasks.md
    "lr": 5e-6,
    "lr_warmup": 5,
    "grad_clip_norm": 1.0,
}

# How the tiny model, which knows no word yet, learns a task in a language of few.
WORD_RECIPE: dict[str, Any] = {
    "steps": 900,
    "advantage": "group_std",  # keeps rare guesses alive: see docs/decisions/tasks.md
    "lr": 6e-4,
    "lr_warmup": 10,
    "lr_floor": 0.1,
    "grad_clip_norm": 1.0,
}

# Per task, beside the budget that the task itself names: how it learns best, in the first language that it speaks.
RECIPES: dict[str, dict[str, Any]] = {
    "guess": WORD_RECIPE,
    "calculator": TEXT_RECIPE,
    "arithmetic": WORD_RECIPE,
    "search": WORD_RECIPE | {"steps": 300, "lr": 1e-3},
}


# What an environment, a reward or an agent of one's own starts from, whose best values nobody knows: the learning rate
# that comparable systems begin with, and room for a page of prompt and one of answer in each of a few turns.
OWN_BUDGET: dict[str, int] = {"max_turn_tokens": 1024, "max_context_tokens": 4096}
OWN_RECIPE: dict[str, Any] = {"steps": 200, "lr": 1e-6, "lr_warmup": 5, "grad_clip_norm": 1.0}
OWN = "own"  # how help and docs call these defaults


def task_defaults(task: str | None, language: str | None = None) -> dict[str, Any]:
    """Option values by name that a run of this task starts from in that language, by default the first one that it
    speaks; task None: a run of something else.
    """
    if task is None:
        return COMMON | task_budget(None) | OWN_RECIPE
    recipe = TEXT_RECIPE if language == "text" else RECIPES[task]
    return COMMON | {"eval_rows": TASK_EVAL_ROWS} | task_budget(task, language) | recipe


def task_budget(task: str | None, language: str | None = None) -> dict[str, int]:
    """What of `Budget` this task asks for, when it is trained and when it is measured."""
    if task is None:
        return dict(OWN_BUDGET)
    return dict(TASKS[task].budget.get(language or TASKS[task].speaks[0], {}))


def in_each_task(defaults: Callable[..., Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """`defaults` of every task, in each language that it speaks, and of what is none (OWN), by how help calls them."""
    found = {task: defaults(task) for task in TASKS}
    for name, task in TASKS.items():
        found |= {f"{name} in {language}": defaults(name, language) for language in task.speaks[1:]}
    return found | {OWN: defaults(None)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(SharedConfig):
    """One run of run.py. Its parts check themselves."""

    mode: str = option("async", "async: sample ahead within max_staleness; sync: one batch at a time")
    model: str = option(TINY_NAME, "the directory of the model to train; tiny: a small decoder from random weights")
    init: str | None = option(
        None, "a run, or a model directory, whose weights training starts from; none: the model's own"
    )
    steps: int = required("batches to train")
    max_minutes: float | None = option(
        None, "minutes after which the run has ended as by SIGTERM, saved, for --resume to go on with; none: no limit"
    )
    seed: int = option(0, "of the model's first weights, the task's rows and the sampling noise")
    samplers: int = required("sampler processes; none: one, or one per GPU beside the learner's")
    dtype: str = option("float32", "what samplers and learner compute in, or bfloat16; master weights are float32")
    slots: int | None = option(None, "copies of the weights; none: max_staleness + 2, one more with evaluations")
    run_dir: str | None = option(None, "where the run's files go; none: runs/<time>-<mode>")
    advantage: str = option(
        "group",
        "a reward minus the mean of its group; group_std: over the group's deviation, too; group_batch_std: over the "
        "common deviation; batch, batch_std: the same with the mean and the deviation of the whole batch",
    )
    loss: str = option("cispo", "which loss: " + ", ".join(LOSSES_BY_NAME) + " (a function of your own)")
    eval_every: int | None = option(
        None, "batches between evaluations on held-out rows; 0: one, at the end; none: no evaluation"
    )
    eval_rows: int | None = option(None, "held-out rows of an evaluation; none: all")
    eval_group_size: int = option(4, "trajectories per held-out row")
    eval_final_group_size: int = option(8, "the same for the last evaluation, at the end; 0: none is made for the end")
    trainer: TrainerConfig

    def __post_init__(self) -> None:
        self.check_shared()
        check_choice(self, "mode", tuple(MODES))
        advantage_named(self.advantage)
        loss_named(self.loss)
        check_integer(self, "slots", minimum=1, unit="copies of the weights", optional=True)
        check_integer(self, "steps", minimum=1, unit="batches to train")
        check_number(self, "max_minutes", above=0.0, optional=True)
        check_class(self, "trainer", (TrainerConfig,))
        self._check_evaluation()
        if self.mode == "async" and self.trainer.max_staleness == 0:
            raise ConfigError(
                "AsyncTrainer.max_staleness is 0, but RunConfig.mode is 'async', which samples ahead; leave the mode "
                "out, or raise max_staleness."
            )
        if self.mode == "sync" and self.trainer.max_staleness > 0:
            raise ConfigError(
                f"AsyncTrainer.max_staleness is {self.trainer.max_staleness}, but RunConfig.mode is 'sync', which "
                "trains only tokens of the current policy; leave it out, or use the mode async."
            )

    def _check_evaluation(self) -> None:
        check_integer(self, "eval_every", minimum=0, unit="batches between evaluations", optional=True)
        check_integer(self, "eval_rows", minimum=1, unit="held-out rows", optional=True)
        check_integer(self, "eval_group_size", minimum=1, unit="trajectories per held-out row")
        check_integer(self, "eval_final_group_size", minimum=0, unit="trajectories per held-out row")
        check_eval_rows(self)
        if self.eval_every is not None and not self.workload.holds_out:
            raise ConfigError(
                "RunConfig.eval_every is given, but no rows are held out; add WorkloadConfig.holdout (a number or "
                "a share of the rows), or WorkloadConfig.eval_data (a file of their own)."
            )
        if self.eval_every == 0 and self.eval_final_group_size == 0:
            raise ConfigError(
                "RunConfig.eval_every and RunConfig.eval_final_group_size are both 0, so nothing would ever be "
                "evaluated; leave one of them out."
            )

    def to_json(self) -> dict[str, Any]:
        """What config.json holds."""
        return config_json(self, seed=self.seed)
