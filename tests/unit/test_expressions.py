"""Expressions that a model wrote, evaluated exactly and within bounds; and the number that a text gives as answer."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.tasks.expressions import MAX_CHARS, ExpressionError, evaluate, final_number, number_text
from pipeline.user_code.tool_schema import ArgumentError


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * 3", "9"),
        ("7 - 10", "-3"),
        ("-(2 + 3)", "-5"),
        ("10 / 4", "2.5"),
        ("1 / 3", "0.3333333333"),
        ("0.1 + 0.2", "0.3"),
        (".5 * 4", "2"),
        ("2 ** 10", "1024"),
        ("2 ^ 10", "1024"),
        ("2 ** -1", "0.5"),
        ("12 × 3 ÷ 4 − 1", "8"),
        ("1,234 * 2", "2468"),
        ("12 * (3 + 4) =", "84"),
        ("1\n+ 2", "3"),
        ("9 ** 64", str(9**64)),
        ("-" * (MAX_CHARS - 1) + "1", "-1"),
    ],
)
def test_expressions_are_evaluated_exactly(expression, shown):
    assert number_text(evaluate(expression)) == shown


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("", "is not an arithmetic expression; write for example"),
        ("1 +", "is not an arithmetic expression"),
        ("1 2", "is not an arithmetic expression"),
        ("007", "is not an arithmetic expression"),
        ("apples * 2", "'a' is not arithmetic"),
        ("__import__('os')", "'_' is not arithmetic"),
        ("1e5", "'e' is not arithmetic"),
        ("1,23", "',' is not arithmetic"),
        ("3 == 3", "'=' is not arithmetic"),
        ("1 \0", "is not arithmetic"),
        ("\ud800", "is not arithmetic"),
        ("3(4)", "a product is written with *"),
        ("7 // 2", "only numbers"),
        ("()", "only numbers"),
        ("1 / 0", "divides by zero"),
        ("1 / (2 - 2)", "divides by zero"),
        ("0 ** -1", "divides by zero"),
        ("2 ** 0.5", "an exponent is a whole number from -64 to 64"),
        ("2 ** 65", "an exponent is a whole number"),
        ("9 ** 9 ** 9", "an exponent is a whole number"),
        ("9 ** 64 * 9 ** 64", "too large or has too many digits"),
        ("(9 ** 64) ** 64", "too large or has too many digits"),
        ("1" * MAX_CHARS, "too large or has too many digits"),
        ("1" * 400 + ".0", "at most 200"),
        ("(" * (MAX_CHARS // 2) + "1" + ")" * (MAX_CHARS // 2 - 1), "is not an arithmetic expression"),
        ("1+" * 1000 + "1", "the expression has 2001 characters; at most 200 are taken"),
    ],
)
def test_what_is_no_arithmetic_is_told_to_the_model(expression, says):
    with pytest.raises(ExpressionError, match="^[^\n]*$") as refused:
        evaluate(expression)
    assert says in str(refused.value)
    assert isinstance(refused.value, ArgumentError)  # so the model reads the sentence alone


@given(st.text("0123456789.+-*/()^ ", max_size=40) | st.text(max_size=20))
def test_any_text_is_evaluated_or_refused(expression):
    try:
        value = evaluate(expression)
    except ExpressionError:
        return
    assert isinstance(value, Fraction)
    number_text(value)


sums = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda parts: f"({' '.join(parts)})"),
    max_leaves=8,
)


@given(sums)
def test_whole_numbers_come_out_as_python_has_them(expression):
    assert evaluate(expression) == eval(expression)  # the oracle; its text is the test's own


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 12.", 12),
        ("The answer is 1,234.", 1234),
        ("The answer is 1,234,567.50 dollars", Fraction("1234567.5")),
        ("The answer is 12.0", 12),
        ("The answer is **12**.", 12),
        ("The answer is: $12", 12),
        ("Answer:\n12", 12),
        ("the ANSWER = -7", -7),
        ("The answer is −7", -7),
        ("The answer is 24 * 17 = 408 pencils in 17 boxes.", 408),
        ("The answer is 3.\nNo, the answer is 4.", 4),
        ("The answer is 408 pencils, for 17 boxes.", 408),
        ("24 * 17 = 408", 408),
        ("6 (= 5 + 1)", 6),
        ("The answer is 6 (= 5 + 1).", 6),
        ("The answer is 6 = 5 + 1.", 6),
        ("The answer is 6 (5 + 1 = 6).", 6),
        ("The answer is 7 apples (= (2 + 3) + 2)!", 7),
        ("The answer is 24 * 17 (= 408).", 408),
        ("The answer is 5 + 1 = 6 (= 12 / 2).", 6),
        ("6 = 5 + 1, so the answer is 6.", 6),
        ("6 = 5 + 1. So it is 7.", 7),
        ("= 5 + 1", 1),
        ("408", 408),
        ("I count 3 and 4, so 7!", 7),
        ("\\boxed{12}", 12),
        ("12kg", 12),
        ("", None),
        ("The answer is twelve.", None),
        ("x1", None),
        ("1,23", None),
        ("1.2.3", None),
        ("9" * 1000, None),
    ],
)
def test_the_number_that_a_text_gives_as_its_answer(text, number):
    assert final_number(text) == number


@given(st.text("0123456789.,-$ =answeri:\n", max_size=60))
def test_any_text_gives_a_number_or_none(text):
    final_number(text)


def test_the_answer_may_stand_on_a_later_line():
    assert final_number("The answer is, in pencils:\n\n408\nThat was 24 * 17.") == 408
