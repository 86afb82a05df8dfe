"""Replay a run's events.jsonl and prove its promises from outside: nothing else of Headway is imported.

Proved: ages in bounds; each group consumed once, filtered, failed or outstanding; admissions and reservations within
their limits; every token accounted for; versions and times in order. A finding, or no `end`, makes the exit code 1.
"""

import json
import math
import sys
from collections import Counter
from types import SimpleNamespace as Record

OF_TRAJECTORY = ("started", "segment", "trajectory", "retry", "discarded")
IN_ORDER = {"admitted": "any optim", "batch": "any", "endcompleted": "any", "optim": "optim", "published": "published"}
UNCHANGING = ("max_staleness", "stale_policy", "groups_per_step", "group_size")  # across the resumes of a run


class Audit:
    """One pass over the log. findings: a sentence each; fates, done: tokens, groups by what became of them."""

    def __init__(self, lines):
        self.findings, self.groups, self.fates, self.run, self.due, self.ended = [], {}, Counter(), {}, "any", 1
        self.seconds = self.version = self.batches = self.generated = self.oldest = self.runs = self.admitted = 0
        self.line, self.done = 0, Counter(consumed=0, filtered=0, failed=0)
        for self.line, line in enumerate(lines, 1):
            try:
                self.replay(json.loads(line))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                self.need(False, f"malformed, or of no outstanding group: {type(error).__name__}: {error}")
        self.fates["outstanding"] = sum(self.tokens(self.unspent(group)) for group in self.groups.values())
        self.need(self.generated == sum(self.fates.values()), f"{self.generated} tokens are not {dict(self.fates)}")
        self.need(self.ended and self.runs, "the last event is not end: the run did not end in order")

    def need(self, holds, sentence):
        if not holds:
            self.findings.append(f"line {self.line}: {sentence}")

    def unspent(self, group):
        return [one for one in group.members.values() if one.state in ("running", "ended")]

    def tokens(self, trajectories):
        return sum(tokens for one in trajectories for _, tokens in one.segments)

    def spend(self, fate, tokens, trajectories, groups):
        self.fates[fate] += tokens
        self.need(tokens == (held := self.tokens(trajectories)), f"{tokens} tokens {fate}, but {held} in segments")
        for one in trajectories:
            one.state, one.ended, one.segments = fate, math.inf, [] if fate == "retry" else one.segments
        for group in groups:
            spent = sum(one.state in ("consumed", "discarded") for one in group.members.values())
            if fate in ("filtered", "failed") or spent == self.run["group_size"]:
                self.done["consumed" if fate == "discarded" else fate] += 1
                del self.groups[group.number]

    def replay(self, e):
        kind, need, run, group, one = e["event"], self.need, self.run, None, None
        need(e["t"] >= self.seconds, f"t goes back from {self.seconds} to {e['t']}")
        self.seconds, due = e["t"], IN_ORDER.get(kind + e.get("status", ""), "any optim published").split()
        need(kind == "run" or (self.due in due and not self.ended), f"{kind} does not belong here: due is {self.due}")
        if kind in (*OF_TRAJECTORY, "ready", "filtered", "failed"):
            group = self.groups[e["group"]]
        if kind in OF_TRAJECTORY:
            name, member = e["trajectory"], int(e["trajectory"].partition(".")[2])
            need(name == f"{e['group']}.{member}" and member < run["group_size"], f"there is no trajectory {name}")
            one = group.members.setdefault(member, Record(state="new", segments=[], ended=math.inf))
            again = "new retry running" + " ended" * (kind == "retry" and group.ready < one.ended < self.begun)
            once = {"started": "new retry", "segment": "running", "trajectory": "running"}
            need(one.state in once.get(kind, again), f"{kind} of trajectory {name}, which is {one.state}")
        if kind in ("admitted", "started", "segment", "checkpoint") and e["version"] is not None:
            need((group or self).version <= e["version"] <= self.version, f"no {kind} can have version {e['version']}")
        match kind:
            case "run":
                same = e.get("resumed", 0) == self.runs and all(e[key] == run.get(key, e[key]) for key in UNCHANGING)
                need(same and e["version"] == (self.version if run else e["version"]), "no resume of what came before")
                self.run, self.version, self.runs, self.begun, self.ended = e, e["version"], self.runs + 1, self.line, 0
            case "admitted":
                need(e["group"] == self.admitted, f"group {e['group']} is admitted as number {self.admitted}")
                self.admitted += 1
                self.groups[e["group"]] = Record(number=e["group"], version=e["version"], ready=0, members={})
                step, limit, done = run["groups_per_step"], run["max_staleness"], self.batches - (self.due == "optim")
                ahead = math.ceil((1 + min(run["admit_ahead"], limit)) * step * run["oversample_factor"])
                most = min(run["steps"] * step, done * step + min((1 + limit) * step, ahead))
                kept = len(self.groups) + self.done["consumed"]
                need(kept <= most, f"{kept} groups are admitted, {most} are allowed after {done} batches")
            case "started":
                one.state, one.pinned, one.segments = "running", e["version"], []
            case "segment":
                self.generated += e["tokens"]
                one.segments.append((e["version"], e["tokens"]))
                need(one.pinned in (None, e["version"]), f"{name} is pinned to {one.pinned}, not {e['version']}")
            case "trajectory":
                one.state, one.ended = "ended", self.line
                need(e["tokens"] == self.tokens([one]), f"{name} tells {e['tokens']} tokens, not {self.tokens([one])}")
            case "ready":
                whole = run["group_size"] == sum(m.state not in ("running", "retry") for m in group.members.values())
                once = (whole or run["on_stragglers"] == "discard") and not group.ready
                need(once or run["on_stragglers"] == "carry_over", "ready twice or too early")
                group.ready = self.line
            case "retry" | "discarded" | "filtered" | "failed":
                self.spend(kind, e["tokens"], [one] if one else self.unspent(group), [group])
            case "batch":
                self.train(e)
            case "optim":
                need((e["step"], e["from"], e["to"]) == (self.batches, self.version, self.version + 1), "not due")
                self.due = "published"
            case "published":
                need(e["version"] == self.version + 1, f"version {e['version']} is published after {self.version}")
                self.version, self.due = e["version"], "any"
            case "end":
                found = dict(self.done, outstanding=len(self.groups), steps=self.batches, admitted=self.admitted)
                need(found == {key: e[key] for key in found}, f"end disagrees with what came before it: {found}")
                self.ended = self.line
        if kind in ("admitted", "optim") and run["stale_policy"] == "wait":
            for rank, version in enumerate(sorted(group.version for group in self.groups.values()), 1):
                room = (version + run["max_staleness"] - self.version + (kind == "admitted")) * run["groups_per_step"]
                need(rank <= room, f"reservation {rank} (version {version}) has only {room} places left in time")

    def train(self, e):
        need, trained, limit = self.need, [], self.run["max_staleness"]
        need((e["step"], e["version"]) == (self.batches + 1, self.version), f"batch {e['step']} is not due")
        for index, number in enumerate(e["groups"]):
            group = self.groups[number]
            need(group.ready, f"group {number} is not ready")
            members = [group.members[m] for m in e["members"][index]] if "members" in e else self.unspent(group)
            need(all(one.ended < group.ready for one in members), f"group {number} has members that are not ready")
            trained += members
        self.spend("consumed", e["tokens"], trained, [self.groups[number] for number in set(e["groups"])])
        ages = sorted((self.version - version, tokens) for one in trained for version, tokens in one.segments if tokens)
        span = (ages[0][0], ages[-1][0]) if ages else (e["age_min"], e["age_max"])
        need(span == (e["age_min"], e["age_max"]), f"the segments' ages are {span[0]} to {span[1]}")
        old = sum(tokens for age, tokens in ages if age > limit)
        allowed = {"wait": 0, "mask_span": e["masked"], "keep": old}[self.run["stale_policy"]]
        need(old <= allowed, f"{old} tokens are older than max_staleness {limit}, the oldest by {span[1]} versions")
        self.batches, self.oldest, self.due = e["step"], max(self.oldest, span[1] or 0), ("any", "optim")[e["updated"]]


def main(path):
    """Print what the log proves; 0 if every promise held, else 1."""
    with open(path, encoding="utf-8", errors="replace") as lines:
        audit = Audit(lines)
    print(f"{path}: {audit.line} events, {audit.batches} batches, ages up to {audit.oldest}, version {audit.version}")
    print(f"groups {dict(audit.done)}, {len(audit.groups)} outstanding, tokens {dict(audit.fates)}")
    print(*audit.findings[:20], f"{len(audit.findings)} findings", sep="\n")
    return 1 if audit.findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
