"""reasoning_gym's tasks as environments: `reasoning_gym:chain_sum`. Its rows, its prompts, its scorers.

The package takes two seconds to import, so only environment processes and the probe do. A row is one of its entries,
`{"question", "answer", "metadata"}`, as plain values; some scorers tell tuples from lists, which messages don't, so a
tuple in it is written as `{"tuple": [...]}`.
"""

import dataclasses
import functools
import json
import logging
import random
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pipeline.env import ChatMessage, Env, TrajectoryView, TurnResult
from pipeline.errors import ConfigError, ConfigTypeError
from pipeline.user_code.failures import LOGGER, failure_text
from pipeline.wording import shown, suggestion

INSTRUCTION = "Write your final answer between <answer> and </answer>, and nothing else there."
SIZE = 500  # rows, as in the package
SCORING_SECONDS = 10.0  # some scorers evaluate what the model wrote, 9**9**9 for example

_log = logging.getLogger(LOGGER)


class ReasoningGym(Env):
    """One task of reasoning_gym: a question, one turn, and the score of what stands between <answer> and </answer>.

    task: its name. size, seed: of the rows (default: 500 by the run's seed). instruction: follows the question.
    system_prompt: goes before it. The other arguments are the task's own configuration. A scorer that fails at an
    answer, or takes longer than 10 s over it, gives 0 and counts in `rollout/scorer_failed`; answers that are missing
    count in `rollout/no_answer`. Raises ConfigError or ConfigTypeError.
    """

    recovery = "snapshot"

    def __init__(
        self, task: str, *, instruction: str = INSTRUCTION, system_prompt: str | None = None, **config: Any
    ) -> None:
        for name, value in (("instruction", instruction), ("system_prompt", system_prompt or "")):
            if not isinstance(value, str):
                raise ConfigTypeError(f"{name} of reasoning_gym:{task} is {shown(value)}; it is a text.")
        self._dataset = _dataset(task, json.dumps({"seed": 0} | config, sort_keys=True))
        self._task = task
        self._instruction = instruction
        self._system_prompt = system_prompt
        self._score = 0.0

    @classmethod
    def rows(cls, seed: int, /, task: str, *, size: int = SIZE, **arguments: Any) -> Iterable[dict[str, Any]]:
        """size rows, the same for the same seed and configuration: the probe's process fixes how text hashes, by
        which six tasks go, and `list_functions` draws from Python's own generator.
        """
        config = {name: value for name, value in arguments.items() if name not in ("instruction", "system_prompt")}
        dataset = _dataset(task, json.dumps({"seed": seed} | config | {"size": size}, sort_keys=True))
        before = random.getstate()
        random.seed(f"{task} {dataset.seed}")
        try:
            return [_row_of(dataset[index], f"reasoning_gym:{task}") for index in range(len(dataset))]
        finally:
            random.setstate(before)

    def reset(self, row: dict[str, Any]) -> Sequence[ChatMessage]:
        if not isinstance(row.get("question"), str):
            raise ConfigError(
                f"The row has no 'question', only {', '.join(map(repr, row)) or 'nothing'}; reasoning_gym:{self._task} "
                "brings rows of its own along: give no data, or what rl.env_rows gives."
            )
        self._row = row
        question = "\n\n".join(filter(None, (row["question"], self._instruction)))
        system = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        return [*system, {"role": "user", "content": question}]

    def on_turn(self, traj: TrajectoryView) -> TurnResult:
        """The end: what the answer is worth, and what the score can't say."""
        from reasoning_gym.utils import extract_answer  # an extra, and seconds to import: see above

        answer = extract_answer(traj.text)
        self._score, failed = self._scored(answer)
        return TurnResult(done=True, metrics={"no_answer": answer is None, "scorer_failed": failed})

    def reward(self, traj: TrajectoryView, row: dict[str, Any]) -> float:
        return self._score

    def snapshot(self) -> dict[str, Any]:
        return self._row

    def restore(self, state: dict[str, Any]) -> None:
        self._row = state

    def _scored(self, answer: str | None) -> tuple[float, bool]:
        """(score, whether the scorer could make nothing of the answer). What it can't score, its own answer among it,
        raises.
        """
        entry = _thawed(self._row)
        try:
            with _time_limit(SCORING_SECONDS):
                return self._dataset.score_answer(answer, entry), False
        except (Exception, _TooLong) as failure:  # a scorer trusts what it reads, and this a model wrote
            right = entry["answer"]
            if right is not None:
                self._dataset.score_answer(right, entry)  # raises if the scorer, or the row, is at fault
            said = failure_text(failure)
            _log.warning("The scorer of reasoning_gym:%s failed at %.200r with %s", self._task, answer, said)
            return 0.0, True


class _TooLong(BaseException):
    """The time is over; no `Exception`, which scorers catch."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _TooLong in the body after so long; in a process's main thread only, where environments are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(number: int, frame: Any) -> None:
        raise _TooLong(f"it took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@functools.cache
def _dataset(task: str, config: str) -> Any:
    """The task's dataset, once per process; config: its configuration as JSON."""
    tasks = _tasks()
    if task not in tasks:
        raise ConfigError(
            f"reasoning_gym has no task {shown(task)}.{suggestion(str(task), tasks)} Its {len(tasks)} tasks are in its "
            "gallery: https://github.com/open-thought/reasoning-gym."
        )
    dataset_class, config_class = tasks[task]
    options = json.loads(config)
    known = [field.name for field in dataclasses.fields(config_class)]
    for name in options:
        if name not in known:
            near = suggestion(name, known)
            raise ConfigTypeError(
                f"reasoning_gym:{task} has no option {name}.{near} It has {', '.join(known)}. Correct the name."
            )
    try:
        if task == "composite":
            from reasoning_gym.composite import DatasetSpec

            options["datasets"] = [DatasetSpec(**part) for part in options.get("datasets", [])]
        return dataset_class(config=config_class(**options))
    except Exception as error:  # what the package checks, it checks with assertions
        raise ConfigError(f"reasoning_gym:{task} can't be made of {config}: {failure_text(error)}.") from error


def _tasks() -> dict[str, tuple[Callable, type]]:
    """Dataset class and configuration class by name."""
    try:
        import reasoning_gym.composite  # noqa: F401  (it isn't registered by the package itself)
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            f"reasoning_gym's tasks need the package reasoning-gym, which can't be imported ({error}); install the "
            "extra: pip install -e '.[tasks]' in the checkout."
        ) from error
    return DATASETS


def _row_of(entry: dict[str, Any], task: str) -> dict[str, Any]:
    """An entry as plain values. Raises ConfigError where they would not give it back."""
    row = _frozen(entry)
    if _thawed(row) != entry:
        raise ConfigError(f"An entry of {task} can't be carried by a message: {shown(entry)}. Use another task.")
    return row


def _frozen(value: Any) -> Any:
    if isinstance(value, tuple):
        return {"tuple": [_frozen(item) for item in value]}
    if isinstance(value, list):
        return [_frozen(item) for item in value]
    return {key: _frozen(item) for key, item in value.items()} if isinstance(value, dict) else value


def _thawed(value: Any) -> Any:
    if isinstance(value, list):
        return [_thawed(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"tuple"}:
        return tuple(_thawed(item) for item in value["tuple"])
    return {key: _thawed(item) for key, item in value.items()}
