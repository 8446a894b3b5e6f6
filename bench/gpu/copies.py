"""Step: copies between the device and pinned host memory, both ways, beside torch's and beside pageable memory."""

from __future__ import annotations

import argparse
import ctypes
import functools

import torch
from step_report import Report, run_step
from timing import device, gb_per_s, milliseconds

NUM_BYTES, DRY_NUM_BYTES = 1 << 30, 1 << 16


def measure(report: Report, args: argparse.Namespace) -> None:
    """One buffer each, some times."""
    target = device(dry=args.dry)
    num_bytes = DRY_NUM_BYTES if args.dry else NUM_BYTES
    there = torch.empty(num_bytes, dtype=torch.uint8, device=target.torch)
    memory = target.core.allocate_pinned(num_bytes)
    pinned = torch.frombuffer((ctypes.c_char * num_bytes).from_address(memory.address), dtype=torch.uint8)
    pageable = torch.empty(num_bytes, dtype=torch.uint8)
    torch_pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=target.runs_behind)
    sent = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for name, host in (("pinned", pinned), ("pageable", pageable)):
        host.copy_(sent)
        there.zero_()
        target.core.synchronize(target.stream())
        ends = host.data_ptr(), there.data_ptr(), num_bytes, target.stream()
        to_device = milliseconds(functools.partial(target.core.from_host, *ends), target)
        host.zero_()
        to_host = milliseconds(functools.partial(target.core.to_host, ends[1], ends[0], *ends[2:]), target)
        report.check(torch.equal(host, sent), f"{name}: what came back is not what was sent")
        _row(report, name, num_bytes, to_device, to_host)
    to_device = milliseconds(lambda: there.copy_(torch_pinned, non_blocking=True), target)
    to_host = milliseconds(lambda: torch_pinned.copy_(there, non_blocking=True), target)
    _row(report, "torch's, pinned", num_bytes, to_device, to_host)


def _row(report: Report, name: str, num_bytes: int, to_device: float, to_host: float) -> None:
    rates = gb_per_s(num_bytes, to_device), gb_per_s(num_bytes, to_host)
    text = f"{rates[0]:6.1f} GB/s to the device, {rates[1]:6.1f} GB/s to the host"
    report.row(name, text, to_device_gb_per_s=rates[0], to_host_gb_per_s=rates[1])


if __name__ == "__main__":
    run_step(measure)
