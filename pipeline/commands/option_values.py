"""From what a user wrote to an option's value, and from an error's words back to what the user wrote."""

import json
import re
from collections.abc import Mapping
from typing import Any

from pipeline.commands.arguments import Given
from pipeline.commands.options import NUMBER, OPTIONS, Option
from pipeline.config import Sampling
from pipeline.config_checks import MAX_NUMBER
from pipeline.errors import ConfigError
from pipeline.losses import LOSSES
from pipeline.wording import shown

FORMS = {int: r"[+-]?\d{1,30}", float: r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"}
FLAGS = {"true": True, "false": False}  # how the command line writes them; a bare --flag is true
WORDS = {
    int: "a whole number",
    float: "a number",
    NUMBER: "a number",
    str: "a text",
    bool: "true or false",
    dict: "a JSON object",
}


def convert(option: Option, given: Given) -> Any:
    """The text of a command line, or the value of a TOML file, as the option's type. Raises ConfigError."""
    value = given.value
    if option.optional and value == "none":
        return None
    if option.type is dict:
        return _json_object(given)
    # TOML knows its types; only a whole number may stand for a float there. Texts of the command line are parsed.
    if given.typed:
        fits = type(value) is option.type or (option.type in (float, NUMBER) and type(value) in (int, float))
    elif option.type is bool:
        fits, value = value in FLAGS, FLAGS.get(value, value)
    else:
        fits = option.type is str or re.fullmatch(FORMS.get(option.type, FORMS[float]), value, flags=re.ASCII)
    if fits and option.type is str:
        fits = "\0" not in value
    elif fits and option.type is not bool:
        kind = _number_kind(option, value)
        number = value if given.typed else kind(value)
        fits = abs(number) < MAX_NUMBER
        value = kind(number) if fits else value
    if not fits:
        wanted = f"{WORDS[option.type]}, or none" if option.optional else WORDS[option.type]
        raise ConfigError(f"{given.where} is {value!r}; it must be {wanted}.")
    return value


def _number_kind(option: Option, value: Any) -> type:
    """int or float; where both are taken, as it is written."""
    if option.type is not NUMBER:
        return option.type
    whole = type(value) is int or (type(value) is str and re.fullmatch(FORMS[int], value, flags=re.ASCII))
    return int if whole else float


def _json_object(given: Given) -> dict[str, Any]:
    value = given.value
    if not given.typed:
        try:
            value = json.loads(value, object_pairs_hook=_unique, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{given.where} is {shown(given.value)}, which is no JSON ({error}); write it as a JSON object, for "
                "example '{\"size\": 500}'."
            ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{given.where} is {shown(value)}; it must be a JSON object, such as '{{\"size\": 500}}'.")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:  # dates and NaN, which TOML knows
        raise ConfigError(f"{given.where} is {shown(value)}; it holds plain JSON values only: {error}.") from error
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def as_written(message: str, given: Mapping[str, Given], options: Mapping[str, Option] = OPTIONS) -> str:
    """An error of a config class or of the devices with the options named as the user wrote them."""
    for option in options.values():
        where = given[option.name].where if option.name in given else option.flag
        owner = "RolloutEngine" if option.owner is Sampling else getattr(option.owner, "LABEL", option.owner.__name__)
        owners = {owner, option.owner.__name__}
        if option.owner in LOSSES:  # an option of a loss stands for that of every loss that has it
            owners |= {cls.__name__ for cls in LOSSES}
        for label in (f"{name}.{option.field}" for name in sorted(owners)):
            message = re.sub(rf"\b{re.escape(label)}\b", lambda _, where=where: where, message)
        if option.name in ("device", "samplers", "environment_processes"):  # which name themselves alone
            message = re.sub(rf"^{option.name} is\b", lambda _, where=where: f"{where} is", message)
    return message
