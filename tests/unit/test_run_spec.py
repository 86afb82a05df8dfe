"""What a run's processes are told: a context that every sampler can hold, enough slots."""

import re
from dataclasses import replace

import pytest

import pipeline as rl
from pipeline.memory import fit
from pipeline.memory.make_spec import make_spec
from pipeline.processes.worker.run_blocks import RunBlocks
from pipeline.tasks import guess
from workers.model_config import TINY, ModelConfig
from workers.rope_scaling import RopeScaling


def spec(model=None, *, budget=None, concurrency=64, max_staleness=2, evaluates=False):
    model = model or rl.Supervisor(device="cpu")
    engine = rl.RolloutEngine(
        model, env=guess.Guess, schedule=rl.Schedule(concurrency=concurrency), budget=budget or rl.Budget()
    )
    trainer = rl.AsyncTrainer(
        engine=engine,
        loss=rl.CISPO(normalize="token"),
        completion=rl.GroupCompletion(mode="wait"),
        optimizer=rl.Adam(lr=1e-3),
        groups_per_step=2,
        group_size=2,
        max_staleness=max_staleness,
    )
    return make_spec(model, trainer.config, evaluates=evaluates)


def test_default_context_is_what_the_model_has():
    made = spec()
    assert made.max_context_tokens == TINY.max_positions == 1024
    assert made.kv_tokens == 64 * 1024 and made.reply_tokens == 1024


def test_context_of_the_users_own_is_kept():
    made = spec(budget=rl.Budget(max_context_tokens=128))
    assert (made.max_context_tokens, made.kv_tokens, made.reply_tokens) == (128, 64 * 128, 128)


def test_processes_are_told_of_no_more_positions_than_a_context_can_have():
    """A model of 131,072 positions would else fill 128 MiB of rotations in each process that trains on 128 tokens."""
    chat = rl.Supervisor(device="cpu").chat
    scaling = RopeScaling(kind="yarn", factor=4.0, original_max_positions=32768)
    config = replace(TINY, vocab_size=chat.vocab_size, max_positions=131072, rope=scaling)
    made = spec(rl.Supervisor(device="cpu", model_config=config), budget=rl.Budget(max_context_tokens=128))
    assert made.model == config
    blocks = RunBlocks(made, run_id=1)
    try:
        for told in (blocks.learner_config(), blocks.sampler_config(0, {})):
            assert ModelConfig.from_fields(told["model"]) == replace(config, max_positions=128)
    finally:
        blocks.close()


def test_queues_go_with_their_run_whoever_still_knows_their_ends():
    """A run's objects know one another, so they stay until garbage is collected: the memory must not."""

    def rings():
        with open("/proc/self/maps", encoding="utf-8") as maps:
            return [line for line in maps if re.search("headway-(batches|requests|replies)", line)]

    before = len(rings())
    blocks = RunBlocks(spec(), run_id=1)
    ends = [blocks.learner_queue()[0], *blocks.sampler_queues(0)[:2]]
    assert len(rings()) == before + len(ends)
    blocks.close()
    assert len(rings()) == before


def test_context_beyond_the_positions_is_refused():
    assert spec(budget=rl.Budget(max_context_tokens=1024)).max_context_tokens == 1024
    with pytest.raises(
        rl.ConfigError, match=r"max_context_tokens is 1025, but the model has 1024 positions.*most 1024"
    ):
        spec(budget=rl.Budget(max_context_tokens=1025))


def test_context_beyond_the_kv_cache_is_refused_and_the_default_is_cut_to_it(monkeypatch):
    chat = rl.Supervisor(device="cpu").chat
    config = replace(TINY, vocab_size=chat.vocab_size, max_positions=4096)
    monkeypatch.setattr(fit, "CPU_KV_BYTES", 2000 * 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4)
    model = rl.Supervisor(device="cpu", model_config=config)
    assert spec(model).max_context_tokens == spec(model).kv_tokens == 2000
    with pytest.raises(rl.ConfigError, match="room for 2000 tokens; use at most 2000"):
        spec(model, budget=rl.Budget(max_context_tokens=2001))


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_slots_are_those_of_the_bound_one_to_spare_and_one_for_an_evaluation(max_staleness):
    model = rl.Supervisor(device="cpu")
    assert spec(model, max_staleness=max_staleness).num_slots == max_staleness + 2
    assert model.num_slots(max_staleness, evaluates=True) == max_staleness + 3


@pytest.mark.parametrize("max_staleness, least", [(0, 2), (1, 2), (2, 3)])
def test_too_few_slots_are_refused(max_staleness, least):
    assert spec(rl.Supervisor(device="cpu", slots=least), max_staleness=max_staleness).num_slots == least
    with pytest.raises(rl.ConfigError, match=f"slots is {least - 1}, .*; use at least {least}"):
        spec(rl.Supervisor(device="cpu", slots=least - 1), max_staleness=max_staleness)


@pytest.mark.parametrize("max_staleness, least", [(0, 2), (1, 2), (2, 3)])
def test_an_evaluation_has_a_slot_and_kv_beside_those_of_training(max_staleness, least):
    alone, beside = (spec(max_staleness=max_staleness, evaluates=evaluates) for evaluates in (False, True))
    assert (alone.num_slots, beside.num_slots) == (max_staleness + 2, max_staleness + 3)
    assert beside.kv_tokens == (64 + 16) * 1024  # a quarter of the 64 trajectories more
    options = {"max_staleness": max_staleness, "evaluates": True}
    assert spec(rl.Supervisor(device="cpu", slots=least + 1), **options).num_slots == least + 1
    with pytest.raises(rl.ConfigError, match=f"slots is {least}, .*an evaluation holds one more.*at least {least + 1}"):
        spec(rl.Supervisor(device="cpu", slots=least), **options)
