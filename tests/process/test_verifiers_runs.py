"""Training on a real verifiers taskset, in real processes: its episodes ask the run's endpoint for their turns."""

import importlib.util
import os
import re
import signal
import tempfile
from pathlib import Path

import pytest
from babble import Recorder
from running import audit, make_trainer

import pipeline as rl
from bench.small_models import write_small_model
from pipeline.errors import ConfigError
from pipeline.models.model_directory import open_model

INSTALLED = importlib.util.find_spec("verifiers") is not None
needs_verifiers = pytest.mark.skipif(not INSTALLED, reason="verifiers isn't installed (make test installs it)")

TASKSETS = Path(__file__).parent.parent / "data" / "verifiers"
ROWS = [
    {"prompt": f"What is {number} + {number}?", "system_prompt": "Be short.", "number": number} for number in (1, 2)
]


@pytest.fixture(scope="module")
def model(kept, tmp_path_factory):
    with kept.supervisor(device="cpu", check_weights=True) as supervisor:
        source = open_model(write_small_model(tmp_path_factory.mktemp("model"), family="qwen2"))
        supervisor.source, supervisor.chat, supervisor.model_config = source, source.chat, source.config
        yield supervisor


def taskset_trainer(model, run_dir, **options):
    budget = rl.Budget(max_turn_tokens=12, max_context_tokens=512)
    return make_trainer(
        model,
        run_dir,
        env="verifiers:two-questions",
        budget=budget,
        schedule=rl.Schedule(concurrency=4),
        entropy_coefficient=0.01,  # a gradient for a model whose rewards may all be equal
        **({"groups_per_step": 2, "group_size": 2} | options),
    )


@needs_verifiers
def test_a_run_trains_on_the_ids_that_a_tasksets_episodes_sampled(model, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(TASKSETS))
    recorder = Recorder().watch(monkeypatch)
    steps = rl.run(taskset_trainer(model, tmp_path / "run"), ROWS, steps=2)
    assert [step.model_step for step in steps] == [1, 2]
    assert steps[0].metrics["mismatch/max_abs_logprob"] < 1e-4
    assert [step.metrics["rollout/answers"] for step in steps] == [8.0, 8.0]
    assert [step.metrics["endpoint/refused"] for step in steps] == [0, 0]
    for (group, member), trajectory in recorder.trajectories.items():
        number = ROWS[group % 2]["number"]
        said = [(span.kind, model.chat.decode(span.tokens)) for span in trajectory.spans]
        (first, opening), (second, _), (third, between), (fourth, reply) = said
        assert (first, second, third, fourth) == ("prompt", "generated", "framing", "generated")
        assert "Be short." in opening and f"What is {number} + {number}?" in opening
        assert "And half of it?" in between and "Be short." not in between
        sampled = [segment.tokens for segment in recorder.segments[group, member]]
        assert sampled == [span.tokens for span in trajectory.spans if span.kind == "generated"]
        text = re.sub(r"<\|(im_end|endoftext)\|>$", "", reply)  # whichever token has ended it
        assert trajectory.reward == 2.0 * (len(text.strip()) % 2 == 0)
    # Of version 0, whose tokens depend on the seed alone. Rewards that are all equal would agree in any case.
    assert {one.reward for (group, _), one in recorder.trajectories.items() if group < 2} == {0.0, 2.0}
    assert audit(tmp_path / "run") == 0


@needs_verifiers
def test_an_episode_that_fails_stops_the_run_with_its_sentence(model, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(TASKSETS))
    rows = [ROWS[0] | {"number": "seven"}]
    with pytest.raises(rl.HeadwayError, match="QuestionData") as raised:
        rl.run(taskset_trainer(model, tmp_path / "run"), rows * 2, steps=1)
    assert "number" in str(raised.value)


@needs_verifiers
def test_the_supervisors_directory_keeps_nothing_of_episodes(model):
    """The runs before have left their process's directory empty, and it lies where the supervisor removes it."""
    sockets = Path(model._pool._sockets.path)
    assert sockets.parent == Path(tempfile.gettempdir())
    directories = list(sockets.glob("verifiers-*"))
    assert len(directories) == 1 and list(directories[0].iterdir()) == []


@needs_verifiers
@pytest.mark.slow
def test_episodes_of_a_killed_process_are_played_again_in_a_new_one(model, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(TASKSETS))

    def kill(step):
        if step.model_step == 1:
            os.kill(model._run.workers.environments[0].pid, signal.SIGKILL)

    steps = rl.run(taskset_trainer(model, tmp_path / "run"), ROWS, steps=4, on_step=kill)
    assert [step.metrics["rollout/answers"] for step in steps] == [8.0] * 4
    assert sum(step.metrics["recovery/restarts"] for step in steps) == 1
    assert audit(tmp_path / "run") == 0


def test_without_the_package_one_sentence_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "verifiers" else object())
    with pytest.raises(ConfigError) as raised:
        rl.RolloutEngine(rl.Supervisor(device="cpu"), "verifiers:two_questions")
    assert str(raised.value) == (
        "env is 'verifiers:two_questions', but the package verifiers isn't installed; install the extra: pip install "
        "-e '.[verifiers]' in the checkout."
    )


@pytest.mark.parametrize(
    ("env", "arguments", "sentence"),
    [
        ("verifiers:", None, "it names an environment of verifiers, as verifiers:my_tasks"),
        ("verifiers:a", {"taskset": "b"}, "env_arguments names 'taskset' again"),
        ({"a": "verifiers:a"}, None, "can't be part of a mix"),
    ],
)
@needs_verifiers
def test_names_that_say_nothing_are_refused(env, arguments, sentence):
    with pytest.raises(ConfigError, match=sentence):
        rl.RolloutEngine(rl.Supervisor(device="cpu"), env, env_arguments=arguments)
