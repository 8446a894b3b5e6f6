"""Step: what each kernel moves, beside a copy in the device's memory.

Bytes are counted, not measured: what a kernel must read and write once. Buffers are a stretch of numbers, repeated, so
that every result is checked: against the CPU's on one stretch.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import kernel_cases
import torch
from kernel_cases import DTYPES, Run, core_hyper, numbers
from step_report import Report, run_step
from timing import copy_gb_per_s, device, gb_per_s, milliseconds
from zerocore import _core, _tensor
from zerocore._device import Host

NUMEL, STRETCH = 1 << 28, 1 << 20  # 1 GB of fp32 a buffer
DRY_NUMEL, DRY_STRETCH = 1 << 15, 1 << 13

Call = Callable[[], Any]


@dataclasses.dataclass
class Kernel:
    """A call to be timed. buffers: dtypes by name; bytes: moved an element; prepare: makes the call, beforehand."""

    name: str
    bytes: int
    buffers: dict[str, str]
    prepare: Callable[[Run], Call]


def _in_and_out(name: str, source: str, out: str, prepare: Callable[[Run], Call]) -> Kernel:
    moved = DTYPES[source].itemsize + DTYPES[out].itemsize
    return Kernel(f"{name} {source} to {out}", moved, {"in": source, "out": out}, prepare)


def _cast(run: Run) -> Call:
    source, out = run.view("in"), run.view("out")
    return lambda: run.kernels.cast(source, out, run.stream)


def _pack(run: Run) -> Call:
    parts, out = _halves(run), run.view("out")
    return lambda: run.kernels.pack(parts, out, run.stream)


def _halves(run: Run) -> list[Any]:
    half = run.buffers["in"].numel() // 2
    return [(_tensor.view(run.buffers["in"][at : at + half]), at, half) for at in (0, half)]


def _fold(sources: int, dtype: str, acc: str, *, first: bool) -> Kernel:
    names = [f"in{k}" for k in range(sources)]

    def prepare(run: Run) -> Call:
        views, into = [run.view(name) for name in names], run.view("acc")
        return lambda: run.kernels.fold(views, into, first=first, stream=run.stream)

    moved = sources * DTYPES[dtype].itemsize + (1 if first else 2) * DTYPES[acc].itemsize
    name = f"{'fold_first' if first else 'fold'} of {sources} {dtype} into {acc}"
    return Kernel(name, moved, dict.fromkeys(names, dtype) | {"acc": acc}, prepare)


def _fold_parts(run: Run) -> Call:
    parts, into = _halves(run), run.view("acc")
    dtype = _tensor.DTYPES[run.buffers["in"].dtype]
    return lambda: run.kernels.fold_parts(parts, dtype, into, first=True, stream=run.stream)


def _scale(run: Run) -> Call:
    inout = run.view("inout")
    return lambda: run.kernels.scale(inout, 0.3, run.stream)


def _square_sum(run: Run) -> Call:
    norm, source = _core.Norm(run.core, [(0, run.buffers["in"].numel(), 0)], 1), run.view("in")

    def call() -> _core.Norm:
        norm.square_sum(source, run.stream)
        return norm

    return call


def _update(kind: str, grad: str, model: str | None, *, muon_momentum: bool = False) -> Kernel:
    states = [f"state{k + 1}" for k in range(kernel_cases.NUM_STATES[kind])]
    buffers = {"grad": grad, "param": "fp32"} | dict.fromkeys(states, "fp32")
    moved = DTYPES[grad].itemsize + 8 + 8 * len(states)
    if kind == "muon" and muon_momentum:
        buffers, moved = {"grad": grad, "state1": "fp32", "direction": "fp32"}, DTYPES[grad].itemsize + 12
    elif kind == "muon":
        buffers, moved = {"direction": "fp32", "param": "fp32"}, 12
    if model:
        buffers["model"] = model
        moved += DTYPES[model].itemsize

    def prepare(run: Run) -> Call:
        ratios = [1.0] if kind == "muon" else []
        pieces = [(0, run.buffers["state1" if muon_momentum else "param"].numel(), 0)]
        update = _core.Update(run.core, pieces, [core_hyper(kernel_cases.OPTIMIZERS[kind][0])], ratios)
        update.begin_step(used=[True], factor=kernel_cases.FACTOR, skip=False, stream=run.stream)
        views = run.views(*buffers)
        step = update.muon_momentum if muon_momentum else update.run
        return lambda: step(**views, stream=run.stream)

    name = f"{'muon_momentum' if muon_momentum else kind}, {grad} gradients"
    return Kernel(name + (f", {model} copy" if model else ""), moved, buffers, prepare)


KERNELS = [
    Kernel("zero", 4, {"out": "fp32"}, lambda run: lambda: run.kernels.zero(run.view("out"), run.stream)),
    _in_and_out("cast", "fp32", "bf16", _cast),
    _in_and_out("cast", "bf16", "fp32", _cast),
    _in_and_out("cast", "fp32", "fp16", _cast),
    _in_and_out("pack", "bf16", "bf16", _pack),
    _in_and_out("pack", "fp32", "bf16", _pack),
    _fold(1, "bf16", "fp32", first=True),
    _fold(1, "bf16", "fp32", first=False),
    _fold(1, "fp32", "fp32", first=False),
    _fold(2, "bf16", "fp32", first=False),
    _fold(8, "bf16", "fp32", first=True),
    _fold(2, "bf16", "bf16", first=False),
    Kernel("fold_parts of bf16 into fp32", 6, {"in": "bf16", "acc": "fp32"}, _fold_parts),
    Kernel("scale", 8, {"inout": "fp32"}, _scale),
    Kernel("square_sum of fp32", 4, {"in": "fp32"}, _square_sum),
    Kernel("square_sum of bf16", 2, {"in": "bf16"}, _square_sum),
    _update("adam", "fp32", None),
    _update("adam", "fp32", "bf16"),
    _update("adam", "bf16", "bf16"),
    _update("sgd", "fp32", None),
    _update("momentum", "fp32", "bf16"),
    _update("lion", "fp32", "bf16"),
    _update("adagrad", "fp32", "bf16"),
    _update("muon", "fp32", None, muon_momentum=True),
    _update("muon", "fp32", "bf16"),
]


def measure(report: Report, args: argparse.Namespace) -> None:
    """Checks one call of each kernel, then times more."""
    target = device(dry=args.dry)
    numel, stretch = (DRY_NUMEL, DRY_STRETCH) if args.dry else (NUMEL, STRETCH)
    ceiling = copy_gb_per_s(target, numel)
    report.row("copy", f"{ceiling:8.1f} GB/s", gb_per_s=ceiling)
    for kernel in KERNELS:
        small = {n: numbers(stretch, DTYPES[d], i).abs() for i, (n, d) in enumerate(kernel.buffers.items())}
        large = {name: values.to(target.torch).repeat(numel // stretch) for name, values in small.items()}
        on_cpu, there = Run(Host(), small), Run(target, large)
        call = kernel.prepare(there)
        wrong = _differences(kernel.prepare(on_cpu)(), call(), on_cpu, there)
        report.check(not wrong, f"{kernel.name}: the bits of {wrong} are not the CPU's")
        ms = milliseconds(call, target)
        rate = gb_per_s(kernel.bytes * numel, ms)
        text = f"{rate:8.1f} GB/s  {rate / ceiling:5.2f} of the copy  {ms:8.3f} ms" + "  WRONG" * bool(wrong)
        report.row(kernel.name, text, gb_per_s=rate, of_copy=rate / ceiling, ms=ms, wrong=wrong)
        del small, large, on_cpu, there, call


def _differences(wanted: Any, got: Any, on_cpu: Run, there: Run) -> list[str]:
    """The buffers and sums that are not, on each stretch, what the CPU computed."""
    wrong = []
    for name, values in on_cpu.buffers.items():
        integers = torch.int32 if values.element_size() == 4 else torch.int16
        whole = there.buffers[name].view(integers).view(-1, values.numel())
        if not torch.equal(whole, values.view(integers).to(whole.device).expand_as(whole)):
            wrong.append(name)
    if isinstance(wanted, _core.Norm):
        repeats = there.buffers["in"].numel() // on_cpu.buffers["in"].numel()
        (expected, _), (sums, _) = wanted.sums(), got.sums(there.stream)
        as_number = [sum(limb << (32 * i) for i, limb in enumerate(limbs)) for limbs in (expected, sums)]
        if as_number[0] * repeats != as_number[1]:
            wrong.append("the sum of squares")
    return wrong


if __name__ == "__main__":
    run_step(measure)
