"""The error of a bench whose result can't be used."""

from shm.errors import HeadwayError


class BenchError(HeadwayError, RuntimeError):
    """A run of a bench did not end as it must, or its log does not hold what is measured."""
