"""What a run needs of memory, part by part, and the refusal when that is more than there is."""

from dataclasses import replace

import pytest

import pipeline as rl
from pipeline.memory.activations import (
    CPU_BUDGET_BYTES,
    MAX_MICRO_BATCH_TOKENS,
    PassCost,
    learner_cost,
    micro_batch_tokens,
    sampler_batch_tokens,
    sampler_cost,
)
from pipeline.memory.estimate import (
    CUDA_CONTEXT_BYTES,
    GIB,
    SUPERVISOR_BYTES,
    WORKER_BYTES,
    Part,
    kv_token_bytes,
    learner_pass_cost,
    refuse_too_large,
    run_parts,
    sampler_pass_cost,
    totals,
)
from pipeline.memory.fit import fit_kv_cache, fit_passes
from pipeline.run_spec import RunSpec
from workers.machine.device_memory import DeviceMemory
from workers.model_config import TINY, ModelConfig, layout

MIB = 1 << 20
SMALL = ModelConfig(
    vocab_size=100,
    hidden_size=8,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=16,
    max_positions=64,
)
# 100 x 8 embeddings; a layer: 16 x 8 queries, keys, values, 8 x 8 out, 32 x 8 and 8 x 16 of the MLP, two norms; a norm.
NUM_WEIGHTS = 800 + 3 * (128 + 64 + 256 + 128 + 16) + 8
SMOLLM2_135M = ModelConfig(
    vocab_size=49152,
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    max_positions=8192,
)
LLAMA_8B = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    max_positions=131072,
    tie_embeddings=False,
)


def make_spec(**changes) -> RunSpec:
    values = {
        "model": SMALL,
        "seed": 0,
        "max_staleness": 2,
        "stale_policy": "wait",
        "groups_per_step": 4,
        "group_size": 8,
        "num_slots": 4,
        "num_samplers": 1,
        "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_ids": []},
        "optimizer": {},
        "loss": {},
        "concurrency": 16,
        "max_generated_tokens": 10,
        "max_context_tokens": 64,
        "kv_tokens": 1000,
        "reply_tokens": 10,
        "max_batch_tokens": 4096,
        "micro_batch_tokens": 32,
        "sampler_threads": 1,
        "learner_threads": 1,
    }
    return RunSpec(**(values | changes))


def sizes(spec: RunSpec) -> dict[str, int]:
    return {part.what: part.num_bytes for part in run_parts(spec)}


def test_every_part_of_a_small_run_is_counted_exactly():
    assert layout(SMALL).num_elements == NUM_WEIGHTS
    # Queries 8, keys 4: 4 x 8 residuals and norms, 3 x 8 + 2 x 4, 4 x 16 of the MLP; two layers' more in the backward
    # pass. Logits twice.
    learner = PassCost((3 + 2) * 4 * (32 + 24 + 8 + 64), 100 * 4 * 2)
    sampler = PassCost(4 * (32 + 3 * 16 + 64), 100 * 4 * 4)
    assert learner_pass_cost(make_spec()) == learner and sampler_pass_cost(make_spec()) == sampler
    assert kv_token_bytes(SMALL, "float32") == 2 * 3 * 4 * 4
    assert sizes(make_spec()) == {
        "the learner's process": WORKER_BYTES,
        "the learner's float32 weights": 4 * NUM_WEIGHTS,
        "gradients": 4 * NUM_WEIGHTS,
        "Adam's two averages": 8 * NUM_WEIGHTS,
        # A row of 64 tokens with 10 predictions is larger than 32 tokens that all are predictions.
        "activations of the learner": 64 * learner.token_bytes + 10 * learner.prediction_bytes + 4 * 800,
        "4 weight slots": 4 * 4 * NUM_WEIGHTS,
        "the supervisor and environments": SUPERVISOR_BYTES,
        "queues": (8 + 4 + 8) * MIB,
        "the version ledger": make_spec().ledger_shape.num_bytes,
        "trajectories on their way": 3 * 4 * 8 * (4096 + 24 * 64),
        "the samplers' processes": WORKER_BYTES,
        "KV caches": 1000 * 96,
        "attention windows": 1250 * 96,
        "tables of the KV caches": 1000 * 32,
        # All 16 trajectories' contexts, of which each is a prediction at its end.
        "activations of the samplers": 16 * 64 * sampler.token_bytes + 16 * sampler.prediction_bytes,
    }


def test_a_micro_batch_of_many_rows_counts_as_one_where_all_is_predicted():
    learner = PassCost((3 + 2) * 4 * (32 + 24 + 8 + 64), 100 * 4 * 2)
    for cut, tokens in ((1000, 1000), (10**6, 4 * 8 * 64)):  # no more than the rows of a batch
        found = sizes(make_spec(micro_batch_tokens=cut))["activations of the learner"]
        assert found == tokens * (learner.token_bytes + learner.prediction_bytes) + 4 * 800


def test_a_samplers_pass_is_no_larger_than_it_is_cut():
    cost = PassCost(4 * (32 + 3 * 16 + 64), 100 * 4 * 4)
    found = sizes(make_spec(max_batch_tokens=100))["activations of the samplers"]
    assert found == 100 * cost.token_bytes + 16 * cost.prediction_bytes


def test_weights_pass_through_the_host_tensor_by_tensor():
    assert sizes(make_spec(learner_device="cuda:0"))["the weights while they are loaded"] == 4 * 800


def test_each_sampler_has_queues_of_its_own():
    assert sizes(make_spec(num_samplers=3, sampler_devices=["cpu"] * 3))["queues"] == (8 + 3 * (4 + 8)) * MIB


def test_a_rounded_pass_keeps_norms_in_float32_and_logits_twice():
    rounded = make_spec(dtype="bfloat16")
    assert learner_pass_cost(rounded) == PassCost((3 + 2) * (2 * (32 + 24 + 8 + 64) + 4 * 32), 100 * 4 * 3)
    assert sampler_pass_cost(rounded) == PassCost(2 * (32 + 3 * 16 + 64), 100 * 4 * 5)


def test_rounding_adds_copies_and_halves_slots_and_caches():
    full, half = sizes(make_spec()), sizes(make_spec(dtype="bfloat16"))
    assert half["bfloat16 copies of weights and gradients"] == 4 * NUM_WEIGHTS
    for what in ("4 weight slots", "KV caches", "attention windows"):
        assert 2 * half[what] == full[what]
    for what in ("the learner's float32 weights", "gradients", "Adam's two averages"):
        assert half[what] == full[what]


def test_what_costs_more_is_counted_when_it_is_on():
    plain = learner_pass_cost(make_spec()).prediction_bytes
    logits = 100 * 4
    assert sizes(make_spec(kl_coefficient=0.1))["the KL reference"] == 4 * NUM_WEIGHTS
    assert learner_pass_cost(make_spec(kl_coefficient=0.1)).prediction_bytes == plain + logits
    assert learner_pass_cost(make_spec(entropy_coefficient=0.1)).prediction_bytes == plain + 4 * logits
    narrowing = {"temperature": 0.5, "top_p": 0.9, "top_k": 0, "stop_ids": []}
    assert learner_pass_cost(make_spec(sampling=narrowing)).prediction_bytes == plain + logits
    assert sampler_pass_cost(make_spec(sampling=narrowing)).prediction_bytes == (4 + 1 + 6) * logits
    few = {"temperature": 1.0, "top_p": 1.0, "top_k": 5, "stop_ids": []}
    assert sampler_pass_cost(make_spec(sampling=few)).prediction_bytes == (4 + 6) * logits


def test_a_learner_that_only_loads_has_neither_gradients_nor_optimizer():
    found = sizes(make_spec(trains=False, num_slots=1))
    assert "gradients" not in found and "Adam's two averages" not in found
    assert found["the learner's float32 weights"] == 4 * NUM_WEIGHTS == found["1 weight slots"]


def test_ids_that_do_not_exist_have_no_logits():
    padded = replace(SMALL, vocab_size=200, num_token_ids=100)
    assert learner_pass_cost(make_spec(model=padded)) == learner_pass_cost(make_spec())


def test_learner_and_sampler_on_one_gpu_are_counted_together():
    one = totals(run_parts(make_spec(learner_device="cuda:0", sampler_devices=["cuda:0"])))
    host = totals(run_parts(make_spec()))["cpu"]
    assert set(one) == {"cpu", "cuda:0"}
    both = make_spec(num_samplers=2, learner_device="cuda:0", sampler_devices=["cuda:1", "cuda:2"])
    apart = totals(run_parts(both))
    sampler = apart["cuda:1"]
    assert sampler == apart["cuda:2"]
    # Apart, a sampler copies the slots that it uses in place on the learner's own GPU.
    assert apart["cuda:0"] + sampler - 4 * 4 * NUM_WEIGHTS == one["cuda:0"] > 2 * CUDA_CONTEXT_BYTES
    assert host > one["cpu"] - 2 * (1 << 30)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", [SMOLLM2_135M, LLAMA_8B], ids=["135M", "8B"])
def test_passes_keep_to_their_budget_whatever_the_model(model, dtype):
    learner = learner_cost(model, dtype, temperature=1.0, has_reference=False, has_entropy=False)
    sampler = sampler_cost(model, dtype, temperature=1.0, narrows=False)
    tokens = micro_batch_tokens(learner, CPU_BUDGET_BYTES)
    assert 100 < tokens < MAX_MICRO_BATCH_TOKENS
    assert learner.num_bytes(tokens, tokens) <= CPU_BUDGET_BYTES < learner.num_bytes(tokens + 1, tokens + 1)
    for most in (1, 64, 100_000):
        batch = sampler_batch_tokens(sampler, CPU_BUDGET_BYTES, most)
        assert 100 < batch <= 4096
        assert sampler.num_bytes(batch, min(batch, most)) <= CPU_BUDGET_BYTES


def test_a_tiny_models_passes_are_as_large_as_they_help():
    found = fit_passes(make_spec(model=TINY), {"cpu": None})
    assert (found.micro_batch_tokens, found.max_batch_tokens) == (8192, 4096)
    huge = PassCost(1 << 40, 1 << 40)
    assert micro_batch_tokens(huge, CPU_BUDGET_BYTES) == sampler_batch_tokens(huge, CPU_BUDGET_BYTES, 8) == 1


def test_kv_cache_on_the_cpu_is_what_can_run_within_one_gib():
    wanted = make_spec(model=SMOLLM2_135M, kv_tokens=64 * 2048)
    token = 2 * 30 * 3 * 64 * 4
    assert fit_kv_cache(wanted, {"cpu": None}, None).kv_tokens == GIB // token < wanted.kv_tokens
    assert fit_kv_cache(replace(wanted, kv_tokens=5000), {"cpu": None}, None).kv_tokens == 5000
    assert fit_kv_cache(wanted, {"cpu": None}, 2.5).kv_tokens == 5 * GIB // 2 // token
    assert fit_kv_cache(wanted, {"cpu": None}, 1e-9).kv_tokens == 1


def test_kv_cache_on_a_gpu_is_most_of_what_all_else_leaves():
    devices = {"learner_device": "cuda:0", "sampler_devices": ["cuda:0"], "dtype": "bfloat16"}
    spec = make_spec(model=SMOLLM2_135M, kv_tokens=10**9, **devices)
    memory = {"cpu": None, "cuda:0": DeviceMemory(free=60 * GIB, total=80 * GIB)}
    found = fit_kv_cache(spec, memory, None)
    others = totals(run_parts(replace(spec, kv_tokens=0)))["cuda:0"]
    taken = totals(run_parts(found))["cuda:0"]
    assert others + 0.79 * (60 * GIB - others) < taken < others + 0.81 * (60 * GIB - others)
    full = {"cpu": None, "cuda:0": DeviceMemory(free=GIB, total=80 * GIB)}
    least = fit_kv_cache(spec, full, None)
    assert least.kv_tokens == 1024
    with pytest.raises(rl.ConfigError, match="GiB of cuda:0, where 1.0 GiB are free"):
        refuse_too_large(run_parts(least), {"cuda:0": GIB})


def test_the_smallest_of_several_gpus_says_what_fits():
    devices = {"num_samplers": 2, "learner_device": "cuda:0", "sampler_devices": ["cuda:1", "cuda:2"]}
    spec = make_spec(model=LLAMA_8B, kv_tokens=10**9, dtype="bfloat16", **devices)
    large, small = DeviceMemory(free=140 * GIB, total=144 * GIB), DeviceMemory(free=6 * GIB, total=6 * GIB)
    for fit in (lambda memory: fit_kv_cache(spec, memory, None), lambda memory: fit_passes(spec, memory)):
        both = fit({"cpu": None, "cuda:0": large, "cuda:1": small, "cuda:2": small})
        one = fit({"cpu": None, "cuda:0": large, "cuda:1": large, "cuda:2": small})
        assert one == both != fit({"cpu": None, "cuda:0": large, "cuda:1": large, "cuda:2": large})


def test_refusal_names_the_numbers_the_largest_first_and_what_to_lower():
    parts = [
        Part("cpu", "queues", MIB, "segment_tokens"),
        Part("cpu", "4 weight slots", 8 * GIB, "max_staleness or slots"),
        Part("cpu", "KV caches", 12 * GIB, "kv_gib"),
        Part("cpu", "gradients", 5 * GIB),
        Part("cpu", "KV caches", 3 * GIB, "kv_gib"),
    ]
    with pytest.raises(rl.ConfigError) as error:
        refuse_too_large(parts, {"cpu": 16 * GIB})
    assert str(error.value) == (
        "This run needs 28.0 GiB of this machine's memory, where 16.0 GiB are free: KV caches 15.0 GiB, 4 weight slots "
        "8.0 GiB, gradients 5.0 GiB. Lower kv_gib, or max_staleness or slots, or use a larger machine."
    )
    refuse_too_large(parts, {"cpu": 29 * GIB})
    refuse_too_large(parts, {"cpu": None})
    with pytest.raises(rl.ConfigError, match="Use a smaller model, or use a larger machine"):
        refuse_too_large([Part("cpu", "gradients", GIB)], {"cpu": 0})


@pytest.mark.parametrize(
    ("supervisor", "trainer", "part"),
    [
        ({}, {"max_staleness": 2**31 - 1}, "2,147,483,649 weight slots"),
        ({}, {"groups_per_step": 2**31 - 1}, "trajectories on their way"),
        ({}, {"group_size": 2**31 - 1}, "trajectories on their way"),
        ({"slots": 2**31 - 1}, {}, "2,147,483,647 weight slots"),
        ({"kv_gib": 1e6}, {}, "KV caches 1,000,000 GiB"),
    ],
)
def test_absurd_sizes_are_refused_before_anything_starts(supervisor, trainer, part, tmp_path):
    model = rl.Supervisor(device="cpu", **supervisor)
    made = rl.AsyncTrainer(
        engine=rl.RolloutEngine(model, env="pipeline.tasks.guess:Guess"),
        optimizer=rl.Adam(lr=1e-3),
        loss=rl.CISPO(normalize="token"),
        completion=rl.GroupCompletion(mode="wait"),
        run_dir=tmp_path / "run",
        **({"groups_per_step": 2, "group_size": 2} | trainer),
    )
    with pytest.raises(rl.ConfigError, match="This run needs [0-9,.]+ GiB of this machine's memory") as error:
        rl.run(made, [{"number": 1, "seed": 0}], steps=1)
    assert part in str(error.value)
    assert not (tmp_path / "run").exists() and model._pool.handles == []
