"""One AdamW step of one large parameter: zerocore's kernel, torch's optimizers and, if installed, DeepSpeedCPUAdam.

    python bench/python/bench_adam.py [--params 200e6] [--threads 1 2] [--rounds 21] [--json FILE]

Variants take turns, in an order that is shuffled anew each round, so that whatever else the machine does hits all
alike; the ratio is the median over the rounds of a variant's time by that of zerocore in the same round. Kinds:

fp32                 parameters, gradients and moments
master + bf16 copy   the same, and a bf16 copy of the result
bf16 parameters      and bf16 gradients, with fp32 moments. Where parameters are bf16 zerocore keeps fp32 masters beside
                     them, so its row reads bf16 gradients, updates masters and moments, and writes bf16 parameters.

All get the same values and must agree after their first step, else the exit code is 1. (bf16 parameters without masters
drift: most of what a step adds is below their last place, where the tolerance lies.) Memory is what each uses: torch's
allocator, or the huge pages of zerocore's core. Each kind and number of threads is a job of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from zerocore import _comm, _core, _tensor

LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
KINDS = ("fp32", "master + bf16 copy", "bf16 parameters")
OURS = "zerocore"
WARMUP_ROUNDS = 1
TOLERANCE = {"fp32": 1e-5, "master + bf16 copy": 1e-5, "bf16 parameters": 0.016}  # absolute
CHECKED = 10_000  # elements
TIMEOUT_S = 3600

Variant = tuple[Callable[[], None], torch.Tensor]  # (one step, what it updates)


def values(numel: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Varying numbers, the same for all variants: a short random stretch, repeated."""
    generator = torch.Generator().manual_seed(seed)
    stretch = torch.randn(min(numel, 1 << 20), generator=generator)
    return stretch.repeat(numel // stretch.numel() + 1)[:numel].to(dtype)


def make_zerocore(kind: str, numel: int) -> Variant:
    """The kernel that the engine's step runs over each bucket."""
    comm = _comm.world()

    def allocate(dtype: torch.dtype) -> torch.Tensor:
        memory = comm.allocate(numel * dtype.itemsize)
        return torch.frombuffer(memory, dtype=dtype)

    param = allocate(torch.float32).copy_(values(numel, 0, torch.float32))
    half = kind == "bf16 parameters"
    if half:
        param.copy_(param.bfloat16())
    grad = allocate(torch.bfloat16 if half else torch.float32).copy_(values(numel, 1, torch.float32))
    exp_avg, exp_avg_sq = allocate(torch.float32), allocate(torch.float32)
    model = None if kind == "fp32" else allocate(torch.bfloat16)
    hyper = _core.AdamHyper(
        lr=LR,
        beta1=BETAS[0],
        beta2=BETAS[1],
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        decoupled_weight_decay=True,
        bias_correction=True,
    )
    _core.set_num_threads(torch.get_num_threads())
    update = _core.Update(_core.cpu_device(), [(0, numel, 0)], [hyper])

    def step() -> None:
        view = _tensor.view
        update.begin_step(used=[True], factor=1.0, skip=False)
        update.run(
            grad=view(grad),
            param=view(param),
            state1=view(exp_avg),
            state2=view(exp_avg_sq),
            model=None if model is None else view(model),
        )

    return step, model if half else param


def make_torch(kind: str, numel: int, optimizer_class: Any, **options: Any) -> Variant:
    """An optimizer of torch's interface; a copy to bf16 is a second pass."""
    dtype = torch.bfloat16 if kind == "bf16 parameters" else torch.float32
    param = torch.nn.Parameter(values(numel, 0, dtype))
    param.grad = values(numel, 1, dtype)
    optimizer = optimizer_class([param], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, **options)
    copy = torch.zeros(numel, dtype=torch.bfloat16) if kind == "master + bf16 copy" else None

    def step() -> None:
        optimizer.step()
        if copy is not None:
            with torch.no_grad():
                copy.copy_(param)

    return step, param.detach()


def make_deepspeed(kind: str, numel: int) -> Variant:
    """DeepSpeedCPUAdam."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return make_torch(kind, numel, DeepSpeedCPUAdam, adamw_mode=True)


def makers() -> dict[str, Callable[[str, int], Variant]]:
    """The variants by name, of what is installed."""
    found: dict[str, Callable[[str, int], Variant]] = {
        OURS: make_zerocore,
        "torch loop": lambda kind, numel: make_torch(kind, numel, torch.optim.AdamW, foreach=False),
        "torch foreach": lambda kind, numel: make_torch(kind, numel, torch.optim.AdamW, foreach=True),
        "torch fused": lambda kind, numel: make_torch(kind, numel, torch.optim.AdamW, fused=True),
    }
    if importlib.util.find_spec("deepspeed"):
        found["DeepSpeedCPUAdam"] = make_deepspeed
    return found


def applies(name: str, kind: str) -> bool:
    """Whether a variant computes what the kind says: torch would keep the moments of bf16 parameters in bf16 too."""
    return name in (OURS, "DeepSpeedCPUAdam") if kind == "bf16 parameters" else True


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Of one kind: {variant: {"seconds": [a round], "error": to zerocore's result}}."""
    torch.set_num_threads(args.threads[0])
    numel, kind = int(args.params), args.kind
    variants = {name: makers()[name](kind, numel) for name in args.variants if applies(name, kind)}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    first: dict[str, torch.Tensor] = {}
    order = random.Random(0)
    for round_number in range(WARMUP_ROUNDS + args.rounds):
        for name in order.sample(sorted(variants), len(variants)):
            start = time.perf_counter()
            variants[name][0]()
            if round_number >= WARMUP_ROUNDS:
                seconds[name].append(time.perf_counter() - start)
            if name not in first:
                first[name] = variants[name][1][:CHECKED].float().clone()
    return {
        name: {"seconds": seconds[name], "error": (first[name] - first[OURS]).abs().max().item()} for name in variants
    }


def main() -> int:
    """Runs the jobs, and reports; or is one of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    known = list(makers())
    parser.add_argument("--params", type=float, default=50e6, help="elements (default 50e6)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="default 1 2")
    parser.add_argument("--rounds", type=int, default=21, help="default 21")
    parser.add_argument("--variants", nargs="+", choices=known, default=known, metavar="NAME", help=f"some of: {known}")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help=f"some of: {KINDS}")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.variants = [OURS, *(name for name in args.variants if name != OURS)]
    if args.kind:
        print(json.dumps(measure(args)))
        return 0
    if "DeepSpeedCPUAdam" not in known:
        print("DeepSpeed is not installed: left out.", flush=True)
    rows = []
    good = True
    for threads in args.threads:
        for kind in args.kinds:
            flags = [f"--params={args.params}", f"--rounds={args.rounds}", f"--kind={kind}", f"--threads={threads}"]
            job = subprocess.run(
                [sys.executable, __file__, *flags, "--variants", *args.variants],
                env=os.environ | {"OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu"},
                stdout=subprocess.PIPE,
                text=True,
                timeout=TIMEOUT_S,
                check=True,
            )
            measured = json.loads(job.stdout.splitlines()[-1])
            for name, figures in measured.items():
                ratios = [a / b for a, b in zip(figures["seconds"], measured[OURS]["seconds"], strict=True)]
                row = {
                    "threads": threads,
                    "kind": kind,
                    "variant": name,
                    "ns_per_param": statistics.median(figures["seconds"]) / args.params * 1e9,
                    "ratio": statistics.median(ratios),
                    "ratio_lowest": min(ratios),
                    "ratio_highest": max(ratios),
                    "error": figures["error"],
                }
                rows.append(row)
                good = good and figures["error"] <= TOLERANCE[kind]
                print(
                    f"{threads} threads  {kind:18}  {name:16}  {row['ns_per_param']:7.3f} ns a parameter  "
                    f"{row['ratio']:6.2f} x zerocore ({row['ratio_lowest']:.2f} - {row['ratio_highest']:.2f})  "
                    f"differs by {row['error']:.1e}",
                    flush=True,
                )
    if args.json:
        settings = {"params": args.params, "rounds": args.rounds}
        args.json.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1))
    print(f"results {'agree' if good else 'DO NOT agree'} within {TOLERANCE}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
