"""How a model's rotations are stretched beyond the context it was trained with. A leaf: no torch.

Feature pair i of h/2 turns by position * frequency(i); unscaled, frequency(i) = theta^(-2i/h). Sources: linear, Chen et
al. (arXiv:2306.15595); yarn, Peng et al. (arXiv:2309.00071), section 3; llama3, Llama 3.1's released code; which option
means what, and what a missing one stands for, as in Hugging Face transformers. Numbers are float64 throughout.
"""

from dataclasses import asdict, dataclass, fields
from math import ceil, floor, log, pi
from typing import Any

from workers.errors import ModelConfigError

SMALLEST_FLOAT, LARGEST_FLOAT = 2.0**-126, 2.0**127  # normal numbers of float32
_ORIGINAL = "original_max_positions"
# Which fields decide, by kind. `dynamic` turns like `default` as far as the original length; beyond it all frequencies
# depend on the sequence's length, so that no KV could be kept: a model's max_positions ends there.
_USED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL, "beta_fast", "beta_slow", "attention_factor", "truncate"),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
}
KINDS = tuple(_USED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """One kind with its numbers; fields that the kind does not use keep their defaults."""

    kind: str = "default"
    factor: float = 1.0  # how many times longer than the original the context may be
    original_max_positions: int = 0  # the context length the model was trained with
    low_freq_factor: float = 1.0  # llama3: waves longer than original / this are stretched by the whole factor
    high_freq_factor: float = 4.0  # llama3: waves shorter than original / this are left alone
    beta_fast: float = 32.0  # yarn: pairs that turn more often than this over the original length are left alone
    beta_slow: float = 1.0  # yarn: pairs that turn less often than this are stretched by the whole factor
    attention_factor: float = 1.0  # yarn: cosines and sines are multiplied by it
    truncate: bool = True  # yarn: the bounds between which it blends are whole pairs

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ModelConfigError(f"RopeScaling.kind is {self.kind!r:.100}; the kinds are {', '.join(KINDS)}.")
        used = _USED[self.kind]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "kind":
                continue
            if field.name not in used:
                if value != field.default:
                    raise ModelConfigError(
                        f"RopeScaling.{field.name} is {value!r:.100}, but {self.kind} does not use it; leave it out."
                    )
            else:
                self._check(field.name, value)
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor:
            raise ModelConfigError(
                f"RopeScaling.high_freq_factor is {self.high_freq_factor} and low_freq_factor {self.low_freq_factor}; "
                "llama3 blends between them, so make the first larger."
            )
        if self.kind == "yarn" and self.beta_fast < self.beta_slow:
            raise ModelConfigError(
                f"RopeScaling.beta_fast is {self.beta_fast} and beta_slow {self.beta_slow}; yarn blends between them, "
                "so make the first at least as large."
            )

    def _check(self, name: str, value: Any) -> None:
        if name == _ORIGINAL:
            is_good, rule = type(value) is int and 1 <= value < 2**31, "an integer from 1 to 2,147,483,647"
        elif name == "truncate":
            is_good, rule = type(value) is bool, "True or False"
        elif name == "factor":
            is_good, rule = _is_number(value) and 1.0 <= value <= LARGEST_FLOAT, "a finite number of at least 1"
        else:
            is_good = _is_number(value) and SMALLEST_FLOAT <= value <= LARGEST_FLOAT
            rule = "a finite number above 0, within float32"
        if not is_good:
            raise ModelConfigError(f"RopeScaling.{name} is {value!r:.100}; for {self.kind} it must be {rule}.")

    def to_fields(self) -> dict[str, Any]:
        """Plain values for a message."""
        return asdict(self)

    @classmethod
    def from_fields(cls, values: Any) -> "RopeScaling":
        """The inverse of `to_fields`; ModelConfigError when a field is unknown or wrong."""
        known = [field.name for field in fields(cls)]
        if not isinstance(values, dict) or (unknown := sorted(map(str, set(values) - set(known)))):
            found = f"the unknown fields {unknown}" if isinstance(values, dict) else f"{values!r:.100} in its place"
            raise ModelConfigError(f"A model's rope scaling has {found}; its fields are {known}.")
        return cls(**values)


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**127)


def frequencies(scaling: RopeScaling, theta: float, head_dim: int) -> list[float]:
    """Radians per position of each feature pair, [head_dim / 2]."""
    plain = [theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]
    if scaling.kind == "linear":
        return [frequency / scaling.factor for frequency in plain]
    if scaling.kind == "llama3":
        return [_llama3(frequency, scaling) for frequency in plain]
    if scaling.kind == "yarn":
        return _yarn(plain, scaling, theta, head_dim)
    return plain


def _llama3(frequency: float, scaling: RopeScaling) -> float:
    """Whole below `low` turns over the original length, untouched above `high`, blended linearly in between."""
    turns = scaling.original_max_positions * frequency / (2 * pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = min(max((turns - low) / (high - low), 0.0), 1.0)
    return frequency * (kept + (1.0 - kept) / scaling.factor)


def _yarn(plain: list[float], scaling: RopeScaling, theta: float, head_dim: int) -> list[float]:
    def pair_turning(times: float) -> float:
        """The (fractional) pair that makes so many turns over the original length."""
        return head_dim * log(scaling.original_max_positions / (times * 2 * pi)) / (2 * log(theta))

    first, last = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp
    stretched = [min(max((pair - first) / (last - first), 0.0), 1.0) for pair in range(len(plain))]
    return [
        frequency * (1.0 - share) + frequency / scaling.factor * share
        for frequency, share in zip(plain, stretched, strict=True)
    ]


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """What yarn multiplies cosines and sines by when the model does not say: 0.1 ln(factor) + 1, equation 22.

    With both mscales (DeepSeek's form) the ratio of two such numbers.
    """

    def grown(weight: float) -> float:
        return 0.1 * weight * log(factor) + 1.0 if factor > 1.0 else 1.0

    return grown(mscale) / grown(mscale_all_dim) if mscale and mscale_all_dim else grown(1.0)
