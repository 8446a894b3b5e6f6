"""Whole training steps of one GPT under zerocore, DDP, FSDP2 and, where it is installed, DeepSpeed.

    python bench/python/bench_step.py [--size default|base|short|tiny] [--ranks 2] [--hidden 384 ...] [--json FILE]

One job holds all engines. They run in short blocks, shuffled anew in each round, so that whatever else the machine does
hits all alike; "ratio" is the median over the rounds of an engine's time by that of bare torch in the same round, with
the lowest and highest. Bare torch is the same ranks side by side, with a barrier a step. All engines see the same data
and their losses at the end must agree, else the exit code is 1. Memory, libraries included, comes from a job of its own
for each engine.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import peers
from gpt import GPT
from jobs import JobError, join_torch_distributed, leave_torch_distributed, run_job, send_result
from rich import box
from rich.console import Console
from rich.table import Table

WARMUP_STEPS = 2
MEMORY_STEPS = 20  # the C library's heap takes about ten to grow as large as it gets
SIZES = {  # short: the weights of base, and few tokens: what an engine adds shows
    "default": {"layers": 6, "hidden": 256, "heads": 4, "seq": 128, "micro_batch": 4, "vocab": 8192, "steps": 4},
    "base": {"layers": 12, "hidden": 384, "heads": 6, "seq": 256, "micro_batch": 4, "vocab": 8192, "steps": 1},
    "short": {"layers": 12, "hidden": 384, "heads": 6, "seq": 32, "micro_batch": 1, "vocab": 8192, "steps": 4},
    "tiny": {"layers": 2, "hidden": 64, "heads": 2, "seq": 32, "micro_batch": 2, "vocab": 256, "steps": 40},
}
LOSS_TOLERANCE = 1e-3  # relative; engines sum in different orders
TIMEOUT_S = 3600


def make_step(name: str, args: argparse.Namespace, world_size: int) -> peers.Step:
    """A fresh model, with the same initial values for all engines and ranks, under an engine."""
    torch.manual_seed(0)
    model = GPT(layers=args.layers, hidden=args.hidden, heads=args.heads, seq=args.seq, vocabulary=args.vocab)
    return peers.engines()[name](model, args.micro_batch, world_size)


def make_data(args: argparse.Namespace, rank: int, steps: int) -> list[list[torch.Tensor]]:
    """(tokens, targets) a step: random text in which every other token repeats the one before."""
    generator = torch.Generator().manual_seed(1 + rank)
    half = torch.randint(0, args.vocab, (steps, args.micro_batch, args.seq // 2 + 1), generator=generator)
    text = half.repeat_interleave(2, dim=2)[:, :, : args.seq + 1]
    return [[tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()] for tokens in text]


def measure_times(args: argparse.Namespace) -> None:
    """The job that times all engines. Rank 0 sends {engine: {"seconds": [a step, by round], "loss": the last}}."""
    rank, world_size = join_torch_distributed()
    data = make_data(args, rank, WARMUP_STEPS + args.blocks * args.steps)
    steps = {name: make_step(name, args, world_size) for name in args.engines}
    losses = {name: [step(*data[i]) for i in range(WARMUP_STEPS)] for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for block in range(args.blocks):
        for name in order.sample(sorted(steps), len(steps)):
            gc.collect()
            torch.distributed.barrier()
            first = WARMUP_STEPS + block * args.steps
            start = time.perf_counter()
            losses[name] += [steps[name](*data[i]) for i in range(first, first + args.steps)]
            taken = torch.tensor([time.perf_counter() - start])
            torch.distributed.all_reduce(taken, torch.distributed.ReduceOp.MAX)
            seconds[name].append(taken.item() / args.steps)
    last = torch.tensor([losses[name][-1] for name in steps], dtype=torch.float64)
    torch.distributed.all_reduce(last)
    if rank == 0:
        means = (last / world_size).tolist()
        send_result({name: {"seconds": seconds[name], "loss": loss} for name, loss in zip(steps, means, strict=True)})
    leave_torch_distributed()


def measure_memory(args: argparse.Namespace) -> None:
    """The job that measures one engine's memory. Rank 0 sends (peak, before the model was made), bytes a rank."""
    rank, world_size = join_torch_distributed()
    before = peak = pss_bytes()
    done = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, pss_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    step = make_step(args.memory_of, args, world_size)
    for tokens, targets in make_data(args, rank, MEMORY_STEPS):
        step(tokens, targets)
    done.set()
    sampler.join()
    both = torch.tensor([peak, before])
    torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX)
    if rank == 0:
        send_result(both.tolist())
    leave_torch_distributed()


def pss_bytes() -> int:
    """This process's proportional share of memory: shared pages are divided among those who map them."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


def report(args: argparse.Namespace, times: dict[str, Any], memory: dict[str, list[int]]) -> int:
    """Prints the table and writes the JSON. Returns the exit code."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(
        box=box.HEAVY_HEAD if console.is_terminal else box.ASCII,
        title=f"{args.ranks} ranks x {args.threads} thread, {args.layers} x {args.hidden}, vocabulary {args.vocab}, "
        f"{args.micro_batch} x {args.seq} tokens a rank, fp32, {args.blocks} rounds of {args.steps} steps",
    )
    for column in ("engine", "step ms", "tokens/s", "ratio to bare", "lowest - highest", "peak PSS MiB a rank", "loss"):
        table.add_column(column, justify="left" if column == "engine" else "right", no_wrap=True)
    rows = []
    bare = times[peers.BARE]["seconds"]
    for name, measured in times.items():
        ratios = [own / base for own, base in zip(measured["seconds"], bare, strict=True)]
        row = {
            "engine": name,
            "step_ms": statistics.median(measured["seconds"]) * 1e3,
            "tokens_per_s": args.ranks * args.micro_batch * args.seq / statistics.median(measured["seconds"]),
            "ratio_to_bare": statistics.median(ratios),
            "ratio_lowest": min(ratios),
            "ratio_highest": max(ratios),
            "peak_pss_bytes": memory[name][0] if name in memory else None,
            "libraries_pss_bytes": memory[name][1] if name in memory else None,
            "loss": measured["loss"],
        }
        rows.append(row)
        table.add_row(
            name,
            f"{row['step_ms']:.1f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['ratio_to_bare']:.3f}",
            f"{row['ratio_lowest']:.3f} - {row['ratio_highest']:.3f}",
            f"{memory[name][0] / 2**20:.0f}" if name in memory else "",
            f"{row['loss']:.5f}",
        )
    console.print(table)
    if args.json:
        args.json.write_text(
            json.dumps({"settings": {k: v for k, v in vars(args).items() if k != "json"}, "rows": rows}, indent=1)
        )
    losses = torch.tensor([row["loss"] for row in rows if row["engine"] != peers.BARE] or [1.0], dtype=torch.float64)
    spread = (losses.max() / losses.min() - 1).item()  # NaN if any is
    agree = spread <= LOSS_TOLERANCE
    print(
        f"losses of all engines but bare torch, whose ranks train apart: within {spread:.1e}, "
        f"{'as' if agree else 'NOT as'} expected (at most {LOSS_TOLERANCE:g})"
    )
    return 0 if agree else 1


def main() -> int:
    """Launches the jobs, and reports; or is one of their ranks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="default", help="a model and its batch")
    for name, value in SIZES["default"].items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"instead of the size's ({value} in default)")
    for name, value in {"ranks": 2, "threads": 1, "blocks": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    known = list(peers.engines())
    parser.add_argument("--engines", nargs="+", choices=known, default=known, metavar="NAME", help=f"some of: {known}")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--no-memory", action="store_true", help="leave out the jobs that measure memory")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name, value in SIZES[args.size].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    torch.set_num_threads(args.threads)
    if args.worker:
        measure_memory(args) if args.memory_of else measure_times(args)
        return 0
    args.engines = [peers.BARE, *(name for name in args.engines if name != peers.BARE)]
    if "DeepSpeed stage 1" in args.engines:
        print("DeepSpeed compiles its operators when it is first used on a machine, which takes minutes.", flush=True)
    elif "DeepSpeed stage 1" not in known:
        print("DeepSpeed is not installed: left out.", flush=True)
    flags = [
        "--worker",
        *(
            f"--{name.replace('_', '-')}={getattr(args, name)}"
            for name in (*SIZES["default"], "ranks", "threads", "blocks")
        ),
        "--engines",
        *args.engines,
    ]
    try:
        (times,) = run_job(args.ranks, __file__, *flags, timeout_s=TIMEOUT_S)
        memory = {}
        for name in [] if args.no_memory else times:
            (memory[name],) = run_job(args.ranks, __file__, *flags, f"--memory-of={name}", timeout_s=TIMEOUT_S)
    except JobError as error:
        sys.exit(f"bench_step.py: {error}")
    return report(args, times, memory)


if __name__ == "__main__":
    sys.exit(main())
