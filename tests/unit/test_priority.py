"""Which waiting trajectory comes first."""

from pipeline.processes.sampler.priority import LengthPredictor, Priority, priority_of


def test_older_versions_come_first_whatever_is_expected():
    assert Priority(3, 0.0) < Priority(4, -900.0)


def test_among_groups_of_one_version_the_longest_expected_comes_first():
    lengths = LengthPredictor()
    lengths.add(7, 100), lengths.add(8, 10)
    order = sorted((7, 8), key=lambda row: priority_of("predicted_length", 3, row, lengths))
    assert order == [7, 8]
    assert priority_of("fifo", 3, 7, lengths) == priority_of("fifo", 3, 8, lengths) == Priority(3)


def test_a_row_is_expected_to_be_as_long_as_it_was_on_average():
    lengths = LengthPredictor()
    for tokens in (10, 20, 60):
        lengths.add(1, tokens)
    lengths.add(2, 6)
    assert lengths.expected(1) == 30 and lengths.expected(2) == 6


def test_a_new_row_is_expected_to_be_as_long_as_all_were_and_nothing_is_0():
    lengths = LengthPredictor()
    assert lengths.expected(5) == 0
    lengths.add(1, 10), lengths.add(1, 20), lengths.add(2, 60)
    assert lengths.expected(5) == 30
