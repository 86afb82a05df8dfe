"""The options of RolloutEngine and AsyncTrainer, and the rules that need several configs at once.

Both objects build one of these from their keyword arguments, so every contradiction is found before a process starts.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from pipeline.advantages import Batchwise, GroupCentered
from pipeline.config import (
    Adam,
    Budget,
    Checkpointing,
    ForwardBackwardBatch,
    GroupCompletion,
    KVCache,
    Sampling,
    Schedule,
    Truncation,
)
from pipeline.config_checks import (
    MAX_COUNT,
    check_choice,
    check_class,
    check_flag,
    check_integer,
    check_number,
    option,
    required,
)
from pipeline.errors import ConfigError, ConfigTypeError
from pipeline.losses import LOSSES, CustomLoss, Loss, unsound_reason
from pipeline.schedule import BATCH_ORDERS, STALE_POLICIES
from pipeline.user_warnings import warn
from pipeline.wording import shown

SAMPLING_POLICIES = ("trajectory", "segment")
FAILURE_POLICIES = ("stop", "replace")
ZERO_VARIANCE_POLICIES = ("train", "replace")
STALL_POLICIES = ("continue", "stop")
ADVANTAGES = (GroupCentered, Batchwise)
MAX_PROCESSES = 1024  # that run environments: beyond it, a slip that would fill the machine


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything RolloutEngine is told apart from the model and the environment."""

    LABEL: ClassVar[str] = "RolloutEngine"  # how errors name it

    schedule: Schedule = field(default_factory=Schedule)
    budget: Budget = field(default_factory=Budget)
    sampling_policy: str = option(
        "trajectory",
        "trajectory: one policy from its first token to its last; segment: later requests may use newer ones",
    )
    kv_cache: KVCache = field(default_factory=KVCache)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int = 0
    environment_timeout: float = option(
        600.0, "seconds that one call into an environment may take, or that an agent of --agent may be silent"
    )
    environment_processes: int | None = option(
        None, "processes that run environments; none: a quarter as many as there are cores"
    )
    max_retries: int = option(2, "times that a trajectory which failed starts again, before on_failure decides")
    trajectory_timeout: float | None = option(
        None, "seconds that one trajectory may take, then it is truncated; none: no limit"
    )

    def __post_init__(self) -> None:
        check_class(self, "schedule", (Schedule,))
        check_class(self, "budget", (Budget,))
        check_class(self, "kv_cache", (KVCache,))
        check_choice(self, "sampling_policy", SAMPLING_POLICIES)
        check_number(self, "environment_timeout", above=0.0)
        check_integer(self, "environment_processes", minimum=1, maximum=MAX_PROCESSES, unit="processes", optional=True)
        check_integer(self, "max_retries", minimum=0, maximum=MAX_COUNT, unit="new starts of a trajectory")
        check_number(self, "trajectory_timeout", above=0.0, optional=True)
        _ = self.sampling  # Sampling checks the four options it is made of
        ages_kv = self.kv_cache.max_staleness > 0 or self.kv_cache.on_limit == "refill"
        if self.sampling_policy == "trajectory" and ages_kv:
            raise ConfigError(
                f'sampling_policy is "trajectory", which keeps one policy from start to end, so {self.kv_cache} '
                'would have no effect; leave kv_cache out, or use sampling_policy="segment".'
            )
        if self.sampling_policy == "segment" and not ages_kv:
            raise ConfigError(
                'sampling_policy is "segment", but kv_cache allows no KV of an older policy and no refill; use '
                'KVCache(max_staleness=1) or more, or KVCache(on_limit="refill", allow_reprefill=True).'
            )

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """Everything AsyncTrainer is told apart from the engine itself and callables."""

    LABEL: ClassVar[str] = "AsyncTrainer"

    engine: EngineConfig
    optimizer: Adam
    loss: Loss
    completion: GroupCompletion
    groups_per_step: int = required("groups of one batch")
    group_size: int = option(16, "trajectories of one group")
    kl_coefficient: float = option(0.0, "of the KL divergence to the first weights, added to the loss; 0: off")
    entropy_coefficient: float = option(0.0, "of the entropy, taken from the loss; 0: off")
    max_staleness: int = option(2, "largest age of a trained token's policy, in optimizer updates")
    stale_policy: str = option(
        "wait", "what to do before a token gets too old: wait for it, mask_span (don't train it), keep (train it)"
    )
    advantage: GroupCentered | Batchwise = field(default_factory=GroupCentered)
    truncation: Truncation = field(default_factory=Truncation)
    checkpointing: Checkpointing = field(default_factory=Checkpointing)
    forward_backward_batch: str | ForwardBackwardBatch = "auto"
    repeat_dataset: bool = option(True, "go through the rows again when they are used up; false: end with them")
    shuffle: bool = option(
        False, "take the rows in a new random order, by seed, each time round; false: in order, again and again"
    )
    batch_order: str = option(
        "completion", "train the oldest groups that are ready (completion), or the oldest (admission)"
    )
    on_failure: str = option("stop", "when a trajectory fails: stop the run, or replace its group by the next one")
    zero_variance: str = option(
        "train", "a group whose rewards are all equal: train it (it has no gradient), or replace it by the next one"
    )
    log_trajectories: int = option(
        1, "trajectories of each batch that trajectories.jsonl tells of, with their conversations"
    )
    allow_trajectory_loss: bool = option(False, "needed for what leaves sampled trajectories or spans untrained")
    allow_unbounded_staleness: bool = option(False, "needed for stale_policy keep")
    stall_timeout: float = option(
        300.0, "seconds in which nothing moves, after which stall-<time>.json tells what every process is at"
    )
    on_stall: str = option("continue", "what the run does then: continue, or stop with an error")

    def __post_init__(self) -> None:
        for name, classes in (
            ("engine", (EngineConfig,)),
            ("optimizer", (Adam,)),
            ("loss", LOSSES),
            ("completion", (GroupCompletion,)),
            ("advantage", ADVANTAGES),
            ("truncation", (Truncation,)),
            ("checkpointing", (Checkpointing,)),
        ):
            check_class(self, name, classes)
        check_integer(self, "groups_per_step", minimum=1, unit="groups of one batch")
        check_integer(self, "group_size", minimum=1, unit="trajectories of one group")
        check_integer(self, "max_staleness", minimum=0, unit="optimizer updates")
        check_integer(self, "log_trajectories", minimum=0, unit="trajectories of a batch")
        if self.log_trajectories > self.groups_per_step * self.group_size:
            raise ConfigError(
                f"AsyncTrainer.log_trajectories is {self.log_trajectories}, but a batch has {self.groups_per_step} "
                f"groups of {self.group_size} trajectories; ask for at most {self.groups_per_step * self.group_size}."
            )
        check_number(self, "kl_coefficient", at_least=0.0)
        check_number(self, "entropy_coefficient", at_least=0.0)
        check_choice(self, "stale_policy", STALE_POLICIES)
        check_choice(self, "batch_order", BATCH_ORDERS)
        check_choice(self, "on_failure", FAILURE_POLICIES)
        check_choice(self, "zero_variance", ZERO_VARIANCE_POLICIES)
        check_number(self, "stall_timeout", above=0.0)
        check_choice(self, "on_stall", STALL_POLICIES)
        for flag in ("repeat_dataset", "shuffle", "allow_trajectory_loss", "allow_unbounded_staleness"):
            check_flag(self, flag)
        self._check_sampling()
        self._check_staleness()
        self._check_completion()
        self._check_overlap()
        self._check_replacing()
        why = unsound_reason(self.loss, self.max_staleness, self.stale_policy)
        if why is not None:
            warn(why)

    @property
    def mode(self) -> str:
        """What logs and run directories call this way to train: `async` or `sync`."""
        return "async" if self.max_staleness > 0 else "sync"

    @property
    def oldest_first(self) -> bool:
        """Whether groups that were admitted earlier come first where requests wait: only stale_policy "wait" holds an
        update back for them.
        """
        return self.stale_policy == "wait"

    @property
    def trains_without_advantage(self) -> bool:
        """Whether the loss has a gradient where the advantage is 0, so that those rows go to the learner, too."""
        return self.kl_coefficient > 0 or self.entropy_coefficient > 0 or isinstance(self.loss, CustomLoss)

    @property
    def overlap_obstacle(self) -> str | None:
        """Why a batch's first groups can't train while the others sample, or not without changing the update; None:
        they can.
        """
        for why, found in (
            (f"max_staleness is {self.max_staleness}", self.max_staleness > 0),
            (f'stale_policy is "{self.stale_policy}"', self.stale_policy != "wait"),
            (f'completion mode is "{self.completion.mode}"', self.completion.mode != "wait"),
            ('sampling_policy is "segment"', self.engine.sampling_policy != "trajectory"),
            ("advantage needs the whole batch", type(self.advantage) is not GroupCentered),
            ("loss is one of your own, which may need the whole batch", isinstance(self.loss, CustomLoss)),
            (
                "the loss has terms that are no multiple of the advantage (kl_coefficient, entropy_coefficient), while "
                "the deviation common to the advantages is known only at the end",
                self.trains_without_advantage and getattr(self.advantage, "standardize", False) == "batch",
            ),
        ):
            if found:
                return why
        return None

    def check_run(self, *, dataset_rows: int, steps: Any) -> None:
        """Refuse a number of steps that this dataset can't fill; dataset_rows is the number of training rows."""
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigError(
                f"steps is {shown(steps)}; it counts batches to train, so it must be a whole number of at least 1."
            )
        if steps > MAX_COUNT:
            raise ConfigError(f"steps is {shown(steps)}; it counts batches to train, and may be at most {MAX_COUNT:,}.")
        if dataset_rows < 1:
            raise ConfigError("The dataset has no rows; give at least one.")
        possible = -(-dataset_rows // self.groups_per_step)
        if not self.repeat_dataset and steps > possible:
            raise ConfigError(
                f"steps is {steps}, but {dataset_rows} rows at groups_per_step={self.groups_per_step} fill only "
                f"{possible} batches; ask for fewer steps, give more rows, or set repeat_dataset=True."
            )

    def _check_sampling(self) -> None:
        if self.engine.temperature <= 0.0:
            raise ConfigError(
                "RolloutEngine.temperature is 0, but training needs log-probs at the sampling temperature; "
                "set it above 0."
            )
        if self.engine.top_p < 1.0 or self.engine.top_k > 0:
            warn(
                f"top_p={self.engine.top_p:g} and top_k={self.engine.top_k} narrow what is sampled, but log-probs are "
                "those of the full distribution at the sampling temperature, in samplers and learner alike: the "
                "gradient ignores the narrowing. Leave both out for unbiased training."
            )
        if self.engine.schedule.oversample_factor > 1.0 and self.max_staleness == 0:
            raise ConfigError(
                f"Schedule.oversample_factor is {self.engine.schedule.oversample_factor}, but max_staleness is 0: "
                "surplus groups would be too old for the next batch; set it to 1, or max_staleness to 1 or more."
            )

    def _check_staleness(self) -> None:
        if self.stale_policy == "keep" and not self.allow_unbounded_staleness:
            raise ConfigError(
                'stale_policy is "keep", which trains on tokens of any age; that also needs '
                "allow_unbounded_staleness=True."
            )
        if self.stale_policy == "mask_span" and not self.allow_trajectory_loss:
            raise ConfigError(
                'stale_policy is "mask_span", which trains nothing on spans that are too old; that also needs '
                "allow_trajectory_loss=True."
            )
        if self.stale_policy != "wait":
            if not self.repeat_dataset:
                raise ConfigError(f'repeat_dataset=False needs stale_policy="wait"; it is "{self.stale_policy}".')
            if self.batch_order == "admission":
                raise ConfigError(f'batch_order="admission" needs stale_policy="wait"; it is "{self.stale_policy}".')
            warn(f'stale_policy="{self.stale_policy}" lets tokens get older than max_staleness={self.max_staleness}.')
        if self.truncation.drops and not self.allow_trajectory_loss:
            raise ConfigError("truncation drops trajectories; that also needs allow_trajectory_loss=True.")

    def _check_completion(self) -> None:
        completion = self.completion
        if completion.min_members > self.group_size:
            raise ConfigError(
                f"GroupCompletion.min_members is {completion.min_members}, but group_size is {self.group_size}; a "
                "group never has that many members: lower the one or raise the other."
            )
        if completion.mode == "wait":
            return
        stragglers = completion.on_stragglers
        if stragglers != "carry_over" and not self.allow_trajectory_loss:
            raise ConfigError(
                f'GroupCompletion(mode="deadline", on_stragglers="{stragglers}") loses trajectories; that also needs '
                "allow_trajectory_loss=True."
            )
        if stragglers != "truncate" and self.stale_policy == "wait":
            raise ConfigError(
                f'on_stragglers="{stragglers}" hands a group over in parts, which stale_policy="wait" can\'t hold '
                'back; use on_stragglers="truncate" or another stale_policy.'
            )
        if stragglers == "carry_over":
            if self.max_staleness == 0:
                raise ConfigError(
                    'on_stragglers="carry_over" trains members in later batches; max_staleness can\'t be 0.'
                )
            if not isinstance(self.advantage, Batchwise):
                raise ConfigError('on_stragglers="carry_over" splits groups; it needs advantage=rl.Batchwise().')
            if self.loss.normalize == "prompt":
                raise ConfigError(
                    'on_stragglers="carry_over" splits groups; the loss can\'t be normalized by "prompt".'
                )
        warn(f'GroupCompletion(mode="deadline", on_stragglers="{stragglers}") cuts long trajectories short.')

    def _check_overlap(self) -> None:
        if self.forward_backward_batch == "auto":
            return
        if not isinstance(self.forward_backward_batch, ForwardBackwardBatch):
            raise ConfigTypeError(
                f'forward_backward_batch is {self.forward_backward_batch!r}; give "auto" or '
                "rl.ForwardBackwardBatch(...)."
            )
        if self.overlap_obstacle is not None:
            raise ConfigError(
                "ForwardBackwardBatch overlaps sampling and training within a synchronous, group-centered batch, "
                f'but {self.overlap_obstacle}; leave forward_backward_batch at "auto".'
            )

    def _check_replacing(self) -> None:
        parts = self.completion.on_stragglers
        for name in ("zero_variance", "on_failure"):
            if getattr(self, name) == "replace" and parts != "truncate":
                raise ConfigError(
                    f'{name}="replace" gives up whole groups, but on_stragglers="{parts}" hands them over in parts, of '
                    'which some may have been trained; use on_stragglers="truncate", or leave '
                    f"{name} out."
                )
        if self.zero_variance == "train":
            return
        if not isinstance(self.advantage, GroupCentered):
            raise ConfigError(
                'zero_variance="replace" gives up groups whose rewards are all equal, but with '
                f"{type(self.advantage).__name__} these are measured against the batch and have a gradient; use "
                "advantage=rl.GroupCentered(), or leave zero_variance out."
            )
        if self.group_size == 1:
            raise ConfigError(
                'zero_variance="replace" gives up groups whose rewards are all equal, and with group_size=1 every '
                "group is one; use a group_size of at least 2, or leave zero_variance out."
            )
