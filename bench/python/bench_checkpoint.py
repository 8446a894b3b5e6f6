"""Saves and loads one AdamW state with zerocore, torch.save, torch.distributed.checkpoint and, if installed, DeepSpeed.

    python bench/python/bench_checkpoint.py [--numel 400e6] [--dir FOLDER] [--rounds 3] [--json FILE]

Each engine is a process of its own, on one rank; rounds go through them in random order. A save counts until its bytes
are on the disk (fsync); before a load the files are dropped from the page cache. What is loaded is compared with what
was saved, bit for bit. "disk" is the ceiling: the same number of bytes between one file and a buffer on huge pages,
past the page cache (O_DIRECT), without copies or checksums, with the best number of threads. FOLDER must be on the disk
that is meant, with room for one state.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import importlib.util
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import zerocore
from rich import box
from rich.console import Console
from rich.table import Table
from zerocore import _core
from zerocore.config import CheckpointConfig, Config, OptimizerConfig

NUM_TENSORS = 16
BLOCK_BYTES = 4 << 20
DISK_THREADS = (2, 4, 8)
TIMEOUT_S = 1800

Result = dict[str, float]  # seconds by name


def tensors(numel: int) -> Iterator[torch.Tensor]:
    """Random fp32 values, `numel` in all."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(NUM_TENSORS):
        yield torch.rand(numel // NUM_TENSORS, generator=generator)


def model_of(numel: int) -> torch.nn.Module:
    """A model that holds them as parameters, and uses each."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.ParameterList(tensors(numel))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum((w * x).sum() for w in self.weights)

    return Model()


def bits(values: torch.Tensor) -> int:
    """A number made of all bits."""
    return int(values.detach().view(torch.int32).sum(dtype=torch.int64))


def sync(folder: Path) -> None:
    """Waits until all files in a folder are on the disk."""
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def drop_from_cache(folder: Path) -> None:
    """The next read of these files is one of the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def timed(work: Callable[[], Any]) -> float:
    """Seconds that it takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(
    folder: Path, values: Callable[[], list[torch.Tensor]], save: Callable[[], Any], load: Callable[[], Any]
) -> Result:
    """Times a save and a load into tensors that were emptied meanwhile, and checks them."""

    def save_durably() -> None:
        save()
        sync(folder)

    before = [bits(each) for each in values()]
    result = {"save": timed(save_durably)}
    with torch.no_grad():
        for each in values():
            each.zero_()
    drop_from_cache(folder)
    result["load"] = timed(load)
    if [bits(each) for each in values()] != before:
        sys.exit("bench_checkpoint.py: what was loaded is not what was saved")
    return result


def disk(folder: Path, numel: int) -> Result:
    """The ceiling."""
    size = 12 * numel // BLOCK_BYTES * BLOCK_BYTES
    buffer = _core.HugeBuffer(size)
    view = memoryview(buffer).cast("B")
    view[:] = os.urandom(1 << 20) * (size >> 20)
    best: Result = {}
    for threads in DISK_THREADS:
        path = folder / "file"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)

        def transfer(call: Callable[..., Any], descriptor: int = descriptor, threads: int = threads) -> None:
            offsets = range(0, size, BLOCK_BYTES)
            with concurrent.futures.ThreadPoolExecutor(threads) as pool:
                moved = pool.map(lambda at: call(descriptor, [view[at : at + BLOCK_BYTES]], at), offsets)
                if any(count != BLOCK_BYTES for count in moved):
                    sys.exit("bench_checkpoint.py: the disk moved less than a block")
            os.fsync(descriptor)

        found = {"save": timed(lambda: transfer(os.pwritev)), "load": timed(lambda: transfer(os.preadv))}
        best = {name: min(best.get(name, seconds), seconds) for name, seconds in found.items()}
        os.close(descriptor)
        path.unlink()
    return best


def zerocore_engine(numel: int, *, async_save: bool) -> tuple[zerocore.Engine, list[torch.Tensor]]:
    """An engine, and its parameters and moments."""
    config = Config(train_batch_size=1, optimizer=OptimizerConfig(), checkpoint=CheckpointConfig(async_save=async_save))
    engine = zerocore.Engine(model_of(numel), config)
    core = engine._params.core
    values = [p.detach() for p in engine.module.parameters()]
    for index, kind in [(i, k) for i in range(NUM_TENSORS) for k in (_core.StateKind.state1, _core.StateKind.state2)]:
        address, size = core.state_memory(index, kind, 0, numel // NUM_TENSORS)
        values.append(torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.float32))
        values[-1].uniform_()
    return engine, values


def zerocore_sync(folder: Path, numel: int) -> Result:
    """Engine.save_checkpoint."""
    engine, values = zerocore_engine(numel, async_save=False)
    return measure(
        folder, lambda: values, lambda: engine.save_checkpoint(folder), lambda: engine.load_checkpoint(folder)
    )


def zerocore_async(folder: Path, numel: int) -> Result:
    """The same in the background: how long the training stands still, beside one copy of the state."""
    engine, values = zerocore_engine(numel, async_save=True)
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    stalls, copies = [], []
    assert engine._checkpoints._saver is not None
    buffer = engine._checkpoints._saver._snapshot  # a second one of its size would not fit everywhere
    segments = [(v.data_ptr(), v.nbytes) for v in values]
    for _ in range(5):
        copies.append(timed(lambda: _core.copy_segments(segments, buffer.address)))
        stalls.append(timed(lambda: engine.save_checkpoint(folder)))
        engine.wait_for_checkpoint()
    return {"stall": statistics.median(stalls), "copy": statistics.median(copies)}


def torch_state(numel: int) -> dict[str, Any]:
    """What a training loop in plain torch saves."""
    parts = {
        name: {f"weights.{i}": each for i, each in enumerate(tensors(numel))}
        for name in ("model", "exp_avg", "exp_avg_sq")
    }
    return {"model": parts["model"], "optimizer": {"exp_avg": parts["exp_avg"], "exp_avg_sq": parts["exp_avg_sq"]}}


def torch_values(state: dict[str, Any]) -> list[torch.Tensor]:
    """Its tensors."""
    return [each for part in (state["model"], *state["optimizer"].values()) for each in part.values()]


def torch_save(folder: Path, numel: int) -> Result:
    """torch.save, and torch.load with copies into the tensors that are there."""
    state = torch_state(numel)
    values = torch_values(state)

    def load() -> None:
        for mine, read in zip(values, torch_values(torch.load(folder / "state.pt")), strict=True):
            mine.copy_(read)

    return measure(folder, lambda: values, lambda: torch.save(state, folder / "state.pt"), load)


def dcp(folder: Path, numel: int) -> Result:
    """torch.distributed.checkpoint."""
    from torch.distributed import checkpoint

    state = torch_state(numel)
    return measure(
        folder,
        lambda: torch_values(state),
        lambda: checkpoint.save(state, checkpoint_id=folder),
        lambda: checkpoint.load(state, checkpoint_id=folder),
    )


def deepspeed(folder: Path, numel: int) -> Result:
    """DeepSpeed, stage 1."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    import deepspeed

    config = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model_of(numel), config=config, dist_init_required=True)
    engine.backward(engine(torch.ones(1)))
    engine.step()

    def values() -> list[torch.Tensor]:
        found = [p.detach() for p in engine.module.parameters()]
        for state in engine.optimizer.optimizer.state.values():
            found += [state["exp_avg"], state["exp_avg_sq"]]
        return found

    return measure(
        folder,
        values,
        lambda: engine.save_checkpoint(str(folder)),
        lambda: engine.load_checkpoint(str(folder)),
    )


ENGINES: dict[str, Callable[[Path, int], Result]] = {
    "disk": disk,
    "zerocore": zerocore_sync,
    "zerocore, in the background": zerocore_async,
    "torch.save": torch_save,
    "torch.distributed.checkpoint": dcp,
    "DeepSpeed": deepspeed,
}


def run(name: str, args: argparse.Namespace) -> Result:
    """One engine in a process of its own."""
    folder = args.dir / "bench_checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, __file__, "--worker", name, "--numel", str(args.numel), "--dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    shutil.rmtree(folder)
    if done.returncode != 0:
        sys.exit(f"bench_checkpoint.py: {name} failed:\n{done.stdout}\n{done.stderr}")
    result: Result = json.loads(done.stdout.splitlines()[-1])
    return result


def report(rounds: dict[str, list[Result]], numel: int) -> None:
    """Prints medians, and ratios to the disk's and the copy's in the same round."""
    table = Table(title=f"{numel / 1e6:.0f} M parameters, {12 * numel / 1e9:.2f} GB", box=box.ASCII)
    for column in ("engine", "save, s", "of the disk's rate", "load, s", "of the disk's rate"):
        table.add_column(column, no_wrap=True)
    for name, results in rounds.items():
        row = [name]
        for what in ("save", "load"):
            if what not in results[0]:
                row += ["", ""]
                continue
            ratios = [d[what] / r[what] for d, r in zip(rounds["disk"], results, strict=True)]
            row += [f"{statistics.median(r[what] for r in results):.2f}", f"{statistics.median(ratios):.2f}"]
        table.add_row(*row)
    Console(width=110).print(table)
    if background := rounds.get("zerocore, in the background"):
        ratio = statistics.median(r["stall"] / r["copy"] for r in background)
        stall = statistics.median(r["stall"] for r in background)
        print(f"in the background: training stands still for {stall:.2f} s, {ratio:.2f} of one copy of the state")


def main() -> None:
    """Runs all engines, round by round."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--numel", type=lambda text: int(float(text)), default=400_000_000, help="parameters")
    parser.add_argument("--dir", type=Path, default=Path("build"), help="a folder on the disk to measure")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), help="default: all that are installed")
    parser.add_argument("--json", type=Path, help="write all results here too")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(ENGINES[args.worker](args.dir, args.numel)))
        return
    names = args.engines or [n for n in ENGINES if n != "DeepSpeed" or importlib.util.find_spec("deepspeed")]
    rounds: dict[str, list[Result]] = {name: [] for name in ("disk", *names)}
    order = random.Random(0)
    for number in range(args.rounds):
        for name in order.sample(list(rounds), len(rounds)):
            rounds[name].append(run(name, args))
            print(f"round {number + 1}: {name}: {rounds[name][-1]}", flush=True)
    report(rounds, args.numel)
    if args.json:
        args.json.write_text(json.dumps(rounds, indent=1))


if __name__ == "__main__":
    main()
