"""Arguments of the public classes that can't be are refused at once, in one sentence that names the argument."""

from dataclasses import replace

import pytest

import pipeline as rl
from pipeline.tasks.guess import Guess
from workers.model_config import TINY


async def coroutine(trajectories, metrics): ...


def make_engine(model=None, **options):
    return rl.RolloutEngine(rl.Supervisor(device="cpu") if model is None else model, env=Guess, **options)


def make_trainer(**options):
    return rl.AsyncTrainer(
        engine=make_engine(),
        optimizer=rl.Adam(lr=1e-3),
        loss=rl.CISPO(normalize="token"),
        completion=rl.GroupCompletion(mode="wait"),
        groups_per_step=2,
        **options,
    )


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: rl.Supervisor(slots=0), r"slots is 0; .* at least 1 \(or None\)"),
        (lambda: rl.Supervisor(slots="3"), "slots is '3'; .* whole number"),
        (lambda: rl.Supervisor(slots=True), "slots is True; .* whole number"),
        (lambda: rl.Supervisor(chat=5), r"chat is 5; give a chat format"),
        (lambda: rl.Supervisor(model_config={}), r"model_config is {}; give rl.ModelConfig"),
        (
            lambda: rl.Supervisor(chat=rl.TinyChat(["a", "b"]), model_config=replace(TINY, vocab_size=7)),
            "vocab_size of 7, but chat writes ids up to 7; make it at least 8",
        ),
        (lambda: rl.Supervisor(check_weights="yes"), "check_weights is 'yes'; it is a flag"),
        (lambda: make_engine("tiny"), "model is 'tiny'; give an rl.Supervisor"),
        (lambda: make_engine(schedule=0), r"schedule is 0; give rl.Schedule"),
        (lambda: make_engine(budget={}), r"budget is {}; give rl.Budget"),
        (lambda: make_engine(kv_cache=""), r"kv_cache is ''; give rl.KVCache"),
        (lambda: make_engine(env_arguments=[1]), r"env_arguments is \[1\]; give a dict"),
        (lambda: make_engine(env_arguments={1: 2}), r"env_arguments is {1: 2}; give a dict from names"),
        (lambda: make_engine(temprature=1.0), "RolloutEngine has no option temprature. Did you mean temperature?"),
        (lambda: make_trainer(group_sise=4), "AsyncTrainer has no option group_sise. Did you mean group_size?"),
        (lambda: make_trainer(validate_batch=coroutine), "validate_batch is .*; give a plain function"),
        (lambda: rl.run(make_trainer(), [{"number": 1}], 1, on_step=coroutine), "on_step is .*; give a plain function"),
        (lambda: rl.run(make_trainer(), [{"number": 1}], 10**400), "steps is 1000.*at most 2,147,483,647"),
        (lambda: make_trainer(run_dir=5), "run_dir is 5; name a directory"),
        (lambda: make_trainer(run_dir=""), "run_dir is ''; name a directory"),
        (lambda: make_trainer(run_dir="a\0b"), "run_dir is .*; name a directory"),
        (lambda: rl.TinyChat("abc"), "vocabulary is 'abc'. It is a list of words"),
        (lambda: rl.TinyChat(["a b"]), r"vocabulary is \['a b'\]. .* without white space"),
        (lambda: rl.TinyChat([5]), r"vocabulary is \[5\]."),
        (lambda: rl.TerseChat(["a"], ["b"]), "stop_words has 'b', which is not among its words"),
        (lambda: rl.TerseChat(["a"], ["a"], cut_word="b"), "cut_word has 'b', which is not among its words"),
    ],
)
def test_argument_that_cannot_be_is_refused_by_its_name(make, found):
    with pytest.raises(rl.HeadwayError, match=found) as error:
        make()
    assert isinstance(error.value, ValueError | TypeError) and "\n" not in str(error.value)
