"""Arithmetic that a model wrote: expressions evaluated exactly and within bounds, and numbers found in text.

No `eval`: Python's parser makes a tree of text that holds nothing but digits, operators and parentheses, and the tree
is walked here over fractions.
"""

import ast
import re
from collections import deque
from decimal import Decimal
from fractions import Fraction

from pipeline.user_code.tool_schema import ArgumentError

MAX_CHARS = 200  # of an expression; it bounds the depth of its tree, too
MAX_EXPONENT = 64
MAX_BITS = 256  # of a result's numerator and denominator: some 77 digits

# The operators, those that models write for others among them.
_SIGNS = ("+", "-", "*", "/", "×", "·", "÷", "−", "–", "^")
_OPERATORS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "**"})
_OTHER = re.compile(r"[^0-9.+\-*/()\s]")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")

# Not within a word, nor a part of 1,23 or 1.2.3.
_NUMBER = re.compile(r"(?<![\w.])(?<!\d,)[-−]?\$?(?:\d{1,3}(?:,\d{3})+|\d{1,30})(?:\.\d{1,30})?(?![.,]?\d)")
_ANSWER = re.compile(r"\banswer\b\s*(?:is|=|:)", re.IGNORECASE)


class ExpressionError(ArgumentError):
    """An expression that can't be evaluated; the text is for the model."""


def evaluate(expression: str) -> Fraction:
    """The exact value of an expression of + - * / ** (or ^) and parentheses. Raises ExpressionError."""
    if len(expression) > MAX_CHARS:
        raise ExpressionError(f"the expression has {len(expression)} characters; at most {MAX_CHARS} are taken")
    text = _THOUSANDS.sub("", expression.translate(_OPERATORS)).strip().removesuffix("=").strip()
    if other := _OTHER.search(text):
        raise ExpressionError(
            f"{other[0]!r} is not arithmetic; an expression holds numbers, + - * / ** and parentheses"
        )
    try:
        tree = ast.parse(" ".join(text.split()), mode="eval")
    except (SyntaxError, MemoryError, RecursionError, ValueError):
        raise ExpressionError(
            f"{expression!r} is not an arithmetic expression; write for example 12 * (3 + 4)"
        ) from None
    return _value(tree.body)


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()):
            return _bounded(_literal(node.value))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            value = _value(operand)
            return -value if isinstance(node.op, ast.USub) else value
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            return _bounded(_combined(node.op, _value(left), _value(right)))
    raise ExpressionError("only numbers, + - * / ** and parentheses are taken; a product is written with *")


def _literal(value: int | float) -> Fraction:
    try:
        return Fraction(str(value))  # of the decimal that was written, not of its nearest binary fraction
    except ValueError:
        raise ExpressionError("a number in the expression is too large") from None


def _combined(operator: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
    if right == 0:
        raise ExpressionError("the expression divides by zero")
    return left / right


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise ExpressionError(f"an exponent is a whole number from -{MAX_EXPONENT} to {MAX_EXPONENT}")
    if base == 0 and exponent < 0:
        raise ExpressionError("the expression divides by zero")
    return _bounded(base ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ExpressionError("the result is too large or has too many digits")
    return value


def number_text(value: Fraction) -> str:
    """As a calculator shows it: whole numbers in full, others with ten digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


def final_number(text: str) -> Fraction | None:
    """The number that a text gives as its answer; None if it gives none.

    It is the first number behind the last "answer is" (or "answer:"), behind the equals sign if an equation stands
    there; without such words it is the last number of the text. `1,234`, `12.0`, `$5` and `**12**.` are numbers, and in
    `6 (= 5 + 1)` it is 6.
    """
    answers = list(_ANSWER.finditer(text))
    if answers:
        said = text[answers[-1].end() :].lstrip(" \t\r\n:=*")
        line = _without_derivation(said.partition("\n")[0])
        found = _NUMBER.search(line[line.rfind("=") + 1 :]) or _NUMBER.search(said)
    else:
        found = _last_number(_without_derivation(text))
    if found is None:
        return None
    return Fraction(Decimal(found[0].replace(",", "").replace("$", "").replace("−", "-")))


def _without_derivation(text: str) -> str:
    """`6 (= 5 + 1)` -> `6 (`: an equals sign and an expression at the end, behind a number that is none itself."""
    head, _, said = text.rstrip(" \t\r\n.!*").rpartition("=")
    said = said.strip()
    if said.count(")") > said.count("("):
        said = said.removesuffix(")")
    number = _last_number(head)
    if number is None or head[: number.start()].rstrip().endswith(_SIGNS) or _NUMBER.fullmatch(said):
        return text
    try:
        evaluate(said)
    except ExpressionError:
        return text
    return head


def _last_number(text: str) -> re.Match[str] | None:
    return next(iter(deque(_NUMBER.finditer(text), maxlen=1)), None)
