"""The small configs that users combine: frozen, checked when made, never changed.

Defaults are those of the user's system. What needs two configs at once is checked where both meet
(`trainer_config.py`). Every class raises ConfigError (a ValueError) or ConfigTypeError (a TypeError).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.config_checks import (
    check_choice,
    check_class,
    check_flag,
    check_integer,
    check_number,
    check_path,
    option,
    required,
)
from pipeline.errors import ConfigError, ConfigTypeError
from pipeline.user_warnings import warn
from pipeline.wording import label, quoted

PRIORITIES = ("fifo", "predicted_length")
COMPLETION_MODES = ("wait", "deadline")
STRAGGLER_POLICIES = ("truncate", "carry_over", "discard")
KV_LIMIT_POLICIES = ("hold", "refill")
TRUNCATION_POLICIES = ("zero_reward", "reward", "drop", "drop_and_exclude_from_baseline")
LEAST_TEMPERATURE = 1e-4
# An evaluation may use one part in so many of the trajectories, and of the requests, that training may.
EVALUATION_PARTS = 4
# Why a trajectory can end before its environment ends it.
TRUNCATION_CAUSES = (
    "turns",
    "generated_tokens",
    "context",
    "final_answer",
    "empty_sample",
    "group_deadline",
    "group_discard",
    "trajectory_timeout",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How much work may be in flight, counted over the whole run."""

    concurrency: int = option(256, "active trajectories, those waiting for a tool included")
    max_sample_requests: int | None = option(None, "outstanding sampling requests; none: as many as concurrency")
    admit_ahead: int = option(2, "future batches whose groups may be admitted, within the staleness bound")
    priority: str = option(
        "fifo", "which waiting trajectory samples first: fifo, in order of admission; predicted_length, the longest"
    )
    oversample_factor: float = option(
        1.0, "factor of whole groups admitted beyond those needed, within the staleness bound"
    )

    def __post_init__(self) -> None:
        check_integer(self, "concurrency", minimum=1, unit="active trajectories")
        check_integer(self, "max_sample_requests", minimum=1, unit="outstanding sampling requests", optional=True)
        check_integer(self, "admit_ahead", minimum=0, unit="future batches")
        check_choice(self, "priority", PRIORITIES)
        check_number(self, "oversample_factor", at_least=1.0)

    @property
    def sample_requests(self) -> int:
        """Most sampling requests that may be outstanding."""
        return self.concurrency if self.max_sample_requests is None else self.max_sample_requests

    @property
    def evaluation_concurrency(self) -> int:
        """Most trajectories of an evaluation at a time while training goes on, beside the `concurrency` of training.

        A trajectory has one request at a time, so this bounds its share of `max_sample_requests`, too: however old its
        version, and with it its turn at the samplers, three quarters of the requests are left to training (with fewer
        than eight of them, all but one; with only one, they alternate).
        """
        return max(1, min(self.concurrency, self.sample_requests) // EVALUATION_PARTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one trajectory may spend; reaching a limit truncates it with that limit's cause."""

    max_turns: int = option(8, "model turns of one trajectory")
    max_generated_tokens: int = option(32_768, "tokens that one trajectory may generate, over all its turns")
    max_context_tokens: int = option(131_072, "tokens of one trajectory: prompt, generated and framing together")
    segment_tokens: int = option(4_096, "most tokens of one sampling request")
    final_answer_reserve: int = option(0, "tokens kept back for a last answer; 0: no wrap-up request")
    tool_output_tokens: int = option(4_096, "tokens of one tool result; what is longer is cut there, and marked")
    max_turn_tokens: int | None = option(None, "tokens generated in one turn; none: no limit")

    def __post_init__(self) -> None:
        check_integer(self, "max_turns", minimum=1, unit="model turns")
        check_integer(self, "max_generated_tokens", minimum=1, unit="generated tokens")
        check_integer(self, "max_context_tokens", minimum=1, unit="tokens of context")
        check_integer(self, "segment_tokens", minimum=1, unit="tokens of one sampling request")
        check_integer(self, "final_answer_reserve", minimum=0, unit="tokens kept back for the final answer")
        check_integer(self, "tool_output_tokens", minimum=1, unit="tokens of one tool result")
        check_integer(self, "max_turn_tokens", minimum=1, unit="generated tokens of one turn", optional=True)
        for limit in ("max_generated_tokens", "max_context_tokens"):
            if self.final_answer_reserve >= getattr(self, limit):
                raise ConfigError(
                    f"Budget.final_answer_reserve is {self.final_answer_reserve}, but Budget.{limit} is only "
                    f"{getattr(self, limit)}; the reserve is a part of that limit, so it must be smaller."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCompletion:
    """When a group goes to the trainer: with its last member, or by a deadline that counts tokens."""

    mode: str = required(
        "wait for all members of a group, or close it by a deadline, which counts tokens (max_straggler_tokens)"
    )
    min_members: int = option(2, 'members a group needs for a baseline of its own (and, with "deadline", to start it)')
    on_stragglers: str = option(
        "truncate",
        "members that are unfinished when their group closes: truncate them, carry_over (they train later) or discard",
    )
    max_straggler_tokens: int | None = option(None, 'tokens one straggler may add; only, and always, with "deadline"')

    def __post_init__(self) -> None:
        check_choice(self, "mode", COMPLETION_MODES)
        check_integer(self, "min_members", minimum=1, unit="members of a group")
        check_choice(self, "on_stragglers", STRAGGLER_POLICIES)
        check_integer(self, "max_straggler_tokens", minimum=0, unit="tokens of a straggler", optional=True)
        if self.mode == "deadline" and self.max_straggler_tokens is None:
            raise ConfigError(
                'GroupCompletion.mode is "deadline", but max_straggler_tokens is not set; it counts the tokens '
                "that a straggler may still add, so name a number."
            )
        if self.mode == "wait" and self.max_straggler_tokens is not None:
            raise ConfigError(
                f'GroupCompletion.max_straggler_tokens is {self.max_straggler_tokens}, but mode is "wait": '
                'no deadline; leave it out, or use mode="deadline".'
            )
        if self.mode == "wait" and self.on_stragglers != "truncate":
            raise ConfigError(
                f'GroupCompletion.on_stragglers is "{self.on_stragglers}", but mode is "wait", which has no '
                'stragglers; leave it out, or use mode="deadline".'
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """With segment sampling: how old the policy may be that computed the KV which later tokens build on."""

    max_staleness: int = option(0, "optimizer updates between the KV's policy and the one that samples")
    on_limit: str = option(
        "hold", "at the limit: hold (stay on the newest policy allowed), or refill (compute the KV again)"
    )
    allow_reprefill: bool = option(False, 'needed for "refill", which computes whole prefixes again')

    def __post_init__(self) -> None:
        check_integer(self, "max_staleness", minimum=0, unit="optimizer updates")
        check_choice(self, "on_limit", KV_LIMIT_POLICIES)
        check_flag(self, "allow_reprefill")
        if self.on_limit == "refill" and not self.allow_reprefill:
            raise ConfigError(
                'KVCache.on_limit is "refill", which computes whole prefixes again after every update; that is costly, '
                "so it also needs allow_reprefill=True."
            )
        if self.on_limit == "refill":
            warn('KVCache(on_limit="refill") computes whole prefixes again; watch sampling/kv_refreshes.')


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """What a truncated trajectory's reward counts for, by cause where named, else as `train` says."""

    train: str = option(
        "zero_reward", "what the reward of a truncated trajectory counts for: " + ", ".join(TRUNCATION_POLICIES)
    )
    by_cause: Mapping[str, str] = field(
        default_factory=dict, metadata={"meaning": "the same for single causes, as turns=drop,context=reward"}
    )

    def __post_init__(self) -> None:
        check_choice(self, "train", TRUNCATION_POLICIES)
        if not isinstance(self.by_cause, Mapping):
            raise ConfigTypeError(f"{label(self, 'by_cause')} is {self.by_cause!r}; give a dict from cause to policy.")
        for cause, policy in self.by_cause.items():
            if cause not in TRUNCATION_CAUSES:
                raise ConfigError(
                    f"{label(self, 'by_cause')} names the cause {cause!r}; causes are {quoted(TRUNCATION_CAUSES)}."
                )
            if policy not in TRUNCATION_POLICIES:
                raise ConfigError(
                    f"{label(self, 'by_cause')} has {policy!r} for {cause!r}; it must be one of "
                    f"{quoted(TRUNCATION_POLICIES)}."
                )

    def policy(self, cause: str | None) -> str | None:
        """The policy for a trajectory that ended by `cause`; None for one that ended by itself."""
        return None if cause is None else self.by_cause.get(cause, self.train)

    @property
    def drops(self) -> bool:
        """Whether any cause loses trajectories."""
        return any(policy.startswith("drop") for policy in (self.train, *self.by_cause.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardBatch:
    """Synchronous overlap: ready groups are trained in chunks while the others finish; either threshold submits one."""

    min_sequences: int | None = option(64, "training rows that fill a chunk")
    min_tokens: int | None = option(131_072, "input tokens that fill a chunk, prompts included")

    def __post_init__(self) -> None:
        check_integer(self, "min_sequences", minimum=1, unit="training rows of a chunk", optional=True)
        check_integer(self, "min_tokens", minimum=1, unit="input tokens of a chunk", optional=True)
        if self.min_sequences is None and self.min_tokens is None:
            raise ConfigError(
                "ForwardBackwardBatch has neither min_sequences nor min_tokens; then no chunk would ever be full. "
                "Set at least one."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is drawn from the model's logits."""

    temperature: float = option(1.0, "of sampling, and of the log-probs trained on; training needs it above 0")
    top_p: float = option(1.0, "smallest set of likeliest tokens with this share of the probability; 1: all")
    top_k: int = option(-1, "this many likeliest tokens; -1 or 0: all")
    seed: int = option(0, "of the noise, which depends on it, group, member and position alone")

    def __post_init__(self) -> None:
        check_number(self, "temperature", at_least=0.0)
        if 0.0 < self.temperature < LEAST_TEMPERATURE:
            raise ConfigError(
                f"{label(self, 'temperature')} is {self.temperature:g}; logits over so small a number leave float32: "
                f"use at least {LEAST_TEMPERATURE:g}, or 0 for the likeliest token always."
            )
        check_number(self, "top_p", above=0.0, at_most=1.0)
        check_integer(self, "top_k", minimum=-1, unit="the likeliest tokens (-1: all)")
        check_integer(self, "seed", minimum=0, maximum=2**63 - 1, unit="random streams")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine:
    """A learning rate that rises over `warmup` batches and falls along half a cosine to `floor` of itself."""

    warmup: int = option(0, "batches over which the learning rate rises to its full value")
    floor: float = option(0.0, "share of the learning rate that is left at the last batch")

    def __post_init__(self) -> None:
        check_integer(self, "warmup", minimum=0, unit="batches")
        check_number(self, "floor", at_least=0.0, at_most=1.0)


def cosine(warmup: int = 0, floor: float = 0.0) -> Cosine:
    """The schedule `Cosine(warmup=warmup, floor=floor)`, as `Adam(schedule=rl.cosine(10, 0.1))` reads best."""
    return Cosine(warmup=warmup, floor=floor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """The optimizer: Adam with decoupled weight decay."""

    lr: float = required("learning rate")
    beta1: float = option(0.9, "decay of the gradient's running mean")
    beta2: float = option(0.95, "decay of the squared gradient's running mean")
    eps: float = option(1e-8, "added to the root of the squared gradient's mean")
    weight_decay: float = option(0.0, "decoupled weight decay, on matrices only")
    grad_clip_norm: float | None = option(None, "largest norm of the whole gradient; none: no clipping")
    schedule: Cosine | None = option(None, "how the learning rate changes over the run; none: it stays")

    def __post_init__(self) -> None:
        check_number(self, "lr", above=0.0)
        check_number(self, "beta1", at_least=0.0, below=1.0)
        check_number(self, "beta2", at_least=0.0, below=1.0)
        check_number(self, "eps", above=0.0)
        check_number(self, "weight_decay", at_least=0.0)
        check_number(self, "grad_clip_norm", above=0.0, optional=True)
        check_class(self, "schedule", (Cosine,), optional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """When a run saves what it would need to go on, and how much of that it keeps. run_dir: as of `AsyncTrainer`."""

    run_dir: str | None = None
    weights_every: int = option(20, "policy updates between two checkpoints; a run saves one when it ends, too")
    rollout_every: float = option(30.0, "seconds between two saves of the trajectories that are being sampled")
    keep: int = option(2, "newest checkpoints that stay; older ones only while a sampled token needs their version")
    keep_best: int = option(0, "checkpoints that stay beside those, of the highest rewards on held-out rows")

    def __post_init__(self) -> None:
        check_path(self.run_dir, label(self, "run_dir"))
        check_integer(self, "weights_every", minimum=1, unit="policy updates")
        check_number(self, "rollout_every", above=0.0)
        check_integer(self, "keep", minimum=1, unit="checkpoints")
        check_integer(self, "keep_best", minimum=0, unit="checkpoints")
