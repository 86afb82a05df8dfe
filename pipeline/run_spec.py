"""From the user's configs to the plain values that the processes of a run are told."""

from pipeline.errors import ConfigError
from pipeline.run_blocks import RunSpec
from pipeline.supervisor import Supervisor
from pipeline.trainer_config import TrainerConfig

MAX_BATCH_TOKENS = 4096  # tokens of one forward pass of a sampler; longer prefills go in chunks
MICRO_BATCH_TOKENS = 8192  # padded tokens that go through the learner at once


def make_spec(model: Supervisor, config: TrainerConfig) -> RunSpec:
    """Raises ConfigError when the budget does not fit the model."""
    engine = config.engine
    budget = engine.budget
    positions = model.model_config.max_positions
    context = min(budget.max_context_tokens, positions)
    if budget.max_context_tokens > positions and budget.max_generated_tokens >= positions:
        raise ConfigError(
            f"Budget allows {budget.max_context_tokens} tokens of context and {budget.max_generated_tokens} "
            f"generated ones, but the model has {positions} positions; lower Budget.max_context_tokens to at most that."
        )
    learner_device, sampler_devices = model.devices()
    learner_threads, sampler_threads = model.threads()
    optimizer = config.optimizer
    return RunSpec(
        model=model.model_config,
        seed=engine.seed,
        max_staleness=config.max_staleness,
        groups_per_step=config.groups_per_step,
        num_slots=model.num_slots(config.max_staleness),
        num_samplers=model.num_samplers,
        sampling={
            "temperature": engine.temperature,
            "top_p": engine.top_p,
            "top_k": max(0, engine.top_k),  # -1 also means off
            "stop_ids": list(model.chat.stop_ids),
        },
        optimizer={
            "beta1": optimizer.beta1,
            "beta2": optimizer.beta2,
            "eps": optimizer.eps,
            "weight_decay": optimizer.weight_decay,
            "grad_clip_norm": optimizer.grad_clip_norm,
        },
        loss={"name": type(config.loss).__name__, "eps_max": config.loss.eps_max},
        kv_tokens=model.kv_tokens(engine.schedule.concurrency, context),
        reply_tokens=min(budget.segment_tokens, budget.max_generated_tokens),
        max_batch_tokens=MAX_BATCH_TOKENS,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        sampler_threads=sampler_threads,
        learner_threads=learner_threads,
        learner_device=learner_device,
        sampler_devices=sampler_devices,
        environment_timeout=engine.environment_timeout,
        check_weights=model.check_weights,
    )
