"""What the collective guard costs of a training step.

    python bench/python/bench_guard.py [--ranks 2] [--stages 0 2 3] [--size base] [--hidden 256 ...] [--json FILE]

The guard makes ranks exchange headers at the head of each collective. A barrier is that exchange and nothing else. So
the steps of one GPT run with so many barriers beside the engine's own collectives that their cost shows: while the
backward computes, as the engine's reductions do, `--times` barriers for each collective of a step. What they add to a
step, divided by `--times`, is what the guard costs in it; more cannot be saved, since the small collectives travel in
the same messages as the headers. Blocks of steps with and without barriers alternate; figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import workload
import zerocore
from jobs import JobError, run_job, send_result
from zerocore import _comm, _core
from zerocore.config import OptimizerConfig, ZeroConfig

WARMUP_STEPS = 3
TIMEOUT_S = 1800
LIMIT = 0.01


def measure(args: argparse.Namespace) -> None:
    """The job. Rank 0 sends {stage: {"calls", "step_s": [by round], "with_barriers_s": [by round], "idle_s"}}."""
    torch.set_num_threads(args.threads)
    world = _comm.world()
    beside = world.split(0, world.rank)
    results = {}
    for stage in args.stages:
        model = workload.make_model(args)
        config = zerocore.Config(
            micro_batch_size=args.micro_batch, optimizer=OptimizerConfig(type="adamw"), zero=ZeroConfig(stage=stage)
        )
        engine = zerocore.Engine(model, config)
        ((tokens, targets),) = workload.make_data(args, world.rank, 1)

        def steps(barriers: int, engine: Any = engine, tokens: Any = tokens, targets: Any = targets) -> float:
            """Seconds a step, the slowest rank's; each step has `barriers` more exchanges."""
            beside.barrier("start of a block").wait()
            start = time.perf_counter()
            for _ in range(args.steps):
                loss = engine(tokens, targets)
                pending = [beside.barrier("guard") for _ in range(barriers)]
                engine.backward(loss)
                engine.step()
                for work in pending:
                    work.wait()
            own = round((time.perf_counter() - start) * 1e9)
            (slowest,) = beside.all_reduce([own], _core.ReduceOp.max, "slowest rank")
            return slowest / 1e9 / args.steps

        for _ in range(WARMUP_STEPS):
            steps(0)
        before = calls_of(engine)
        steps(0)
        calls = (calls_of(engine) - before) // args.steps
        rounds = [(steps(0), steps(calls * args.times)) for _ in range(args.blocks)]
        start = time.perf_counter()
        for _ in range(1000):
            beside.barrier("idle").wait()
        idle = (time.perf_counter() - start) / 1000
        plain, more = zip(*rounds, strict=True)
        results[str(stage)] = {"calls": calls, "step_s": plain, "with_barriers_s": more, "idle_s": idle}
        engine.close()
    if world.rank == 0:
        send_result(results)


def calls_of(engine: zerocore.Engine) -> int:
    """Collectives since the engine was built."""
    return sum(count["calls"] for count in engine.comm_report().values())


def report(args: argparse.Namespace, results: dict[str, Any]) -> int:
    """Prints a line a stage. Returns the exit code: 1 when the guard costs more than it may."""
    print(
        f"{workload.describe(vars(args))}; {args.blocks} rounds of {args.steps} steps, "
        f"{args.times} barriers a collective"
    )
    worst = 0.0
    rows = []
    for stage, result in results.items():
        step = statistics.median(result["step_s"])
        added = [
            (more - plain) / args.times for plain, more in zip(result["step_s"], result["with_barriers_s"], strict=True)
        ]
        share = statistics.median(added) / step
        worst = max(worst, share)
        rows.append({"stage": int(stage), "step_ms": step * 1e3, "calls": result["calls"], "share": share})
        print(
            f"stage {stage}: {step * 1e3:.1f} ms a step, {result['calls']} collectives, the guard costs "
            f"{statistics.median(added) * 1e3:.3f} ms or {share:.2%} (rounds {min(added) / step:.2%} to "
            f"{max(added) / step:.2%}); one exchange of idle ranks takes {result['idle_s'] * 1e6:.0f} us"
        )
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key != "json"}
        args.json.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1))
    print(f"at most {worst:.2%}, {'as' if worst < LIMIT else 'NOT as'} expected (below {LIMIT:.0%})")
    return 0 if worst < LIMIT else 1


def main() -> int:
    """Launches the job, and reports; or is one of its ranks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    workload.add_arguments(parser)
    counts = {"ranks": 2, "threads": 1, "steps": 5, "blocks": 9, "times": 20}
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 2, 3], help="default 0 2 3")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    workload.settle(args, {})
    if args.worker:
        measure(args)
        return 0
    flags = ["--worker", *workload.flags(args, (*workload.FIELDS, *counts)), "--stages"]
    try:
        (results,) = run_job(args.ranks, __file__, *flags, *map(str, args.stages), timeout_s=TIMEOUT_S)
    except JobError as error:
        sys.exit(f"bench_guard.py: {error}")
    return report(args, results)


if __name__ == "__main__":
    sys.exit(main())
