"""Checks that the config dataclasses share: each raises one plain sentence that names owner, option and value.

The pattern: a flag that is no bool or a value of the wrong class is a ConfigTypeError (a TypeError); a number of the
wrong type or range, an unknown name or a refused combination is a ConfigError (a ValueError). A bool is no number here.
"""

import functools
import inspect
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import field, fields
from typing import Any

from pipeline.errors import ConfigError, ConfigTypeError
from pipeline.wording import label, quoted, shown, suggestion


def option(default: Any, meaning: str) -> Any:
    """A dataclass field with its meaning in a few words; the command line and docs/options.md show the same text."""
    return field(default=default, metadata={"meaning": meaning})


def required(meaning: str) -> Any:
    """The same for a field without default: leaving it out is a TypeError."""
    return field(metadata={"meaning": meaning})


MAX_NUMBER = 2.0**63  # a whole number must fit 64 bits on its way, a float the learner's float32
MAX_COUNT = 2**31 - 1  # counts travel as 32-bit numbers, and nothing real needs more


def check_integer(
    owner: object, name: str, *, minimum: int, unit: str, maximum: int = MAX_COUNT, optional: bool = False
) -> None:
    """Require an int from minimum to maximum; None too when optional. `unit` completes "it counts …"."""
    value = getattr(owner, name)
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(
            f"{label(owner, name)} is {shown(value)}; it counts {unit}, so it must be a whole number of at least "
            f"{minimum}{' (or None)' if optional else ''}."
        )
    if value > maximum:
        raise ConfigError(f"{label(owner, name)} is {shown(value)}; it counts {unit}, and may be at most {maximum:,}.")


def check_number(
    owner: object,
    name: str,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    optional: bool = False,
) -> None:
    """Require a finite int or float within the bounds given; None too when optional."""
    value = getattr(owner, name)
    if value is None and optional:
        return
    rules = [
        (above, "above", lambda limit: value > limit),
        (at_least, "at least", lambda limit: value >= limit),
        (below, "below", lambda limit: value < limit),
        (at_most, "at most", lambda limit: value <= limit),
    ]
    rules = [rule for rule in rules if rule[0] is not None]
    if not is_finite_number(value) or not all(holds(limit) for limit, _, holds in rules):
        bounds = " and ".join(f"{word} {limit:g}" for limit, word, _ in rules)
        raise ConfigError(
            f"{label(owner, name)} is {shown(value)}; it must be a finite number {bounds}"
            f"{' (or None)' if optional else ''}."
        )
    if abs(value) > MAX_NUMBER:
        raise ConfigError(f"{label(owner, name)} is {shown(value)}; it may be at most {MAX_NUMBER:g}.")


def is_finite_number(value: object) -> bool:
    """Whether it is an int or float, no bool, that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def is_plain_function(value: object) -> bool:
    """Whether it can be called and has done its work when it returns; a coroutine that it gave would never run."""
    while isinstance(value, functools.partial):
        value = value.func
    return callable(value) and not any(map(inspect.iscoroutinefunction, (value, type(value).__call__)))


def check_parameters(function: Any, count: int, what: str, call: str) -> None:
    """Raise ConfigTypeError unless `function` can be called with so many arguments. `what` names it, `call` says how.

    Of a decorated one the decorator's own parameters count: it may give the others itself.
    """
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # of a function written in C, which says nothing of its arguments
        return
    try:
        signature.bind(*(None,) * count)
    except TypeError as error:
        raise ConfigTypeError(f"{what} takes {signature}, but is called as {call} ({error}). Write it so.") from error


def check_choice(owner: object, name: str, choices: Sequence[str]) -> None:
    """Require one of a few names."""
    value = getattr(owner, name)
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{label(owner, name)} is {shown(value)}; it must be one of {quoted(choices)}.")


def check_flag(owner: object, name: str) -> None:
    """Require a bool: 1 and "yes" are refused, since a flag that lifts a protection must be meant."""
    value = getattr(owner, name)
    if not isinstance(value, bool):
        raise ConfigTypeError(f"{label(owner, name)} is {shown(value)}; it is a flag: write True or False.")


def check_class(owner: object, name: str, classes: tuple[type, ...], *, optional: bool = False) -> None:
    """Require an object of one of the classes."""
    value = getattr(owner, name)
    if value is None and optional:
        return
    if not isinstance(value, classes):
        names = " or ".join(f"rl.{cls.__name__}(...)" for cls in classes)
        raise ConfigTypeError(f"{label(owner, name)} is {shown(value)}; give {names}.")


def check_path(value: object, name: str) -> None:
    """Require what can name a directory, which need not be there, or None. name: of the option."""
    if value is not None and (not isinstance(value, str | os.PathLike) or not str(value) or "\0" in str(value)):
        raise ConfigTypeError(f"{name} is {shown(value)}; name a directory, or leave it out.")


def refuse_unknown(owner: type, config: type, names: Iterable[str]) -> None:
    """Require that `names` are fields of the dataclass `config`, to which `owner` hands on what it doesn't know."""
    known = [field.name for field in fields(config)]
    for name in names:
        if name not in known:
            near = suggestion(name, [*inspect.signature(owner).parameters, *known])
            raise ConfigTypeError(f"{owner.__name__} has no option {name}.{near} Correct the name, or leave it out.")
