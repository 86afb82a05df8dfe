"""From the user's configs to the plain values that a run's schedule and its processes are told."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipeline.config import Budget
from pipeline.data.mixed_rows import MixedRows, order_of
from pipeline.errors import ConfigError
from pipeline.losses import loss_record
from pipeline.memory.activations import MAX_MICRO_BATCH_TOKENS, MAX_SAMPLER_BATCH_TOKENS
from pipeline.memory.estimate import refuse_too_large, run_parts
from pipeline.memory.fit import fit_kv_cache, fit_passes
from pipeline.run_spec import RunSpec
from pipeline.schedule import ScheduleRules
from pipeline.supervisor import Supervisor
from pipeline.trainer_config import EngineConfig, TrainerConfig

MAX_CHARS_PER_TOKEN = 256  # no token of a common vocabulary is longer: a text cut there still has too many tokens


def make_rules(config: TrainerConfig, *, rows: Sequence[dict[str, Any]], steps: int) -> ScheduleRules:
    """For `steps` batches of `rows`, which `config.check_run` has let through. Raises ConfigError for a mix that would
    have to end.
    """
    schedule = config.engine.schedule
    if isinstance(rows, MixedRows) and not config.repeat_dataset:
        raise ConfigError(
            "AsyncTrainer.repeat_dataset is False, but the rows are a mix, whose parts go round on their own and do "
            "not end together; set it to True, or train on one dataset."
        )
    return ScheduleRules(
        groups_per_step=config.groups_per_step,
        group_size=config.group_size,
        max_staleness=config.max_staleness,
        steps=steps,
        num_rows=len(rows),
        row_order=order_of(rows, seed=config.engine.seed if config.shuffle else None),
        stale_policy=config.stale_policy,
        admit_ahead=schedule.admit_ahead,
        oversample_factor=schedule.oversample_factor,
        batch_order=config.batch_order,
        repeat_dataset=config.repeat_dataset,
        carry_over=config.completion.on_stragglers == "carry_over",
    )


def make_spec(model: Supervisor, config: TrainerConfig, *, evaluates: bool = False) -> RunSpec:
    """Of a training run. evaluates: an evaluation may run beside it. Raises ConfigError when budget or slots can't be
    served, or memory does not suffice.
    """
    schedule, optimizer = config.engine.schedule, config.optimizer
    return _fitted_spec(
        model,
        config.engine,
        concurrency=schedule.concurrency + (schedule.evaluation_concurrency if evaluates else 0),
        max_staleness=config.max_staleness,
        stale_policy=config.stale_policy,
        groups_per_step=config.groups_per_step,
        group_size=config.group_size,
        num_slots=model.num_slots(config.max_staleness, evaluates=evaluates),
        optimizer={
            "beta1": optimizer.beta1,
            "beta2": optimizer.beta2,
            "eps": optimizer.eps,
            "weight_decay": optimizer.weight_decay,
            "grad_clip_norm": optimizer.grad_clip_norm,
        },
        loss=loss_record(config.loss),
        kl_coefficient=config.kl_coefficient,
        entropy_coefficient=config.entropy_coefficient,
    )


def make_evaluation_spec(model: Supervisor, engine: EngineConfig, *, rows: int, group_size: int) -> RunSpec:
    """Of an evaluation alone: the learner publishes the first weights, into the only slot."""
    return _fitted_spec(
        model,
        engine,
        trains=False,
        concurrency=engine.schedule.concurrency,
        max_staleness=0,
        stale_policy="wait",
        groups_per_step=rows,
        group_size=group_size,
        num_slots=1,
        optimizer={},
        loss={},
    )


def _fitted_spec(model: Supervisor, engine: EngineConfig, *, concurrency: int, **training: Any) -> RunSpec:
    """With all sizes that the machine allows. concurrency: most trajectories at once; training: RunSpec's other
    fields.
    """
    budget = engine.budget
    positions = model.model_config.max_positions
    context = min(budget.max_context_tokens, positions)
    learner_device, sampler_devices = model.devices()
    learner_threads, sampler_threads = model.threads()
    spec = RunSpec(
        model=model.model_config,
        seed=engine.seed,
        weights=model.source.weights,
        num_samplers=model.num_samplers,
        sampling={
            "temperature": engine.temperature,
            "top_p": engine.top_p,
            "top_k": max(0, engine.top_k),  # -1 also means off
            "stop_ids": list(model.chat.stop_ids),
        },
        dtype=model.dtype,
        concurrency=concurrency,
        max_generated_tokens=budget.max_generated_tokens,
        max_context_tokens=context,
        kv_tokens=concurrency * context,  # all that can run at once
        reply_tokens=min(budget.segment_tokens, budget.max_generated_tokens, context),
        max_batch_tokens=MAX_SAMPLER_BATCH_TOKENS,
        micro_batch_tokens=MAX_MICRO_BATCH_TOKENS,
        sampler_threads=sampler_threads,
        learner_threads=learner_threads,
        learner_device=learner_device,
        sampler_devices=sampler_devices,
        environment_timeout=engine.environment_timeout,
        environment_processes=engine.environment_processes,
        max_tool_chars=budget.tool_output_tokens * MAX_CHARS_PER_TOKEN,
        worker_timeout=model.worker_timeout,
        max_restarts=model.max_restarts,
        check_weights=model.check_weights,
        **training,
    )
    memory = model.memory()
    spec = fit_kv_cache(fit_passes(spec, memory), memory, model.kv_gib)
    context = _context_tokens(budget, positions, spec.kv_tokens)
    if budget.final_answer_reserve >= context:
        raise ConfigError(
            f"Budget.final_answer_reserve is {budget.final_answer_reserve}, but a trajectory has only {context} tokens "
            "here; the reserve is a part of them: lower it."
        )
    spec = replace(spec, max_context_tokens=context, reply_tokens=min(spec.reply_tokens, context))
    refuse_too_large(run_parts(spec), {device: found and found.free for device, found in memory.items()})
    return spec


def _context_tokens(budget: Budget, positions: int, kv_tokens: int) -> int:
    """Largest context of a trajectory, so that no request can ask for more than a sampler has.

    The default of Budget.max_context_tokens means as many as there are; a number of the user's own is kept or refused.
    """
    wanted, served = budget.max_context_tokens, min(positions, kv_tokens)
    if wanted > served and wanted != Budget().max_context_tokens:
        raise ConfigError(
            f"Budget.max_context_tokens is {wanted}, but the model has {positions} positions and a sampler's KV cache "
            f"room for {kv_tokens} tokens; use at most {served}, or leave it out to get that."
        )
    return min(wanted, served)
