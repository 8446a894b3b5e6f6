"""Collectives of zerocore's communicator, of gloo and of MPI, by size, beside the copies that none can do without.

    python bench/python/bench_collectives.py [--ranks 2] [--sizes 1024 1048576 ...] [--json FILE]

The columns are those of nccl-tests: the size is the whole buffer's, also where a rank puts in or gets out a part of it;
algbw is size by time; busbw is what a link between ranks carries, algbw times (n - 1) / n, and twice that for
all_reduce. Times are of the slowest rank. The libraries take turns, in an order that is shuffled in each round; a time
is the median over the rounds, with its 95 % interval. Every result is verified, before and after it is timed.

zerocore's all_reduce of a buffer is its reduce_scatter and all_gather, as stage 0 does it. The floor is the additions
and copies that each rank has to make where all ranks' buffers are mapped by all, all ranks at once, with no
synchronisation at all; of a small buffer it is what torch takes for a call. That of an all_reduce is the sum of the
other two.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import workload
from jobs import JobError, join_torch_distributed, leave_torch_distributed, run_job, send_result
from rich import box
from rich.console import Console
from rich.table import Table
from zerocore import _comm, _core

FLOOR = "floor"
OPERATIONS = ("reduce_scatter", "all_gather", "all_reduce", "barrier")
SIZES = [1 << 10, 1 << 16, 1 << 20, 1 << 24]
BLOCK_S = 0.01  # a block of calls takes about so long
MAX_CALLS = 100
TIMEOUT_S = 1800

Calls = dict[str, Callable[[], Any]]  # by operation


class Buffers:
    """fp32 memory of one rank and library: `full`, of all ranks' slices, and `shard`, the sum of one."""

    def __init__(self, full: torch.Tensor, world: Any) -> None:
        self.full, self.world = full, world
        self.slices = full.chunk(world.size)
        self.shard = torch.zeros_like(self.slices[world.rank])
        self.pattern = torch.arange(full.numel()).remainder_(251).float()

    def is_right(self, operation: str, call: Callable[[], Any]) -> bool:
        """Whether one call gives what it should of values whose sums are exact."""
        rank, size = self.world.rank, self.world.size
        self.full.copy_(self.pattern).add_(rank)
        self.shard.zero_()
        self.world.Barrier()
        call()
        self.world.Barrier()
        sums = self.pattern * size + sum(range(size))
        if operation == "reduce_scatter":
            return torch.equal(self.shard, sums.chunk(size)[rank])
        if operation == "all_reduce":
            return torch.equal(self.full, sums)
        parts = zip(self.slices, self.pattern.chunk(size), strict=True)
        return all(torch.equal(part, pattern + peer) for peer, (part, pattern) in enumerate(parts))


def of_zerocore(mpi: Any, num_bytes: int) -> tuple[Buffers, Calls]:
    """The communicator's, in memory that it allocates."""
    comm = _comm.world()
    buffers = Buffers(torch.frombuffer(comm.allocate(num_bytes), dtype=torch.float32), mpi.COMM_WORLD)
    full, shard = (
        _core.BufferView(tensor.data_ptr(), tensor.numel(), _core.DType.fp32)
        for tensor in (buffers.full, buffers.shard)
    )

    def all_reduce() -> None:
        comm.reduce_scatter_add(full, shard, "bench").wait()
        comm.all_gather(shard, full, "bench").wait()

    return buffers, {
        "reduce_scatter": lambda: comm.reduce_scatter_add(full, shard, "bench").wait(),
        "all_gather": lambda: comm.all_gather(full, "bench").wait(),
        "all_reduce": all_reduce,
        "barrier": lambda: comm.barrier("bench").wait(),
    }


def of_gloo(mpi: Any, num_bytes: int) -> tuple[Buffers, Calls]:
    """torch.distributed's."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch 2.13 renames two of them
    buffers = Buffers(torch.empty(num_bytes // 4), mpi.COMM_WORLD)
    full, own = buffers.full, buffers.slices[mpi.COMM_WORLD.rank]
    return buffers, {
        "reduce_scatter": lambda: torch.distributed.reduce_scatter_tensor(buffers.shard, full),
        "all_gather": lambda: torch.distributed.all_gather_into_tensor(full, own),
        "all_reduce": lambda: torch.distributed.all_reduce(full),
        "barrier": torch.distributed.barrier,
    }


def of_mpi(mpi: Any, num_bytes: int) -> tuple[Buffers, Calls]:
    """mpi4py's."""
    buffers = Buffers(torch.empty(num_bytes // 4), mpi.COMM_WORLD)
    full, shard, world = buffers.full.numpy(), buffers.shard.numpy(), mpi.COMM_WORLD
    return buffers, {
        "reduce_scatter": lambda: world.Reduce_scatter_block(full, shard),
        "all_gather": lambda: world.Allgather(mpi.IN_PLACE, full),
        "all_reduce": lambda: world.Allreduce(mpi.IN_PLACE, full),
        "barrier": world.Barrier,
    }


def of_floor(mpi: Any, num_bytes: int) -> tuple[Buffers, Calls]:
    """Torch's additions and copies between buffers that every rank has mapped."""
    rank, size = mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size
    window = mpi.Win.Allocate_shared(num_bytes, 4, comm=mpi.COMM_WORLD)
    fulls = [torch.frombuffer(window.Shared_query(peer)[0], dtype=torch.float32) for peer in range(size)]
    buffers = Buffers(fulls[rank], mpi.COMM_WORLD)
    addends = [full.chunk(size)[rank] for full in fulls]
    sources = [(buffers.slices[peer], fulls[peer].chunk(size)[peer]) for peer in range(size) if peer != rank]

    def reduce_scatter() -> None:
        torch.add(addends[0], addends[1], out=buffers.shard)
        for addend in addends[2:]:
            buffers.shard.add_(addend)

    def all_gather() -> None:
        for own, source in sources:
            own.copy_(source)

    return buffers, {"reduce_scatter": reduce_scatter, "all_gather": all_gather}


LIBRARIES = {"zerocore": of_zerocore, "gloo": of_gloo, "MPI": of_mpi, FLOOR: of_floor}


def measure(args: argparse.Namespace) -> None:
    """The job. Rank 0 sends [{"operation", "bytes", "seconds": {library: [a call, by round]}}]."""
    _comm.world()
    from mpi4py import MPI

    rank, _ = join_torch_distributed()
    order = random.Random(0)
    results = []

    def block(call: Callable[[], Any], count: int) -> float:
        MPI.COMM_WORLD.Barrier()
        start = time.perf_counter()
        for _ in range(count):
            call()
        return MPI.COMM_WORLD.allreduce((time.perf_counter() - start) / count, op=MPI.MAX)

    for num_bytes in args.sizes:
        made = {name: make(MPI, num_bytes) for name, make in LIBRARIES.items()}
        for operation in OPERATIONS[: None if num_bytes == args.sizes[0] else -1]:
            calls = {name: found[operation] for name, (_, found) in made.items() if operation in found}

            def verify(operation: str = operation, calls: Any = calls, made: Any = made) -> None:
                for name, call in calls.items():
                    if operation != "barrier" and not made[name][0].is_right(operation, call):
                        sys.exit(f"bench_collectives.py: {operation} of {name} on rank {rank} gave a wrong result")

            verify()
            counts = {name: max(1, min(MAX_CALLS, round(BLOCK_S / block(call, 3)))) for name, call in calls.items()}
            seconds: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(args.rounds):
                for name in order.sample(sorted(calls), len(calls)):
                    seconds[name].append(block(calls[name], counts[name]))
            verify()
            results.append({"operation": operation, "bytes": num_bytes, "seconds": seconds})
    if rank == 0:
        send_result(results)
    leave_torch_distributed()


def rows_of(results: list[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """A row an operation, size and library, with nccl-tests' figures."""
    floors: dict[tuple[int, str], list[float]] = {}
    rows = []
    for result in results:
        operation, num_bytes, seconds = result["operation"], result["bytes"], result["seconds"]
        if FLOOR in seconds:
            floors[num_bytes, operation] = seconds[FLOOR]
        elif operation == "all_reduce":
            halves = (floors[num_bytes, half] for half in ("reduce_scatter", "all_gather"))
            seconds = seconds | {FLOOR: [sum(pair) for pair in zip(*halves, strict=True)]}
        links = (2 if operation == "all_reduce" else 1) * (ranks - 1) / ranks
        for library, samples in seconds.items():
            median = statistics.median(samples)
            row = {"operation": operation, "library": library, "time_us": median * 1e6, "seconds": samples}
            if operation != "barrier":
                row |= {"bytes": num_bytes, "algbw_GBps": num_bytes / median / 1e9}
                row |= {"busbw_GBps": links * row["algbw_GBps"], "of_floor": median / statistics.median(seconds[FLOOR])}
            rows.append(row)
    order = [(operation, library) for operation in OPERATIONS for library in LIBRARIES]
    return sorted(rows, key=lambda row: (order.index((row["operation"], row["library"])), row.get("bytes", 0)))


def report(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Prints the table and writes the JSON."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(
        box=box.HEAVY_HEAD if console.is_terminal else box.ASCII,
        title=f"{args.ranks} ranks, fp32, sum, {args.rounds} rounds; all results verified",
    )
    for column in ("operation", "library", "size B", "count", "time us (95 %)", "algbw GB/s", "busbw GB/s", "x floor"):
        table.add_column(column, justify="left" if column in ("operation", "library") else "right", no_wrap=True)
    for row in rows:
        cells = [row["operation"], row["library"], "", "", workload.summary([s * 1e6 for s in row["seconds"]], 1)]
        if "bytes" in row:
            cells[2:4] = [str(row["bytes"]), str(row["bytes"] // 4)]
            cells += [f"{row['algbw_GBps']:.2f}", f"{row['busbw_GBps']:.2f}", f"{row['of_floor']:.2f}"]
        table.add_row(*cells)
    console.print(table)
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key not in ("json", "worker")}
        args.json.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1))


def main() -> int:
    """Launches the job, and reports; or is one of its ranks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    counts = {"ranks": 2, "rounds": 21}
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of the whole buffer")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ranks < 2 or any(num_bytes % (4 * args.ranks) for num_bytes in args.sizes):
        parser.error(
            f"got --ranks {args.ranks} --sizes {args.sizes}, expected 2 or more ranks and multiples of 4 each."
        )
    torch.set_num_threads(1)
    if args.worker:
        measure(args)
        return 0
    flags = ["--worker", *workload.flags(args, counts), "--sizes", *map(str, args.sizes)]
    try:
        (results,) = run_job(args.ranks, __file__, *flags, timeout_s=TIMEOUT_S)
    except JobError as error:
        sys.exit(f"bench_collectives.py: {error}")
    report(args, rows_of(results, args.ranks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
