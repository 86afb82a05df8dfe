"""Typed look at the keys of a JSON object that others wrote: a value of the wrong type is refused by name."""

from dataclasses import dataclass
from typing import Any, NoReturn

from workers.errors import ModelConfigError
from workers.model_config import MAX_COUNT
from workers.rope_scaling import LARGEST_FLOAT, SMALLEST_FLOAT


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The object `values` of the file `where`; `defaults` says what a missing key means."""

    where: str
    values: dict[str, Any]
    defaults: dict[str, Any]

    def refuse(self, name: str, value: Any, rule: str) -> NoReturn:
        """Raise the one sentence that every refusal is."""
        raise ModelConfigError(f"{self.where}: {name} is {value!r:.100}; {rule}.")

    def _get(self, name: str, default: Any) -> Any:
        """`default` ... means the file's own table of defaults."""
        return self.values.get(name, self.defaults.get(name) if default is ... else default)

    def count(self, name: str, default: Any = ..., *, null: bool = False, least: int = 1, most: int = MAX_COUNT) -> Any:
        """An integer from `least` to `most`; None where the file has null or nothing, if `null` allows it."""
        value = self._get(name, default)
        if value is None and null:
            return None
        if type(value) is not int or not least <= value <= most:
            self.refuse(name, value, f"give an integer from {least} to {most:,}")
        return value

    def number(self, name: str, default: Any = ..., *, least: float = SMALLEST_FLOAT) -> float:
        """A finite number from `least` on."""
        value = self._get(name, default)
        # Compared before it is converted: an integer may be larger than any float.
        if type(value) not in (int, float) or not least <= value <= LARGEST_FLOAT:
            rule = "above 0" if least == SMALLEST_FLOAT else f"of at least {least:g}"
            self.refuse(name, value, f"give a finite number {rule}")
        return float(value)

    def flag(self, name: str, default: Any = ...) -> bool:
        """True or false."""
        value = self._get(name, default)
        if type(value) is not bool:
            self.refuse(name, value, "give true or false")
        return value
