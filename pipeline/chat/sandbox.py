"""The sandbox in which a model's chat template runs, as transformers sets it up, with a budget for each rendering.

A template is code that came with a model. It gets plain values in Jinja's immutable sandbox; and loop rounds, calls and
the text it makes are counted, so that a template without end is an error that does not depend on the machine.
"""

import json
import re
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.chat.control_text import unescaped_marks

# What one rendering may cost, in characters written; a loop round or a call, and an item that becomes text, cost as
# much as so many of them. A conversation of a million tokens has about 4 million, and templates handle each several
# times.
MAX_COST = 100_000_000
CALL_COST = 400
ITEM_COST = 100
MAX_TEXT = 50_000_000  # characters of one value
MAX_WIDTH = 10_000  # of padding, indentation and the like

_WIDTHS = ("center", "ljust", "rjust", "zfill", "expandtabs", "batch", "slice", "indent")
_TO_TEXT = ("tojson", "string", "pprint", "join", "format", "urlencode", "escape", "e", "trim", "upper", "lower")
_FORMAT_WIDTH = re.compile(r"\d{5}|\{[^{}]*\{|%[^a-z%]*\*")  # a width of 10,000 and more, or one taken from a value


class BudgetError(jinja2.exceptions.SecurityError):
    """A rendering costs more than any conversation should."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, by which some templates mark what the model writes: just its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class ChatSandbox(ImmutableSandboxedEnvironment):
    """Compiles chat templates. Renders one at a time: `refill` before each."""

    intercepted_binops = frozenset(["*", "**", "%", "+"])

    def __init__(self) -> None:
        self._left = MAX_COST

        # What takes the context can't be computed while a template is compiled: its cost counts in each rendering.
        @jinja2.pass_context
        def written(_context: Any, value: Any) -> Any:
            return value if isinstance(value, jinja2.Undefined) else self._measured_deeply(value)

        @jinja2.pass_context
        def rounds(_context: Any, items: Any, cost: int) -> Any:
            return self._rounds(items, cost)

        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=written)
        self.filters["tojson"] = to_json
        for name, function in self.filters.items():
            self.filters[name] = self._measuring(name, function)
        self.filters["_written"], self.filters["_rounds"] = written, rounds
        self.globals["raise_exception"] = _raise
        del self.globals["lipsum"]  # writes as much as it is asked to

    def refill(self) -> None:
        """Give the next rendering its budget."""
        self._left = MAX_COST

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """As Jinja reads it, but loops count their rounds, and `~`, lists and dicts what they are made of."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            cost = CALL_COST + sum(len(data.data) for data in loop.find_all(nodes.TemplateData))
            loop.iter = _filtered(loop.iter, "_rounds", nodes.Const(cost))
        for joined in tree.find_all(nodes.Concat):
            joined.nodes = [_filtered(node, "_written") for node in joined.nodes]
        for made in tree.find_all(nodes.List):
            made.items = [_filtered(node, "_written") for node in made.items]
        for pair in tree.find_all(nodes.Pair):
            pair.value = _filtered(pair.value, "_written")
        return tree

    def call(self, context: Any, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._spend(CALL_COST)
        owner = getattr(callee, "__self__", None)
        if isinstance(owner, str):
            _check_growth(callee.__name__, owner, [*args, *kwargs.values()])
        return self._measured(super().call(context, callee, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (_is_small(left) and _is_small(right)):
            raise BudgetError("it computes a power that is too large")
        if operator == "%" and isinstance(left, str):
            _check_growth("format", left, [])
        if operator == "*" and _size(left) * _size(right) > MAX_TEXT:
            raise BudgetError("it makes a value that is too long")
        return self._measured(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        @wraps(formatted)
        def checked(*args: Any, **kwargs: Any) -> str:
            _check_growth("format", value.__self__, [])
            return formatted(*args, **kwargs)

        return checked

    def _spend(self, cost: int) -> None:
        self._left -= cost
        if self._left < 0:
            raise BudgetError("it loops or writes without end")

    def _measured(self, value: Any) -> Any:
        if isinstance(value, (str, list, tuple)):
            self._spend(len(value))
        elif isinstance(value, int) and value.bit_length() > 4096:
            raise BudgetError("it computes a number that is too large")
        return value

    def _measured_deeply(self, value: Any) -> Any:
        """Before a value becomes text: one that holds another twice is as long as if it held copies."""
        if isinstance(value, (list, tuple, dict)):
            for item in value.values() if isinstance(value, dict) else value:
                self._spend(ITEM_COST)
                self._measured_deeply(item)
        return self._measured(value)

    def _measuring(self, name: str, function: Callable) -> Callable:
        @wraps(function)  # with the marks of filters that take the environment or the context
        def filtered(*args: Any, **kwargs: Any) -> Any:
            first = next((value for value in args if isinstance(value, (str, list, tuple))), "")
            rest = [value for value in (*args, *kwargs.values()) if value is not first]
            _check_growth(name, first, rest)
            if name in _TO_TEXT:
                self._measured_deeply(args)
            return self._measured(function(*args, **kwargs))

        return filtered

    def _rounds(self, items: Any, cost: int) -> Any:
        if isinstance(items, jinja2.Undefined) or not isinstance(items, Iterable):
            return items  # Jinja says what is wrong
        found = []
        for item in items:
            self._spend(cost)
            found.append(item)
        return found


def _filtered(node: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None).set_lineno(node.lineno)


def _check_growth(name: str, text: Any, args: list[Any]) -> None:
    """BudgetError if this method or filter would give something huge from that."""
    numbers = [abs(value) for value in args if isinstance(value, int)]
    if name in _WIDTHS and max(numbers, default=0) > MAX_WIDTH:
        raise BudgetError(f"it pads to a width of {max(numbers)}")
    if name in ("format", "format_map") and isinstance(text, str) and _FORMAT_WIDTH.search(text):
        raise BudgetError(f"it formats with {text!r:.60}")
    if name in ("replace", "indent", "join"):
        others = [len(value) for value in args if isinstance(value, (str, list, tuple))]
        grown = (len(text) + 1) * max([1, *others[-1:], *numbers[:1]])
        if grown > MAX_TEXT and others[-1:] != [0]:
            raise BudgetError("it makes a text that is too long")


def _size(value: Any) -> int:
    if isinstance(value, (str, list, tuple)):
        return len(value)
    return abs(value) if isinstance(value, int) and not isinstance(value, bool) else 1


def _is_small(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= 1000


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` of chat templates: unlike Jinja's own, it escapes nothing for HTML."""
    if (len(indent) if isinstance(indent, str) else indent or 0) > 100:
        raise BudgetError(f"it indents JSON by {indent!r:.20}")
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return unescaped_marks(text) if ensure_ascii else text
