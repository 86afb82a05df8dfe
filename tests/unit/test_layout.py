"""The table of a flat weight buffer."""

import msgpack
import pytest

from shm.errors import WeightsError
from shm.layout import Entry, WeightLayout

ENTRIES = (Entry("embed", (10, 4), 0), Entry("out", (4, 4), 40), Entry("norm", (4,), 56), Entry("bias", (3,), 64))


def test_matrices_are_one_slice_and_vectors_the_other():
    layout = WeightLayout(ENTRIES, 67)
    assert layout.num_matrix_elements == 56
    assert [entry.num_elements for entry in layout.entries] == [40, 16, 4, 3]
    assert WeightLayout(ENTRIES[:2], 60).num_matrix_elements == 60
    assert WeightLayout(ENTRIES[2:], 67).num_matrix_elements == 56


def test_sizes_need_no_torch():
    layout = WeightLayout(ENTRIES, 67)
    assert (layout.num_bytes("float32"), layout.num_bytes("bfloat16")) == (268, 134)
    with pytest.raises(WeightsError, match="'int8' are not supported"):
        layout.num_bytes("int8")


def test_a_layout_survives_a_message():
    layout = WeightLayout(ENTRIES, 70)
    assert WeightLayout.from_fields(msgpack.unpackb(msgpack.packb(layout.to_fields()))) == layout


@pytest.mark.parametrize(
    "entries, num_elements, why",
    [
        ([Entry("a", (2, 2), 0), Entry("b", (2, 2), 3)], 8, "'b' begins at element 3, before the end \\(4\\)"),
        ([Entry("a", (2, 2), -1)], 8, "begins at element -1"),
        ([Entry("a", (2, 2), 0), Entry("a", (2, 2), 4)], 8, "'a' is in the layout twice"),
        ([Entry("a", (2,), 0), Entry("b", (2, 2), 2)], 8, "Matrix 'b' .* stands after a one-dimensional tensor"),
        ([Entry("a", (2, 2), 0)], 3, "needs 4 elements, but num_elements is 3"),
        ([Entry("a", (2, 0), 0)], 3, "every dimension must be at least 1"),
        ([Entry("a", (), 0)], 3, "every dimension must be at least 1"),
    ],
)
def test_a_layout_out_of_order_is_refused(entries, num_elements, why):
    with pytest.raises(WeightsError, match=why):
        WeightLayout(tuple(entries), num_elements)


@pytest.mark.parametrize("fields", [{}, {"entries": [["a", 3]], "num_elements": 3}, {"entries": 3, "num_elements": 3}])
def test_values_that_are_no_layout_are_refused(fields):
    with pytest.raises(WeightsError, match="Not a weight layout"):
        WeightLayout.from_fields(fields)
