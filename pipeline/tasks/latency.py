"""How long a built-in tool takes: `none`, `fixed:MS`, or `lognormal:MEDIAN_MS:SIGMA`."""

import math
import random
from dataclasses import dataclass

from pipeline.errors import ConfigError

FORMS = "none, fixed:MS or lognormal:MEDIAN_MS:SIGMA (milliseconds, and the deviation of the logarithm)"


@dataclass(frozen=True, slots=True)
class Latency:
    """A distribution of seconds: `median_seconds` times exp(sigma · a standard normal)."""

    median_seconds: float
    sigma: float

    def sample(self, rng: random.Random) -> float:
        """One latency in seconds."""
        if self.sigma == 0.0:
            return self.median_seconds
        return self.median_seconds * math.exp(self.sigma * rng.gauss(0.0, 1.0))


def parse_latency(text: str) -> Latency:
    """The latency that `text` names; `ConfigError` with what is wrong otherwise."""
    form, *numbers = text.strip().split(":")
    counts = {"none": 0, "fixed": 1, "lognormal": 2}
    if form not in counts:
        raise ConfigError(f"The tool latency is {text!r}. It must be {FORMS}. Use for example lognormal:50:1.0.")
    if len(numbers) != counts[form]:
        raise ConfigError(
            f"The tool latency {text!r} has {len(numbers)} numbers. {form} takes {counts[form]}; the forms are "
            f"{FORMS}. Correct it."
        )
    median_ms = _number(text, numbers[0], "milliseconds") if numbers else 0.0
    sigma = _number(text, numbers[1], "sigma") if len(numbers) == 2 else 0.0
    return Latency(median_ms / 1000.0, sigma)


def _number(text: str, part: str, what: str) -> float:
    try:
        value = float(part)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0.0):
        raise ConfigError(
            f"The tool latency {text!r} has {part!r} for the {what}. It must be a finite number, 0 or more. Correct it."
        )
    return value
