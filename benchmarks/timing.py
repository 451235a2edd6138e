"""Clocks: GPU time by events with a cold L2 cache, CPU time by many calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def gpu_us(call: Callable[[], object], rounds: int = 25) -> float:
    """Median GPU time of a call in microseconds, the L2 cache emptied before each.

    Clearing the cache takes longer than Python needs to issue the call, so no launch gap is measured.
    """
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    call()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush.zero_()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def cpu_us(calls: dict[str, Callable[[], object]], count: int = 500, rounds: int = 15) -> dict[str, float]:
    """CPU time of one call of each, in microseconds: the best of interleaved rounds.

    The GPU is idle at the start of a round, and ``count`` stays below the depth of the driver's launch queue,
    so that no call waits for the GPU.  The best round is the one that nothing else on the machine disturbed.
    """
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / count * 1e6)
            torch.cuda.synchronize()
    return best
