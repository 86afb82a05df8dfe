"""A run's files, replayed from outside: were all rows trained exactly once, and is every token accounted for?

This is not `headway audit`: it shares no code with it, and reads metrics.jsonl, config.json and the ledger that the
environment kept, too. It is for runs that completed, with a finite data set and no group given up.
"""

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from bench.soak.errands import NUM_TURNS


class Replay:
    """One pass over the log. `violations`: a sentence each. `counts`: what there was."""

    def __init__(self, run_dir: Path, ledger: Path, num_rows: int) -> None:
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self._group_size = 0
        self._bound = 0
        self._row: dict[int, int] = {}  # of each group
        self._row_id: dict[int, str] = {}  # of each group: how its environment calls the row
        self._attempt: dict[str, list[tuple[int, int]]] = {}  # (version, tokens) of the segments since it (re)started
        self._reward: dict[str, tuple[int, float]] = {}  # tokens and reward of the attempt that ended
        self._trained: Counter[int] = Counter()  # rows
        self._tokens: Counter[str] = Counter()
        self._batches: list[dict[str, Any]] = []
        self._reward_means: list[float] = []  # of each batch
        self._versions = [0]
        self._last: dict[str, Any] = {}
        for event in self._lines(run_dir / "events.jsonl"):
            try:
                self._replay(event)
            except (LookupError, TypeError, ValueError) as error:
                self.violations.append(
                    f"{type(error).__name__} ({error}), as of something that was never told, at {event}"
                )
        self._check_end(num_rows)
        self._check_metrics(self._lines(run_dir / "metrics.jsonl"))
        self._check_ledger(self._lines(ledger))

    def _lines(self, path: Path) -> list[dict[str, Any]]:
        if not path.exists():
            self.violations.append(f"there is no {path.name}")
            return []
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def _need(self, holds: bool, sentence: str) -> None:
        if not holds:
            self.violations.append(sentence)

    def _replay(self, event: dict[str, Any]) -> None:
        self._need(event["t"] >= self._last.get("t", 0.0), f"time goes back at {event}")
        self._last = event
        self.counts[event["event"]] += 1
        name = event.get("trajectory")
        match event["event"]:
            case "run":
                self._group_size, self._bound = event["group_size"], event["max_staleness"]
                self._need(event["version"] == self._versions[-1], f"resumed at another version: {event}")
            case "admitted":
                self._need(event["group"] not in self._row, f"admitted twice: {event}")
                self._row[event["group"]] = event["row"]
                self._row_id[event["group"]] = event["id"]
            case "started":
                self._need(name not in self._attempt, f"started while it ran: {event}")
                self._attempt[name] = []
            case "segment":
                self._attempt[name].append((event["version"], event["tokens"]))
                self._tokens["generated"] += event["tokens"]
            case "trajectory":
                told = sum(tokens for _, tokens in self._attempt[name])
                self._need(told == event["tokens"], f"{told} tokens were generated: {event}")
                self._reward[name] = (event["tokens"], event["reward"])
            case "retry" | "discarded":
                lost = sum(tokens for _, tokens in self._attempt.pop(name, []))
                self._need(lost == event["tokens"], f"{lost} tokens were generated: {event}")
                self._tokens[event["event"]] += lost
            case "failed" | "filtered":
                self.violations.append(f"a group was given up: {event}")
            case "batch":
                self._train(event)
            case "published":
                self._need(event["version"] == self._versions[-1] + 1, f"published out of order: {event}")
                self._versions.append(event["version"])

    def _train(self, event: dict[str, Any]) -> None:
        self._batches.append(event)
        self._need(event["step"] == len(self._batches), f"not the next batch: {event}")
        self._need(event["version"] == self._versions[-1], f"trained at another version: {event}")
        tokens, ages, rewards = 0, [], []
        for group in event["groups"]:
            self._trained[self._row[group]] += 1
            for member in range(self._group_size):
                name = f"{group}.{member}"
                attempt = self._attempt.pop(name, None)
                self._need(bool(attempt), f"trajectory {name} is trained without a token: {event}")
                rewards.append(self._reward[name][1])
                for version, count in attempt or []:
                    tokens += count
                    age = event["version"] - version
                    self._need(0 <= age <= self._bound, f"a segment of {name} is {age} updates old: {event}")
                    ages += [age] if count else []
        self._need([min(ages), max(ages)] == [event["age_min"], event["age_max"]], f"its ages are {ages}: {event}")
        self._reward_means.append(sum(rewards) / len(rewards))
        self._need(tokens == event["tokens"], f"{tokens} tokens were generated for {event}")
        self._tokens["trained"] += tokens

    def _check_end(self, num_rows: int) -> None:
        twice = [row for row, times in self._trained.items() if times > 1]
        self._need(not twice, f"rows trained more than once: {twice}")
        missing = sorted(set(range(num_rows)) - set(self._trained))
        self._need(not missing, f"rows never trained: {missing}")
        self._need(not set(self._trained) - set(range(num_rows)), "rows trained that do not exist")
        self._need(not self._attempt, f"trajectories that came to nothing: {sorted(self._attempt)}")
        spent = sum(count for fate, count in self._tokens.items() if fate != "generated")
        self._need(self._tokens["generated"] == spent, f"tokens do not add up: {dict(self._tokens)}")
        end = (self._last.get("event"), self._last.get("status"))
        self._need(end == ("end", "completed"), f"the log ends in {self._last}")
        self.counts |= Counter({f"tokens_{fate}": count for fate, count in self._tokens.items()})
        self.counts["rows_trained_once"] = sum(times == 1 for times in self._trained.values())

    def _check_metrics(self, lines: list[dict[str, Any]]) -> None:
        steps = [line["step"] for line in lines]
        self._need(steps == list(range(1, len(self._batches) + 1)), f"metrics.jsonl has the steps {steps}")
        for line, batch in zip(lines, self._batches, strict=False):
            version = batch["version"] + batch["updated"]
            self._need(line["model_step"] == version, f"metrics.jsonl says {line['model_step']} of {batch}")
            told = line["train/generated_tokens"]
            self._need(told == batch["tokens"], f"metrics.jsonl counts {told} tokens of {batch}")
        for line, mean in zip(lines, self._reward_means, strict=False):
            told = line["reward/mean"]
            self._need(
                abs(told - mean) < 1e-9, f"metrics.jsonl says that step {line['step']} is worth {told}, not {mean}"
            )

    def _check_ledger(self, lines: list[dict[str, Any]]) -> None:
        """What was trained is what the environment itself rewarded."""
        rewarded = defaultdict(set)
        for line in lines:
            rewarded[line["row"], line["member"]].add((line["tokens"], line["reward"]))
        self.counts["rewards_given"] = len(lines)
        for name, found in self._reward.items():
            group, member = map(int, name.split("."))
            known = rewarded[self._row_id.get(group), member]
            self._need(found in known, f"trajectory {name} has tokens and reward {found}, its environment gave {known}")
        self._need(NUM_TURNS * len(self._reward) <= self.counts["segment"], "there are turns without a segment")
