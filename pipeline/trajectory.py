"""Trajectories: what was sampled, as exact token ids, and what came of it. Never re-tokenised.

A trajectory is a list of spans in order. `run` counts conditioning runs from 0: within one, every token was sampled
given all the tokens before it; a context that is rewritten starts the next run, whose first span is a prompt.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SpanKind = Literal["prompt", "generated", "framing"]


@dataclass(slots=True)
class Span:
    """A stretch of tokens of one kind. A generated one is one segment: one policy version, one log-prob per token.

    prompt: what a run starts with. generated: sampled. framing: tool results and chat markup. `logprobs` are the
    behaviour log-probs at the sampling temperature; `kv_version` is the oldest version in the KV cache behind it.
    """

    kind: SpanKind
    tokens: list[int]
    version: int = -1
    kv_version: int = -1
    logprobs: list[float] | None = None
    run: int = 0


@dataclass(slots=True)
class Trajectory:
    """One rollout of one dataset row; `member` counts within its group.

    truncated: the cause, None for a natural end. loss_mask_end: offset over all generated tokens from which on they are
    not trained, None for no limit. metrics: numbers of the environment, summed over a batch into `rollout/<name>`.
    conversation: its messages, if trajectories.jsonl may have it (`log_trajectories`).
    """

    group: int
    member: int
    row: int
    spans: list[Span] = field(default_factory=list)
    reward: float | None = None
    truncated: str | None = None
    loss_mask_end: int | None = None
    num_turns: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    conversation: list[Mapping[str, Any]] | None = field(default=None, repr=False, compare=False)

    @property
    def generated_tokens(self) -> int:
        """Tokens sampled, over all runs."""
        return sum(len(span.tokens) for span in self.spans if span.kind == "generated")

    @property
    def run(self) -> int:
        """The current conditioning run."""
        return self.spans[-1].run if self.spans else 0

    @property
    def context_tokens(self) -> int:
        """Tokens of the current conditioning run: the context of the next request."""
        run = self.run
        return sum(len(span.tokens) for span in self.spans if span.run == run)

    def run_tokens(self, run: int | None = None) -> list[int]:
        """Token ids of one conditioning run, the current one by default: what the next request is conditioned on."""
        wanted = self.run if run is None else run
        return [token for span in self.spans if span.run == wanted for token in span.tokens]


@dataclass(slots=True)
class Group:
    """The trajectories of one admitted group, or the part of them that is emitted and trained together.

    version: policy version at its admission. final: no further part follows. seconds: since the group was started.
    """

    group: int
    row: int
    version: int
    trajectories: list[Trajectory] = field(default_factory=list)
    final: bool = True
    closed_by_deadline: bool = False
    seconds: float = 0.0

    @property
    def members(self) -> list[int]:
        """Which members this result holds."""
        return [trajectory.member for trajectory in self.trajectories]
