"""The device that gpu_check measures, and the time that calls take there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from zerocore._device import Cuda, Host

REPEATS, WARMUP = 9, 2


def device(*, dry: bool) -> Host:
    """The GPU; dry: the CPU, on one thread."""
    if dry:
        torch.set_num_threads(1)
        return Host()
    return Cuda(torch.cuda.current_device())


def name_of(target: Host) -> str:
    """The device in words."""
    return torch.cuda.get_device_name(target.torch) if target.runs_behind else "CPU"


def synchronize(target: Host) -> None:
    """Waits for all that runs on it."""
    if target.runs_behind:
        torch.cuda.synchronize(target.torch)


def milliseconds(call: Callable[[], Any], target: Host, *, repeats: int = REPEATS) -> float:
    """The median of a call's times on the device, after some that do not count."""
    times = []
    for number in range(WARMUP + repeats):
        if target.runs_behind:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            taken = begin.elapsed_time(end)
        else:
            start = time.perf_counter()
            call()
            taken = (time.perf_counter() - start) * 1e3
        if number >= WARMUP:
            times.append(taken)
    return statistics.median(times)


def copy_gb_per_s(target: Host, numel: int) -> float:
    """What a copy in the device's memory moves: the ceiling of everything that reads and writes there."""
    source, to = torch.rand(numel, device=target.torch), torch.empty(numel, device=target.torch)
    return gb_per_s(8 * numel, milliseconds(lambda: to.copy_(source), target))


def gb_per_s(num_bytes: float, ms: float) -> float:
    """10^9 bytes a second."""
    return num_bytes / ms / 1e6
