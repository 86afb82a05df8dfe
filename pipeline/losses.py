"""The losses that users name, with their options. The formulas are in `workers/policy_losses/losses.py`.

Each is averaged as its `normalize` says; ratio is the learner's over the behaviour probability of a token.
"""

import ast
import os
import sys
from dataclasses import dataclass, field, fields
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from pipeline.config_checks import check_choice, check_number, option, required
from pipeline.errors import ConfigError
from pipeline.user_code.named import split_named
from workers.import_path import is_file

NORMALIZATIONS = ("token", "sequence", "batch", "sum", "prompt")


def _normalize() -> Any:
    return required("what the loss is averaged over: token, sequence, batch, sum (no average) or prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class CISPO:
    """-A · stop_gradient(min(ratio, eps_max)) · log p per token (MiniMax-M1, arXiv 2506.13585)."""

    normalize: str = _normalize()
    eps_max: float = option(6.0, "cap on the importance ratio")

    def __post_init__(self) -> None:
        check_choice(self, "normalize", NORMALIZATIONS)
        check_number(self, "eps_max", above=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PPO:
    """-min(ratio · A, clip(ratio, 1 - clip_low, 1 + clip_high) · A) per token (arXiv 1707.06347)."""

    normalize: str = _normalize()
    clip_low: float = option(0.2, "how far below 1 the ratio counts")
    clip_high: float = option(0.2, "how far above 1 the ratio counts")

    def __post_init__(self) -> None:
        check_choice(self, "normalize", NORMALIZATIONS)
        check_number(self, "clip_low", at_least=0.0)
        check_number(self, "clip_high", at_least=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoupledPPO:
    """PPO against the learner's weights before the update, its advantage times min(their ratio, max_importance_weight)
    (arXiv 2110.00641, 2505.24298).
    """

    normalize: str = _normalize()
    clip_low: float = option(0.2, "how far below 1 the ratio to the weights before the update counts")
    clip_high: float = option(0.2, "how far above 1 the ratio to the weights before the update counts")
    max_importance_weight: float = option(
        5.0, "cap on the ratio of the weights before the update to the behaviour policy"
    )

    def __post_init__(self) -> None:
        check_choice(self, "normalize", NORMALIZATIONS)
        check_number(self, "clip_low", at_least=0.0)
        check_number(self, "clip_high", at_least=0.0)
        check_number(self, "max_importance_weight", above=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceSampling:
    """-A · ratio per token, without a cap: sound where tokens are of age 0 or 1."""

    normalize: str = _normalize()

    def __post_init__(self) -> None:
        check_choice(self, "normalize", NORMALIZATIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradient:
    """-A · log p per token, without a ratio: sound where all tokens are of age 0."""

    normalize: str = _normalize()

    def __post_init__(self) -> None:
        check_choice(self, "normalize", NORMALIZATIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class GSPO:
    """PPO with one ratio for all tokens of a conditioning run, the geometric mean of theirs (arXiv 2507.18071)."""

    normalize: str = _normalize()
    clip_low: float = option(3e-4, "how far below 1 the ratio counts")
    clip_high: float = option(4e-4, "how far above 1 the ratio counts")

    def __post_init__(self) -> None:
        check_choice(self, "normalize", NORMALIZATIONS)
        check_number(self, "clip_low", at_least=0.0)
        check_number(self, "clip_high", at_least=0.0)


@dataclass(frozen=True, slots=True)
class CustomLoss:
    """A loss of your own, `path` being "module:function" or "path/to/file.py:function": the one thing that the learner
    imports for a user.

    f(logprobs, behaviour_logprobs, advantages, mask, ages) -> per-token loss gets the generated tokens of some whole
    rows, as torch tensors [M]: float32 log-probs under the learner (with gradient) and as sampled, float32 advantages,
    bool mask (False: not trained), int64 ages in optimizer updates. Return [M] float32, differentiable in `logprobs`
    and neither summed nor averaged. The module is imported once in the learner's process. Raises ConfigError when it
    isn't found.
    """

    path: str = required("your loss for --loss custom, as module:function or path/to/file.py:function")
    normalize: str = field(kw_only=True, metadata=_normalize().metadata)

    def __post_init__(self) -> None:
        check_choice(self, "normalize", NORMALIZATIONS)
        if not isinstance(self.path, str) or self.path.count(":") != 1 or not all(self.path.split(":")):
            raise ConfigError(
                f"CustomLoss.path is {self.path!r}; name the function as module:function, such as my_losses:clipped."
            )
        if is_file(self.path.partition(":")[0]):
            split_named(self.path, "loss", "my_losses:clipped")
            return
        why = _why_not_found(*self.path.split(":"))
        if why is not None:
            raise ConfigError(f"CustomLoss.path is {self.path!r}, but {why}. Check the name and Python's search path.")


Loss = CISPO | PPO | DecoupledPPO | ImportanceSampling | PolicyGradient | GSPO | CustomLoss
LOSSES: tuple[type, ...] = (CISPO, PPO, DecoupledPPO, ImportanceSampling, PolicyGradient, GSPO, CustomLoss)


def loss_record(loss: Loss) -> dict[str, Any]:
    """What the learner is told: the loss's name and own options. The normalisation is in the weights."""
    own = {f.name: getattr(loss, f.name) for f in fields(loss) if f.name != "normalize"}
    if isinstance(loss, CustomLoss):
        if is_file(loss.path.partition(":")[0]):
            own["path"] = ":".join(split_named(loss.path, "loss", "my_losses:clipped"))
        own["sys_path"] = [os.path.abspath(entry) for entry in sys.path]  # "" is the current directory
    return {"name": type(loss).__name__} | own


def unsound_reason(loss: Loss, max_staleness: int, stale_policy: str = "wait") -> str | None:
    """Why this loss is unsound for the ages that these two allow; None where it is not. At max_staleness 0 all tokens
    are of age 0, under "keep" too: nothing is sampled ahead.
    """
    unbounded = stale_policy == "keep" and max_staleness > 0
    if isinstance(loss, ImportanceSampling) and (max_staleness > 1 or unbounded):
        allows = f'stale_policy="{stale_policy}"' if unbounded else f"max_staleness={max_staleness}"
        return (
            "ImportanceSampling doesn't cap the importance ratio, whose variance grows with every update between "
            f"sampling and training; {allows} allows several. Use CISPO, PPO or DecoupledPPO, or "
            f"max_staleness=1{' with another stale_policy' if unbounded else ''}."
        )
    if isinstance(loss, PolicyGradient) and max_staleness > 0:
        return (
            f"PolicyGradient doesn't correct for tokens of an older policy, which max_staleness={max_staleness} "
            "allows: its gradient is biased. Use CISPO, PPO or DecoupledPPO, or max_staleness=0."
        )
    return None


def _why_not_found(module: str, function: str) -> str | None:
    """Looks without importing: a module of losses loads torch, which this process must not."""
    if module == "__main__":
        return "the script itself can't be imported by the learner; put the function into a module of its own"
    search: list[str] | None = [entry or "." for entry in sys.path]
    spec = None
    for depth, _ in enumerate(parts := module.split("."), start=1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), search) if search else None
        if spec is None:
            return f"there is no module {'.'.join(parts[:depth])}"
        search = list(spec.submodule_search_locations or [])
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None  # a package without a file, or compiled: the learner will tell
    try:
        tree = ast.parse(Path(spec.origin).read_bytes())
    except (OSError, SyntaxError, ValueError) as error:  # ValueError: bytes that no source file holds
        return f"{spec.origin} can't be read as Python ({' '.join(str(error).split())})"
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.alias(name=name, asname=other):
                names.add(other or name)
    first = function.split(".")[0]
    return None if first in names or "*" in names else f"{spec.origin} defines no {first}"
