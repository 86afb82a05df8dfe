"""Rows that no message can carry are refused, naming row and field."""

import datetime

import pytest

from pipeline.dataset import check_rows, row_id, why_not_plain
from pipeline.errors import ConfigTypeError

FINE = {"number": 3, "text": "é", "list": [1, 2.5, None, True], "nested": {"a": {"b": b"x"}}}


def test_plain_rows_pass():
    check_rows([FINE, {}, {"pair": (1, 2)}])


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({1, 2}, "set"),
        (datetime.date(2030, 1, 2), "date"),
        (object(), "object"),
        (1 << 64, "too big|out of range"),
        ({"deep": [{1}]}, "set"),
        ("\ud800", "surrogates"),
    ],
)
def test_row_that_no_message_can_carry_is_named_with_its_field(value, why):
    with pytest.raises(ConfigTypeError, match=rf"^Row 1 has .* as its 'answer'; .*plain values only.*({why})"):
        check_rows([FINE, {"question": "?", "answer": value}])


def test_row_that_is_no_dict_is_named():
    with pytest.raises(ConfigTypeError, match=r"^Evaluation row 0 is \['a'\]"):
        check_rows([["a"]], "Evaluation row")


def test_what_the_other_end_can_not_read_is_not_plain():
    assert why_not_plain({(1, 2): 3}) == "a tuple can't be the key of a dict"
    assert why_not_plain([{"a": {(1, 2): 3}}]) == "a tuple can't be the key of a dict"
    assert why_not_plain({"a": (1, 2), 3: [b"x", None, 0.5, {"b": {}}]}) is None


def test_what_is_nested_too_deep_for_those_who_walk_it_is_not_plain():
    deep = []
    for _ in range(99):
        deep = [deep]
    assert why_not_plain(deep) is None and why_not_plain([deep]) == "at most 100 levels"


@pytest.mark.parametrize(
    ("value", "found"), [("x", "x"), (7, 7), (0, 0), (True, None), (1.0, None), ([1], None), (None, None)]
)
def test_id_is_text_or_a_whole_number(value, found):
    assert row_id({"id": value}) == found and row_id({}) is None
