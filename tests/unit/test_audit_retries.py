"""What the audit proves of trajectories that start again."""

import pytest
from test_audit import Log, audit_of


def retried(name, attempt, tokens):
    return {"group": int(name.split(".")[0]), "trajectory": name, "attempt": attempt, "cause": "died", "tokens": tokens}


@pytest.mark.parametrize("fate", ["started", "discarded", "failed"])
@pytest.mark.parametrize("begun", [True, False])
def test_a_trajectory_may_start_again_before_it_has_begun(begun, fate):
    """Twice in a row, or before its first request: what it had generated is thrown away once."""
    log, tokens = Log(), 3 if begun else 0
    log.admit(0, 0)
    if begun:
        log.start("0.0", 0)
        log.sample("0.0", 0, 3)
    log("retry", **retried("0.0", 1, tokens))
    log("retry", **retried("0.0", 2, 0))
    if fate == "started":
        log.start("0.0", 0)
        log.sample("0.0", 0, 4)
    elif fate == "discarded":
        log("discarded", group=0, trajectory="0.0", cause="group_deadline", tokens=0)
    else:
        log("failed", group=0, cause="it hung", tokens=0)
    log.end(status="failed", steps=0, admitted=1, outstanding=int(fate != "failed"), failed=int(fate == "failed"))
    result = audit_of(log.events)
    assert result.findings == [] and result.fates["retry"] == tokens


def test_tokens_that_are_thrown_away_twice_are_found():
    log = Log()
    log.admit(0, 0)
    log.start("0.0", 0)
    log.sample("0.0", 0, 3)
    log("retry", **retried("0.0", 1, 3))
    log("retry", **retried("0.0", 2, 3))
    log.end(status="failed", steps=0, admitted=1, outstanding=1)
    assert any("3 tokens retry, but 0 in segments" in finding for finding in log.findings())
