"""Shows that zerocore's parameters have the same bits in every ZeRO stage and on any number of ranks.

    python examples/proof.py          # or: make proof

Trains one small GPT on the same data with stages 0 to 3 on 1, 2 and 4 ranks and prints each run's parameters as a
sha256; below, what PyTorch's own DDP and FSDP2 give. In stage 3 the model is built sharded, and no parameter is whole
while its block is not in use. Exit code 0 if and only if zerocore gave one value.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator

import torch
import zerocore
from gpt import GPT, decay_groups
from jobs import JobError, join_torch_distributed, leave_torch_distributed, run_job, send_result
from rich import box
from rich.console import Console
from rich.table import Table
from text import Windows, load_text
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from zerocore.config import Config, OptimizerConfig, ZeroConfig

RANKS = (1, 2, 4)
STAGES = (0, 1, 2, 3)
STEPS, MICRO_BATCHES, MICRO_BATCH_SIZE, SEQ = 5, 8, 2, 64
LR, BETAS, EPS, WEIGHT_DECAY, MAX_NORM = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0
TIMEOUT_S = 150

Train = Callable[[GPT, "Batches"], torch.nn.Module]


class Batches:
    """This rank's micro-batches: in micro-step k of a step, rank r of N takes micro-batch k N + r of the step."""

    def __init__(self, *, rank: int, world_size: int):
        self.windows = Windows(load_text()[0], seq=SEQ)
        self.rank, self.world_size = rank, world_size
        self.micro_steps = MICRO_BATCHES // world_size

    def of_step(self, step: int) -> Iterator[list[torch.Tensor]]:
        """(tokens, targets) of each micro-step."""
        for k in range(self.micro_steps):
            first = (step * MICRO_BATCHES + k * self.world_size + self.rank) * MICRO_BATCH_SIZE
            samples = [self.windows[first + i] for i in range(MICRO_BATCH_SIZE)]
            yield [torch.stack(each) for each in zip(*samples, strict=True)]


def zero_config(stage: int) -> ZeroConfig:
    """Several buckets; in stage 3 several units, nothing kept whole, and the next block on its way."""
    return ZeroConfig(
        stage=stage,
        bucket_numel=20_000,
        unit_classes=("Block",),
        persistent_param_numel=0,
        max_reuse_numel=0,
        prefetch_numel=60_000,
    )


def train_zerocore(stage: int) -> Train:
    """Training with a ZeRO stage."""

    def train(model: GPT, batches: Batches) -> torch.nn.Module:
        config = Config(
            train_batch_size=MICRO_BATCHES * MICRO_BATCH_SIZE,
            micro_batch_size=MICRO_BATCH_SIZE,
            gradient_clipping=MAX_NORM,
            optimizer=OptimizerConfig(type="adamw", lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY),
            zero=zero_config(stage),
        )
        engine = zerocore.Engine(model, config, model_parameters=decay_groups(model))
        for step in range(STEPS):
            for tokens, targets in batches.of_step(step):
                engine.backward(engine(tokens, targets))
                engine.step()
        engine.close()
        return model

    return train


def train_ddp(model: GPT, batches: Batches) -> torch.nn.Module:
    """Training with torch's DistributedDataParallel."""
    wrapped = DistributedDataParallel(model)

    def sync(last: bool) -> None:
        wrapped.require_backward_grad_sync = last  # what no_sync() sets

    torch_steps(wrapped, batches, sync)
    return model


def train_fsdp2(model: GPT, batches: Batches) -> torch.nn.Module:
    """Training with torch's fully_shard."""
    for block in model.blocks:
        fully_shard(block)
    wrapped = fully_shard(model)
    torch_steps(wrapped, batches, wrapped.set_requires_gradient_sync)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    return model


def torch_steps(model: torch.nn.Module, batches: Batches, set_sync: Callable[[bool], None]) -> None:
    """The steps that DDP and FSDP2 share: the same data, mean gradient, clipping and optimizer as zerocore's."""
    optimizer = torch.optim.AdamW(decay_groups(model), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    for step in range(STEPS):
        for k, (tokens, targets) in enumerate(batches.of_step(step)):
            set_sync(k == batches.micro_steps - 1)
            (model(tokens, targets) / batches.micro_steps).backward()  # they average over the ranks
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()


def work() -> None:
    """One rank of a launch: all engines in turn. Rank 0 prints a line for each."""
    torch.set_num_threads(1)
    engines: dict[str, Train] = {f"zerocore stage {stage}": train_zerocore(stage) for stage in STAGES}
    engines |= {"DDP": train_ddp, "FSDP2": train_fsdp2}
    rank, world_size = join_torch_distributed()
    batches = Batches(rank=rank, world_size=world_size)
    for name, train in engines.items():
        torch.manual_seed(1)
        with zerocore.zero.Init(enabled=name == "zerocore stage 3"):
            model = GPT(layers=2, hidden=64, heads=2, seq=SEQ)
        model = train(model, batches)
        sha256 = zerocore.utils.params_sha256(model)  # on all ranks: it gathers what is sharded
        if rank == 0:
            send_result([name, sha256])
    leave_torch_distributed()


def report(found: dict[int, dict[str, str]]) -> int:
    """Prints the table and what it says. Returns the exit code."""
    console = Console(width=None if sys.stdout.isatty() else 100)
    style = box.HEAVY_HEAD if console.is_terminal else box.ASCII
    table = Table(title=f"sha256 of all parameters after {STEPS} steps", box=style)
    for column in ("engine", "ranks", "sha256"):
        table.add_column(column, no_wrap=True)
    for engine in found[RANKS[0]]:
        for ranks in RANKS:
            table.add_row(engine, str(ranks), found[ranks][engine], end_section=ranks == RANKS[-1])
    console.print(table)

    for name in ("zerocore", "DDP", "FSDP2"):
        runs = [sha for by_engine in found.values() for engine, sha in by_engine.items() if engine.startswith(name)]
        same = len(set(runs)) == 1
        print(f"{name}: {len(runs)} runs, {'one value' if same else f'{len(set(runs))} different values'}")
    return (
        0 if len({sha for runs in found.values() for engine, sha in runs.items() if "zerocore" in engine}) == 1 else 1
    )


def main() -> int:
    """Launches one job a number of ranks, and reports."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().worker:
        work()
        return 0
    found = {}
    for ranks in RANKS:
        start = time.monotonic()
        try:
            found[ranks] = dict(run_job(ranks, __file__, "--worker", timeout_s=TIMEOUT_S))
        except JobError as error:
            sys.exit(f"proof.py: {error}")
        print(f"{ranks} ranks: {len(found[ranks])} runs in {time.monotonic() - start:.0f} s", flush=True)
    return report(found)


if __name__ == "__main__":
    sys.exit(main())
