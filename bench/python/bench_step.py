"""Whole training steps of one GPT under zerocore, DDP, FSDP2 and, where it is installed, DeepSpeed.

    python bench/python/bench_step.py [--size default|base|short|tiny] [--ranks 2] [--hidden 384 ...] [--json FILE]

One job holds all engines. They run in short blocks, shuffled anew in each round. Beside each block of an engine, before
or after it, runs one of bare torch, so that whatever else the machine does hits both alike; "ratio" is the median over
the rounds of the time of the one by that of the other, with its 95 % interval. Bare torch is the same ranks side by
side, with the cheapest barrier there is, MPI's, after each step. All engines see the same data and their losses at the
end must agree, else the exit code is 1. Memory, libraries included, comes from a job of its own for each engine.
--profile FILE writes a trace of one more step, for https://ui.perfetto.dev.
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

import peers
import torch
import workload
from jobs import JobError, join_torch_distributed, leave_torch_distributed, run_job, send_result
from rich import box
from rich.console import Console
from rich.table import Table

WARMUP_STEPS = 2
MEMORY_STEPS = 20  # the C library's heap takes about ten to grow as large as it gets
ROUNDS = {  # steps a block, and blocks: where a step is short, 21 ratios
    "default": {"steps": 2, "blocks": 11},
    "base": {"steps": 1, "blocks": 7},
    "short": {"steps": 1, "blocks": 21},
    "tiny": {"steps": 10, "blocks": 21},
}
LOSS_TOLERANCE = 1e-3  # relative; engines sum in different orders
TIMEOUT_S = 3600


def make_step(name: str, args: argparse.Namespace, world_size: int) -> peers.Step:
    """A fresh model under an engine."""
    return peers.engines()[name](workload.make_model(args), args.micro_batch, world_size)


def measure_times(args: argparse.Namespace) -> None:
    """The job that times all engines.

    Rank 0 sends {engine: {"seconds": [a step, by round], "ratios": [to bare torch, by round], "loss": the last}}.
    """
    rank, world_size = join_torch_distributed()
    from mpi4py import MPI

    data = workload.make_data(args, rank, WARMUP_STEPS + args.blocks * args.steps)
    steps = {name: make_step(name, args, world_size) for name in args.engines}
    losses = {name: [step(*batch) for batch in data[:WARMUP_STEPS]] for name, step in steps.items()}

    def block(name: str, number: int) -> float:
        """Seconds a step, on the slowest rank."""
        gc.collect()
        batches = data[WARMUP_STEPS + number * args.steps :][: args.steps]
        MPI.COMM_WORLD.Barrier()
        start = time.perf_counter()
        losses[name] += [steps[name](*batch) for batch in batches]
        return MPI.COMM_WORLD.allreduce(time.perf_counter() - start, op=MPI.MAX) / args.steps

    gc.collect()
    gc.freeze()  # what is there is not looked at again: collecting takes as long as a short step
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    ratios: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for number in range(args.blocks):
        for name in order.sample(sorted(steps), len(steps)):
            if name == peers.BARE:
                continue
            pair = order.sample((name, peers.BARE), 2)
            taken = {each: block(each, number) for each in pair}
            seconds[name].append(taken[name])
            seconds[peers.BARE].append(taken[peers.BARE])
            ratios[name].append(taken[name] / taken[peers.BARE])
    ratios[peers.BARE] = [1.0] * args.blocks
    means = MPI.COMM_WORLD.allreduce(torch.tensor([losses[name][-1] for name in steps], dtype=torch.float64))
    if rank == 0:
        send_result(
            {
                name: {"seconds": seconds[name], "ratios": ratios[name], "loss": loss / world_size}
                for name, loss in zip(steps, means.tolist(), strict=True)
            }
        )
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
    for tokens, targets in workload.make_data(args, rank, MEMORY_STEPS):
        step(tokens, targets)
    done.set()
    sampler.join()
    both = torch.tensor([peak, before])
    torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX)
    if rank == 0:
        send_result(both.tolist())
    leave_torch_distributed()


def write_profile(args: argparse.Namespace) -> None:
    """The job that traces one step of an engine, after others."""
    rank, world_size = join_torch_distributed()
    step = make_step(args.profile_of, args, world_size)
    *before, last = workload.make_data(args, rank, WARMUP_STEPS + 1)
    for batch in before:
        step(*batch)
    with step.engine.profile(args.profile):
        step(*last)
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
        title=f"{workload.describe(vars(args))}, {args.blocks} rounds of {args.steps} steps",
    )
    for column in ("engine", "step ms", "tokens/s", "ratio to bare (95 %)", "peak PSS MiB a rank", "loss"):
        table.add_column(column, justify="left" if column == "engine" else "right", no_wrap=True)
    rows = []
    for name, measured in times.items():
        ratios = measured["ratios"]
        row = {
            "engine": name,
            "step_ms": statistics.median(measured["seconds"]) * 1e3,
            "tokens_per_s": args.ranks * args.micro_batch * args.seq / statistics.median(measured["seconds"]),
            "ratio_to_bare": statistics.median(ratios),
            "ratio_lowest": min(ratios),
            "ratio_highest": max(ratios),
            "ratios": ratios,
            "peak_pss_bytes": memory[name][0] if name in memory else None,
            "libraries_pss_bytes": memory[name][1] if name in memory else None,
            "loss": measured["loss"],
        }
        rows.append(row)
        table.add_row(
            name,
            f"{row['step_ms']:.1f}",
            f"{row['tokens_per_s']:.0f}",
            workload.summary(ratios),
            f"{memory[name][0] / 2**20:.0f}" if name in memory else "",
            f"{row['loss']:.5f}",
        )
    console.print(table)
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key not in ("json", "profile")}
        args.json.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1))
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
    workload.add_arguments(parser)
    for name in ROUNDS["default"]:
        parser.add_argument(f"--{name}", type=int, help="instead of the size's")
    for name, value in {"ranks": 2, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    known = list(peers.engines())
    parser.add_argument("--engines", nargs="+", choices=known, default=known, metavar="NAME", help=f"some of: {known}")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--no-memory", action="store_true", help="leave out the jobs that measure memory")
    parser.add_argument("--profile", type=Path, help="file for a trace of one step, of the zerocore engine chosen")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--profile-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    workload.settle(args, ROUNDS[args.size])
    torch.set_num_threads(args.threads)
    if args.worker:
        job = write_profile if args.profile_of else measure_memory if args.memory_of else measure_times
        job(args)
        return 0
    profiled = [name for name in args.engines if name.startswith("zerocore")]
    if args.profile and len(profiled) != 1:
        parser.error(f'--profile: got {len(profiled)} engines of zerocore, expected one: --engines "zerocore stage 2"')
    args.engines = [peers.BARE, *(name for name in args.engines if name != peers.BARE)]
    if "DeepSpeed stage 1" in args.engines:
        print("DeepSpeed compiles its operators when it is first used on a machine, which takes minutes.", flush=True)
    elif "DeepSpeed stage 1" not in known:
        print("DeepSpeed is not installed: left out.", flush=True)
    known_flags = workload.flags(args, (*workload.FIELDS, *ROUNDS["default"], "ranks", "threads"))
    flags = ["--worker", *known_flags, "--engines", *args.engines]
    try:
        (times,) = run_job(args.ranks, __file__, *flags, timeout_s=TIMEOUT_S)
        memory = {}
        for name in [] if args.no_memory else times:
            (memory[name],) = run_job(args.ranks, __file__, *flags, f"--memory-of={name}", timeout_s=TIMEOUT_S)
        if args.profile:
            profile = (f"--profile-of={profiled[0]}", f"--profile={args.profile.absolute()}")
            run_job(args.ranks, __file__, *flags, *profile, timeout_s=TIMEOUT_S)
    except JobError as error:
        sys.exit(f"bench_step.py: {error}")
    return report(args, times, memory)


if __name__ == "__main__":
    sys.exit(main())
