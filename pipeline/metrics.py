"""Every key of `step.metrics` with its unit and its meaning: docs/metrics.md is written from here.

`<…>` in a key stands for what varies: a cause, a process, an environment's own name.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One key, or a family of keys with one meaning. `when`: where it is absent otherwise; empty: in every step."""

    key: str
    unit: str
    meaning: str
    when: str = ""


UPDATED = "after an update"
RATIO = "after an update, with a loss that forms a ratio (all but PolicyGradient)"

METRICS: tuple[Metric, ...] = (
    # The batch that was trained.
    Metric("reward/mean", "reward", "mean of the raw rewards of all trajectories of the batch"),
    Metric("reward/std", "reward", "their deviation (population)"),
    Metric("reward/zero_variance_group_frac", "share", "groups whose advantages are all zero: they give no gradient"),
    Metric("staleness/span_age_p50", "updates", "median policy age of the batch's segments; 0 of none"),
    Metric("staleness/span_age_p99", "updates", "99th percentile of it, interpolated; of one segment, its age"),
    Metric("staleness/span_age_max", "updates", "greatest of it"),
    Metric(
        "staleness/trained_age_max",
        "updates",
        "greatest age that the learner saw in what it trained; masked segments don't count",
        UPDATED,
    ),
    Metric("staleness/frac_masked", "share", "generated tokens of the batch that mask_span masked for their age"),
    Metric("length/generated_p50", "tokens", "median of the tokens that a trajectory generated; 0 of none"),
    Metric("length/generated_p99", "tokens", "99th percentile of them, linearly interpolated"),
    Metric(
        "truncated/<cause>",
        "share",
        "trajectories of the batch that ended so: turns, generated_tokens, context, final_answer (it asked for another "
        "turn after its final answer), empty_sample, group_deadline, trajectory_timeout",
        "for causes that occur",
    ),
    Metric("rollout/<name>", "the environment's", "an environment's own metric, summed over the batch", "where given"),
    Metric("mix/<environment>/groups", "groups", "those of the batch that were that environment's", "in a mix"),
    Metric(
        "mix/<environment>/reward_mean",
        "reward",
        "mean of the raw rewards of its trajectories in the batch",
        "in a mix, where it has any",
    ),
    Metric("groups/mean_wait_seconds", "s", "mean time from a group's admission until it was ready"),
    Metric("groups/deadline_frac", "share", "groups of the batch that a deadline closed (`GroupCompletion`)"),
    Metric("train/generated_tokens", "tokens", "generated tokens of the batch, masked and dropped ones too"),
    Metric("train/active_tokens", "tokens", "those the loss is normalised over: neither dropped nor masked"),
    Metric("train/active_sequences", "trajectories", "those with an active token"),
    Metric("train/active_groups", "groups", "those with an active token"),
    Metric(
        "train/datums",
        "rows",
        "rows sent to the learner: those with a non-zero weight, or with any active token when the loss has terms "
        "without advantage",
    ),
    Metric(
        "train/tokens",
        "tokens",
        "tokens of the rows that the learner read, prompts included: each row's own, though the prompt of a group goes "
        "through the model once",
    ),
    Metric("train/tokens_per_second", "tokens/s", "train/tokens over train/batch_seconds"),
    Metric("train/updated", "0 or 1", "0 for a batch without gradient: the version then stays"),
    Metric(
        "train/backward_chunks",
        "passes",
        "forward/backward passes of the batch; more than one only with synchronous overlap",
    ),
    Metric("train/gradient_scale", "factor", "put on the summed gradients: what the weights of chunks leave out"),
    Metric("train/lr", "rate", "learning rate of this batch"),
    Metric("train/loss", "loss", "as `normalize` averages it, KL and entropy terms included", UPDATED),
    Metric("train/grad_norm", "norm", "of the whole gradient, before clipping", UPDATED),
    Metric("train/batch_seconds", "s", "from admission to the new weights, waiting included"),
    Metric("train/seconds", "s", "from the batch's selection to them; from admission with synchronous overlap"),
    Metric("train/forward_seconds", "s", "the learner's forward passes", UPDATED),
    Metric("train/backward_seconds", "s", "its backward passes", UPDATED),
    Metric("train/optimizer_seconds", "s", "scaling, clipping and the step", UPDATED),
    Metric("train/publish_seconds", "s", "the new weights' copy into their slot", UPDATED),
    Metric(
        "train/kl",
        "nats",
        "mean estimate (k3) of KL(learner ‖ first weights) over active tokens",
        "after an update, with a kl_coefficient",
    ),
    Metric(
        "train/entropy",
        "nats",
        "mean entropy of the next-token distribution at the sampling temperature, over active tokens",
        "after an update, with an entropy_coefficient",
    ),
    Metric(
        "importance/ratio_mean",
        "ratio",
        "learner's over behaviour probability, over the generated tokens of the rows; under GSPO that of the row",
        RATIO,
    ),
    Metric("importance/ratio_max", "ratio", "greatest of it", RATIO),
    Metric(
        "importance/clip_frac",
        "share",
        "of those tokens: at the cap (CISPO, DecoupledPPO), or clipped with no gradient left (PPO, GSPO); 0 under "
        "ImportanceSampling",
        RATIO + ", but for a CustomLoss",
    ),
    Metric("importance/capped_mean", "ratio", "mean of the capped ratio", "after an update, DecoupledPPO"),
    Metric("importance/capped_frac", "share", "tokens at the cap", "after an update, DecoupledPPO"),
    Metric(
        "mismatch/kl",
        "nats",
        "KL(sampler ‖ learner) estimated (k3) on segments of age 0, where both hold the same weights; with segment "
        "sampling the KV behind them may be older, and shows here",
        "after an update with such segments",
    ),
    Metric(
        "mismatch/max_abs_logprob",
        "nats",
        "greatest difference of their log-probs there",
        "after an update with such segments",
    ),
    # The schedule.
    Metric("staleness/wait_seconds", "s", "waiting for the bound (or admission order) although a full batch was ready"),
    Metric("staleness/wait_count", "waits", "how many of these waits"),
    Metric(
        "staleness/wait_seconds/<cause>",
        "s",
        "the same, by what the trajectory waited for was doing: sampling, tool, reward, queue",
        "for causes that occur",
    ),
    Metric(
        "staleness/slot_wait_seconds",
        "s",
        "a batch was chosen, but trajectories under old versions leased every weight slot; never part of wait_seconds",
    ),
    Metric("staleness/reserved_groups", "groups", "admitted and still owed training after this batch; 0 unless `wait`"),
    Metric("groups/failed", "groups", "given up since the previous step: a trajectory failed (`on_failure`)"),
    Metric("groups/filtered", "groups", "given up since the previous step: equal rewards (`zero_variance`)"),
    Metric("throughput/queue_depth", "groups", "finished and not yet trained, after this batch"),
    Metric("evaluation/wait_seconds", "s", "the next evaluation was due while one ran", "with an evaluator"),
    Metric(
        "evaluation/retries",
        "trajectories",
        "of evaluations, started again since the previous step as those of recovery/retries",
        "with an evaluator",
    ),
    # Sampling since the previous step, work on future batches and the caller's own time included.
    Metric("sampling/requests", "requests", "answered"),
    Metric("sampling/prompts", "prompts", "answered: one a request"),
    Metric("sampling/generated_tokens", "tokens", "sampled"),
    Metric("sampling/generated_tokens_per_second", "tokens/s", "over the whole interval"),
    Metric("sampling/prompt_tokens", "tokens", "context of the requests answered"),
    Metric("sampling/cached_prompt_tokens", "tokens", "those of them whose KV was there already"),
    Metric("sampling/cached_prompt_fraction", "share", "the ratio of the two", "with any prompt"),
    Metric("sampling/request_seconds", "s", "summed over requests: being computed"),
    Metric("sampling/queue_seconds", "s", "summed over requests: waiting at the sampler"),
    Metric(
        "sampling/evictions",
        "times",
        "that a request which was being computed gave its KV back to older ones, to compute it again later: the KV "
        "cache (kv_gib) is short for Schedule.concurrency",
    ),
    Metric(
        "sampling/dropped_tokens",
        "tokens",
        "sampled that went with an eviction, and were sampled again: those over KV of older versions (KVCache)",
    ),
    Metric(
        "sampling/kv_refreshes",
        "contexts",
        'computed again because their KV had become older than KVCache.max_staleness (on_limit="refill")',
    ),
    Metric("sampling/interval_seconds", "s", "since the previous step's metrics"),
    Metric(
        "sampling/concurrency_mean",
        "trajectories",
        "running, those in a tool included, averaged over the interval: achieved, beside Schedule.concurrency",
    ),
    Metric("sampling/inflight_trajectories", "trajectories", "running now"),
    Metric("sampling/inflight_requests", "requests", "asked for and not answered now"),
    Metric("sampling/ready_prompts", "prompts", "of these, not yet with a sampler: `max_sample_requests`, or no room"),
    Metric("env/tool_seconds", "s", "in tools, summed over calls"),
    Metric("env/tool_calls", "calls", "of tools, answered"),
    Metric(
        "env/tool_errors",
        "calls",
        "those of them that the model read an error of: no such tool, arguments that don't fit, what the tool raised",
    ),
    Metric(
        "env/tool_results_cut", "results", "of tools, longer than Budget.tool_output_tokens: the model read their start"
    ),
    Metric("env/log_cuts", "times", "that an environment process had printed 64 MiB, and its log was cut to its end"),
    Metric("endpoint/requests", "requests", "that agents and harnesses made", "with an OpenAIEndpoint"),
    Metric(
        "endpoint/refused",
        "requests",
        "those that got an error: a wrong, spent or missing token, a field that isn't supported, no budget left",
        "with an OpenAIEndpoint",
    ),
    # Processes, since the previous step.
    Metric("time/trainer_busy_seconds", "s", "the trainer makes or trains a batch"),
    Metric("time/trainer_waiting_seconds", "s", "it waits for groups, a slot or an evaluation"),
    Metric("time/trainer_idle_seconds", "s", "the caller has the step"),
    Metric(
        "time/<process>_busy_seconds",
        "s",
        "learner, sampler-0, environment-0, …: it computes; of an environment process, its event loop runs users' code",
    ),
    Metric(
        "time/<process>_waiting_seconds",
        "s",
        "it waits with its work begun: a sampler for tools of its trajectories, the learner between chunks, an "
        "environment process for what it awaits and for tools in threads",
    ),
    Metric("time/<process>_idle_seconds", "s", "it has nothing to do"),
    Metric(
        "memory/<process>_bytes", "bytes", "resident host memory now, shared blocks included: supervisor, learner, …"
    ),
    Metric(
        "recovery/failures",
        "attempts",
        "at trajectories that failed since the previous step: users' code raised, took too long, or gave no finite "
        "reward",
    ),
    Metric("recovery/timeouts", "attempts", "those of them that took too long (`environment_timeout`)"),
    Metric(
        "recovery/retries",
        "trajectories",
        "that had failed and started again since the previous step (`max_retries`)",
    ),
    Metric(
        "recovery/begun_anew",
        "trajectories",
        "started again since the previous step that had not failed: their environment was lost with its process, or "
        "the run was resumed",
    ),
    Metric(
        "recovery/restored",
        "trajectories",
        'gone on since the previous step after such a loss (`recovery` "stateless" or "snapshot")',
    ),
    Metric("recovery/restarts", "processes", "processes started again since the previous step"),
)


def metrics_table() -> str:
    """docs/metrics.md's table."""
    lines = ["| key | unit | meaning |", "| --- | --- | --- |"]
    for metric in METRICS:
        when = f" ({metric.when})" if metric.when else ""
        lines.append(f"| `{metric.key}` | {metric.unit} | {metric.meaning}{when} |")
    return "\n".join(lines)
