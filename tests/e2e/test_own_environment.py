"""run.py and headway eval on data, rewards, environments and agents of a user's own, in this process. As a user
starts it: test_random_resumes.py.
"""

import json
import resource
import subprocess
import sys

import pytest
from run_py import ROOT, SMALL, RunFiles

from bench.small_models import write_small_model

FILES = {
    "rewards.py": """
def score(text, row):
    return float(len(text) % 7) + float(row["answer"]) / 100


def down(text, row):
    raise RuntimeError("the service is down")
""",
    "my_envs.py": '''
import pipeline as rl


class Asks(rl.Env):
    """Two turns; the second asks again."""

    def __init__(self, again):
        self._again = again

    @rl.tool
    async def look_up(self, word: str) -> str:
        """Find a word.

        Args:
            word: the word
        """
        return word

    def reset(self, row):
        return row["question"]

    async def on_turn(self, traj):
        return rl.TurnResult(messages=self._again) if traj.num_turns == 1 else None

    def reward(self, traj, row):
        return float(len(traj.text) % 5)
''',
    "mix.toml": """
steps = 3
[[environment]]
env = "my_envs.py:Asks"
arguments = {again = "And?"}
data = "questions.jsonl"
weight = 3
[[environment]]
name = "scored"
reward = "rewards:score"
data = "train.jsonl"
holdout = 0.25
""",
    "my_agent.py": """
from openai import AsyncOpenAI


async def solve(row, base_url, api_key):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": row["prompt"]}]
    answer = await client.chat.completions.create(model="headway", messages=messages, max_tokens=8)
    return float(len(answer.choices[0].message.content or "") % 5)
""",
}
MISSING_FIELD = ROOT / "tests" / "data" / "cases" / "HR07" / "missing_field.jsonl"
QUICK = ("--max-turn-tokens", "8", "--concurrency", "16")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A user's directory: a model, data, and the code above."""
    directory = tmp_path_factory.mktemp("own")
    write_small_model(directory / "model")
    for name, text in FILES.items():
        (directory / name).write_text(text)
    rows = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1), "id": f"row-{n}"} for n in range(12)]
    write_rows(directory / "train.jsonl", rows)
    write_rows(directory / "questions.jsonl", [{"question": f"Name {n} words."} for n in range(5)])
    return directory


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(kept, project, name, *options):
    """The whole run `name` of run.py's options, in this process."""
    arguments = ("run", "--model", "model", *options, *QUICK, *SMALL, "--device", "cpu", "--run-dir", name)
    code, out, err = kept.command(project, *arguments)
    assert (code, err) == (0, ""), out
    run = RunFiles(project / name)
    assert run.events("end")[0]["status"] == "completed"
    return run


def test_a_reward_on_a_file_trains_and_its_held_out_rows_are_measured_again(kept, project):
    own = ("--data", "train.jsonl", "--reward", "rewards.py:score", "--answer-field", "answer", "--holdout", "0.25")
    run = train(kept, project, "scored", *own, "--steps", "2", "--eval-every", "0", "--eval-final-group-size", "2")
    record = run.record()
    assert record["config"]["workload"]["data"] == str(project / "train.jsonl")
    (found,) = record["workload"].values()
    assert (found["train_rows"], found["holdout_rows"]) == (9, 3)
    (evaluation,) = run.lines("eval.jsonl")
    measure = ("eval", "scored", "--device", "cpu", "--eval-group-size", "2", "--run-dir", "again")
    code, out, err = kept.command(project, *measure)
    assert (code, err) == (0, "")
    assert "6 trajectories on 3 held-out rows of rewards.py:score, version 2 of" in out
    (again,) = RunFiles(project / "again").lines("eval.jsonl")
    assert again["reward_mean"] == evaluation["reward_mean"]  # the same rows, the same weights, the same noise


def test_a_reward_that_always_fails_is_no_end_of_data(kept, project):
    """HR40: tried three times, then the run fails with its error and says so."""
    own = ("--data", "train.jsonl", "--reward", "rewards.py:down", "--steps", "5", "--run-dir", "down")
    code, out, err = kept.command(project, "run", "--model", "model", *own, *QUICK, *SMALL, "--device", "cpu")
    assert code == 1 and "RuntimeError: the service is down" in err and "at its attempt 3 (max_retries = 2)" in err
    run = RunFiles(project / "down")
    assert run.events("end")[0]["status"] == "failed" and len(run.events("retry")) >= 2 and "Traceback" not in out + err


def test_environments_are_mixed_by_weight(kept, project):
    run = train(kept, project, "mixed", "--config", "mix.toml", "--seed", "1", "--eval-every", "0", "--eval-rows", "2")
    assert {name: found["train_rows"] for name, found in run.record()["workload"].items()} == {"Asks": 5, "scored": 9}
    rows = [event["row"] for event in run.events("admitted")]
    of_asks = sum(row < 5 for row in rows)
    assert abs(of_asks - 0.75 * len(rows)) <= 1
    assert run.lines("eval.jsonl")[-1]["rows"] == 2


def test_an_agent_of_ones_own_trains(kept, project):
    run = train(kept, project, "agent", "--data", "train.jsonl", "--agent", "my_agent.py:solve", "--steps", "1")
    assert run.lines("metrics.jsonl")[0]["endpoint/requests"] >= 4


def test_rows_without_prompt_or_answer_are_refused_before_any_model_is_opened(project):
    """HR07: even a model that is none is not looked at first."""
    (project / "broken").mkdir()
    (project / "broken" / "config.json").write_text("{")
    own = ("--data", str(MISSING_FIELD), "--reward", "rewards.py:score", "--answer-field", "answer")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, ROOT / "run.py", "--model", "broken", *own, "--run-dir", "bad"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    for line in ("missing_field.jsonl", "line 2 has no field 'prompt'", "line 3 has an empty prompt", "line 4 has no"):
        assert line in done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3.0  # not by the clock: CPU seconds
    assert not (project / "bad").exists()
