"""What sampling has done since the previous step's metrics, work on future batches included (the `sampling/*` keys)."""

import time
from collections.abc import Callable

from pipeline.processes.sampler.sampler_client import SegmentResult


class SamplingCounters:
    """Sums over an interval; `take` returns them as metrics and starts the next one. Concurrency is averaged over
    time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.active = 0  # trajectories running now, those in a tool included
        self.inflight = 0  # requests asked for and not answered
        self._start()

    def _start(self) -> None:
        self._since = self._changed = self._clock()
        self._active_seconds = 0.0
        self.kv_refreshes = 0  # contexts computed anew because their KV had become too old
        self._requests = 0
        self._generated = 0
        self._prompt = 0
        self._cached = 0
        self._request_seconds = 0.0
        self._queue_seconds = 0.0
        self._evictions = 0
        self._dropped = 0
        self._tool_seconds = 0.0
        self._tool_calls = 0
        self._tool_errors = 0
        self.cut_results = 0  # of tools, before the model read them
        self.failures = 0  # attempts at trajectories that failed
        self.timeouts = 0  # those of them that took too long
        self.retries = 0  # trajectories that failed and started again
        self.begun_anew = 0  # trajectories that started again without having failed
        self.restored = 0  # environments that went on in another process

    def change_active(self, by: int) -> None:
        now = self._clock()
        self._active_seconds += self.active * (now - self._changed)
        self._changed = now
        self.active += by

    def add_segment(self, segment: SegmentResult, context_tokens: int) -> None:
        self._requests += 1
        self._generated += len(segment.tokens)
        self._prompt += context_tokens
        self._cached += segment.cached
        self._request_seconds += segment.seconds
        self._queue_seconds += segment.queue_seconds
        self._evictions += segment.evictions
        self._dropped += segment.dropped

    def add_tool(self, seconds: float, failed: bool) -> None:
        """failed: the model read an error."""
        self._tool_calls += 1
        self._tool_errors += failed
        self._tool_seconds += seconds

    def take(self) -> dict[str, float]:
        """The interval's metrics; see docs/metrics.md."""
        self.change_active(0)
        seconds = max(self._clock() - self._since, 1e-9)
        metrics = {
            "sampling/requests": self._requests,
            "sampling/prompts": self._requests,  # one prompt a request
            "sampling/generated_tokens": self._generated,
            "sampling/prompt_tokens": self._prompt,
            "sampling/cached_prompt_tokens": self._cached,
            "sampling/request_seconds": self._request_seconds,
            "sampling/queue_seconds": self._queue_seconds,
            "sampling/evictions": self._evictions,
            "sampling/dropped_tokens": self._dropped,
            "sampling/kv_refreshes": self.kv_refreshes,
            "sampling/interval_seconds": seconds,
            "sampling/generated_tokens_per_second": self._generated / seconds,
            "sampling/concurrency_mean": self._active_seconds / seconds,
            "sampling/inflight_trajectories": self.active,
            "sampling/inflight_requests": self.inflight,
            "env/tool_seconds": self._tool_seconds,
            "env/tool_calls": self._tool_calls,
            "env/tool_errors": self._tool_errors,
            "env/tool_results_cut": self.cut_results,
            "recovery/failures": self.failures,
            "recovery/timeouts": self.timeouts,
            "recovery/retries": self.retries,
            "recovery/begun_anew": self.begun_anew,
            "recovery/restored": self.restored,
        }
        if self._prompt:
            metrics["sampling/cached_prompt_fraction"] = self._cached / self._prompt
        self._start()
        return metrics
