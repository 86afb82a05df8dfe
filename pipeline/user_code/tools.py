"""`@tool`: a typed function or method that the model may call.

The JSON schema comes from the annotations and the docstring (its text, and the lines of its `Args:` section), in the
form that chat templates take: `{"type": "function", "function": {"name", "description", "parameters"}}`.
"""

import inspect
import re
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from pipeline.errors import ConfigTypeError
from pipeline.user_code.tool_schema import ArgumentError, Kind, kind_of

_MARK = "__headway_tool__"
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Example|Examples|Note|Notes):\s*$")
_ARGUMENT = re.compile(r"^\s+\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """What Headway knows about a tool: its schema, and how to turn a model's arguments into the function's."""

    name: str
    schema: dict[str, Any]
    kinds: dict[str, Kind]
    required: tuple[str, ...]
    is_method: bool
    is_async: bool

    def arguments(self, given: Any) -> dict[str, Any]:
        """The keyword arguments for the function; `ArgumentError` with a sentence for the model if they do not fit."""
        if not isinstance(given, dict):
            raise ArgumentError(f"the arguments of {self.name} are {given!r}; they must be an object")
        converted = {}
        for name, value in given.items():
            kind = self.kinds.get(name)
            if kind is None:
                known = ", ".join(self.kinds) or "none"
                raise ArgumentError(f"{self.name} has no argument {name!r}; its arguments: {known}")
            try:
                converted[name] = kind.convert(value, True)
            except ArgumentError as refused:
                raise ArgumentError(f"argument {name!r} of {self.name} is {refused}") from None
        for name in self.required:
            if name not in converted:
                raise ArgumentError(f"{self.name} needs the argument {name!r}; it must be {self.kinds[name].wanted}")
        return converted


def tool(function: Callable) -> Callable:
    """Mark a typed function or method, plain or `async`, as a tool; it stays the function it was.

    An `async` tool runs on the environment's event loop, a plain one in a thread. Raises `ConfigTypeError` for a
    parameter without a usable annotation.
    """
    if not inspect.isfunction(function):
        raise ConfigTypeError(
            f"@tool was put on {function!r}. It marks plain functions and methods, coroutines included. "
            "Put @tool directly above the def."
        )
    setattr(function, _MARK, _spec_of(function))
    return function


def _spec_of(function: Callable) -> ToolSpec:
    where = f"tool {function.__qualname__}"
    try:
        hints = typing.get_type_hints(function)
    except NameError as unknown:
        raise ConfigTypeError(
            f"{where} has an annotation that cannot be resolved: {unknown}. Annotations must name types visible in the "
            "tool's module. Define or import the type there."
        ) from None
    parameters = list(inspect.signature(function).parameters.values())
    is_method = bool(parameters) and parameters[0].name == "self"
    description, texts = _read_docstring(function.__doc__ or "")
    kinds, properties, required = {}, {}, []
    for parameter in parameters[1:] if is_method else parameters:
        name = parameter.name
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigTypeError(
                f"{where} has the parameter {parameter}. A model names each argument, so a tool can't take *args, "
                "**kwargs or positional-only ones. Give it named parameters."
            )
        if name not in hints:
            raise ConfigTypeError(
                f"{where} has no annotation for {name!r}. The model's schema is made from the annotations. "
                f"Write for example `{name}: str`."
            )
        kinds[name] = kind_of(hints[name], f"parameter {name!r} of {where}")
        properties[name] = dict(kinds[name].schema)
        if name in texts:
            properties[name]["description"] = texts[name]
        if parameter.default is parameter.empty:
            required.append(name)
    schema = {
        "type": "function",
        "function": {
            "name": function.__name__,
            "description": description,
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }
    is_async = inspect.iscoroutinefunction(function)
    return ToolSpec(function.__name__, schema, kinds, tuple(required), is_method, is_async)


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The text before the first section, and the texts of the `Args:` section by parameter name."""
    description, arguments = [], {}
    section, last = "", None
    for line in inspect.cleandoc(text).splitlines():
        heading = _SECTION.match(line)
        if heading:
            section = heading[1]
        elif not section:
            description.append(line.strip())
        elif section in ("Args", "Arguments", "Parameters"):
            entry = _ARGUMENT.match(line)
            if entry:
                last = entry[1]
                arguments[last] = entry[2].strip()
            elif last and line.strip():
                arguments[last] = f"{arguments[last]} {line.strip()}".strip()
    return " ".join(word for word in description if word), arguments


def spec_of(function: Any) -> ToolSpec | None:
    """The spec of a function or bound method that carries `@tool`, else None."""
    return getattr(function, _MARK, None)


@cache
def _methods_of(env_class: type) -> dict[str, tuple[ToolSpec, str]]:
    found = {}
    for base in reversed(env_class.__mro__):
        for attribute in vars(base):
            function = getattr(env_class, attribute, None)
            spec = spec_of(function) if inspect.isfunction(function) else None
            if spec is not None:
                found[spec.name] = (spec, attribute)
    return found


def tools_of(env: Any) -> dict[str, tuple[ToolSpec, Callable]]:
    """Name → (spec, bound callable) of an environment: its list `tools` if it has one, else its `@tool` methods."""
    if env.tools is None:
        return {name: (spec, getattr(env, attribute)) for name, (spec, attribute) in _methods_of(type(env)).items()}
    return _listed(env, env.tools)


def find_tool(env: Any, name: str) -> tuple[ToolSpec, Callable] | None:
    """One entry of `tools_of(env)`, without building the others: this runs for every tool call."""
    if env.tools is None:
        entry = _methods_of(type(env)).get(name)
        return None if entry is None else (entry[0], getattr(env, entry[1]))
    return _listed(env, env.tools).get(name)


def _listed(env: Any, entries: Iterable[Any]) -> dict[str, tuple[ToolSpec, Callable]]:
    table = {}
    for entry in entries:
        spec = spec_of(entry)
        if spec is None:
            raise ConfigTypeError(
                f"{type(env).__qualname__}.tools holds {entry!r}, which is no tool. A tool is a function or method "
                "with @tool above its def. Add @tool, or take it out of the list."
            )
        if spec.name in table:
            raise ConfigTypeError(
                f"{type(env).__qualname__}.tools holds two tools named {spec.name!r}. The model calls tools by name. "
                "Rename one."
            )
        bound = entry.__get__(env) if spec.is_method and inspect.isfunction(entry) else entry
        table[spec.name] = (spec, bound)
    return table
