"""Errors of the lowest layer, and the root of all of Headway's.

Every error says in one sentence what was found (with values), then the rule, then what to do.
"""


class HeadwayError(Exception):
    """Root of every error that Headway raises on purpose."""


class BlockError(HeadwayError, OSError):
    """Shared memory could not be made, opened or mapped."""


class QueueError(HeadwayError, RuntimeError):
    """A shared-memory queue was used against its rules (no room reserved, out of order, torn)."""


class LedgerError(HeadwayError, RuntimeError):
    """The version ledger is of another layout or run, or holds a record that never becomes whole."""


class GateError(HeadwayError, RuntimeError):
    """The gate refused an optimizer step; the message names the group and the rule."""


class WeightsError(HeadwayError, RuntimeError):
    """A weight slot does not fit its layout, or does not hold the version it was read for."""
