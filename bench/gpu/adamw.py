"""Step: one AdamW step of a large fp32 parameter against torch's fused one, also with a bf16 copy of the result."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import kernel_cases
import torch
from step_report import Report, run_step
from timing import copy_gb_per_s, device, gb_per_s, milliseconds
from zerocore import _core, _tensor
from zerocore._device import Host

NUMEL, DRY_NUMEL = 350_000_000, 100_000
ROUNDS, REPEATS = 5, 5
HYPER = {"type": "adamw", "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
TOLERANCE = 1e-5  # absolute, after some steps: torch rounds in another order

Made = tuple[Callable[[], None], torch.Tensor, torch.Tensor | None]  # a step, the parameter, its copy


def ours(target: Host, values: list[torch.Tensor], *, copies: bool) -> Made:
    """The engine's kernel."""
    param, grad = (each.clone() for each in values)
    states = [torch.zeros_like(param) for _ in range(2)]
    copy = torch.empty_like(param, dtype=torch.bfloat16) if copies else None
    update = _core.Update(target.core, [(0, param.numel(), 0)], [kernel_cases.core_hyper(HYPER)])

    def step() -> None:
        stream = target.stream()
        update.begin_step(used=[True], factor=1.0, skip=False, stream=stream)
        update.run(
            param=_tensor.view(param),
            grad=_tensor.view(grad),
            state1=_tensor.view(states[0]),
            state2=_tensor.view(states[1]),
            model=None if copy is None else _tensor.view(copy),
            stream=stream,
        )

    return step, param, copy


def torchs(target: Host, values: list[torch.Tensor], *, copies: bool) -> Made:
    """torch.optim.AdamW(fused=True); the copy is a pass of its own."""
    param = torch.nn.Parameter(values[0].clone())
    param.grad = values[1].clone()
    copy = torch.empty_like(param, dtype=torch.bfloat16) if copies else None
    settings = {key: HYPER[key] for key in ("lr", "betas", "eps", "weight_decay")}
    optimizer = torch.optim.AdamW([param], **settings, fused=True)

    def step() -> None:
        optimizer.step()
        if copy is not None:
            copy.copy_(param.detach())

    return step, param.detach(), copy


def measure(report: Report, args: argparse.Namespace) -> None:
    """Both, in turns."""
    target = device(dry=args.dry)
    numel = DRY_NUMEL if args.dry else NUMEL
    ceiling = copy_gb_per_s(target, numel)
    generator = torch.Generator(target.torch).manual_seed(0)
    values = [torch.randn(numel, device=target.torch, generator=generator) for _ in range(2)]
    for kind, moved in (("fp32", 28), ("fp32 and a bf16 copy", 30)):
        made = [make(target, values, copies=moved == 30) for make in (ours, torchs)]
        times: list[list[float]] = [[], []]
        for _ in range(ROUNDS):
            for each, (step, *_) in zip(times, made, strict=True):
                each.append(milliseconds(step, target, repeats=REPEATS))
        our_ms, torch_ms = (statistics.median(each) for each in times)
        rate = gb_per_s(moved * numel, our_ms)
        (_, param, copy), (_, torch_param, _) = made
        error = (param - torch_param).abs().max().item()
        report.row(
            kind,
            f"{our_ms:.3f} ms, torch's {torch_ms:.3f} ms: {torch_ms / our_ms:.2f} times as fast; "
            f"{rate / ceiling:.2f} of the copy's {ceiling:.0f} GB/s",
            ms=our_ms,
            torch_ms=torch_ms,
            gb_per_s=rate,
            of_copy=rate / ceiling,
            error=error,
        )
        report.check(error <= TOLERANCE, f"{kind}: results differ by {error}, expected at most {TOLERANCE}")
        rounded = copy is None or torch.equal(copy, param.bfloat16())
        report.check(rounded, f"{kind}: the copy is not the rounded parameter")
        del made, param, torch_param, copy


if __name__ == "__main__":
    run_step(measure)
