"""How long work on a device takes, without making the host wait for it."""

import time

import torch


class Stopwatch:
    """Sums the time of the blocks it is around; on CUDA by events, so that measuring never makes the host wait."""

    def __init__(self, device: torch.device):
        self._is_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        if self._is_cuda:
            self._events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            self._events[-1][0].record()
        else:
            self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._is_cuda:
            self._events[-1][1].record()
        else:
            self._seconds += time.perf_counter() - self._started

    def seconds(self) -> float:
        """The sum; on CUDA this waits for the last block to end."""
        for start, end in self._events:
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1e3
        self._events.clear()
        return self._seconds
