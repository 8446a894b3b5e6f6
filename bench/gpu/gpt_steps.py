"""Step: training steps of a GPT of 350 million parameters in bf16 with flash attention, beside FSDP2 and plain torch.

All get the same model and data and take turns in one process, in blocks of a few steps whose order is shuffled. Memory
is what each adds when it is built and trains for the first time: what torch's allocator hands out at most, what
zerocore holds beside it (both: the peak), and by how much the device's used memory grows.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from step_report import Report, run_step
from timing import device, name_of, synchronize
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from zerocore._device import Host

import peers  # isort: skip  (step_report lets it be found)
import workload  # isort: skip

SIZE = argparse.Namespace(layers=24, hidden=1024, heads=16, seq=1024, micro_batch=8, vocab=50_304)
DRY_SIZE = argparse.Namespace(layers=2, hidden=32, heads=2, seq=16, micro_batch=2, vocab=64)
BLOCKS, STEPS, WARMUP_STEPS = 6, 5, 4
DRY_BLOCKS, DRY_STEPS = 2, 1
TOLERANCE = 0.05  # of losses, relative: plain bf16 parameters lose what is below their last place
ADAMW = {"lr": peers.LR, "betas": peers.BETAS, "eps": peers.EPS, "weight_decay": peers.WEIGHT_DECAY}

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (tokens, targets) -> loss
Made = tuple[Step, Callable[[], int]]  # a step, and the bytes that are held beside torch's allocator


def zerocore_stage(stage: int) -> Callable[[Any, Any, Host], Made]:
    """The engine."""

    def make(model: Any, size: argparse.Namespace, target: Host) -> Made:
        import zerocore
        from zerocore.config import Config, OptimizerConfig, PrecisionConfig, ZeroConfig

        config = Config(
            micro_batch_size=size.micro_batch,
            device=target.torch.type,
            gradient_clipping=0.0,
            optimizer=OptimizerConfig(type="adamw", **ADAMW),
            precision=PrecisionConfig(dtype="bf16"),
            zero=ZeroConfig(stage=stage, unit_classes=("Block",), persistent_param_numel=0, max_reuse_numel=1),
        )
        engine = zerocore.Engine(model, config)

        def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            loss = engine.backward(engine(tokens, targets))
            engine.step()
            return loss

        def held() -> int:
            report = engine.memory_report()
            return sum(report.values()) - report["gathered_parameters"]  # these are torch's

        return step, held

    return make


def fsdp2(model: Any, size: argparse.Namespace, target: Host) -> Made:
    """fully_shard, a unit a block, fp32 parameters that are used in bf16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model.to(target.torch)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return _torch_step(fully_shard(model, mp_policy=policy)), lambda: 0


def torch_bf16(model: Any, size: argparse.Namespace, target: Host) -> Made:
    """Parameters, gradients and moments in bf16, no masters."""
    return _torch_step(model.to(target.torch, torch.bfloat16)), lambda: 0


def torch_autocast(model: Any, size: argparse.Namespace, target: Host) -> Made:
    """Parameters, gradients and moments in fp32."""
    return _torch_step(model.to(target.torch), autocast=target.torch.type), lambda: 0


def _torch_step(model: Any, *, autocast: str | None = None) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(autocast, torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


VARIANTS = {
    "zerocore stage 0": zerocore_stage(0),
    "zerocore stage 3": zerocore_stage(3),
    "FSDP2": fsdp2,
    "torch, bf16 parameters": torch_bf16,
    "torch, fp32 under autocast": torch_autocast,
}


class Trainer:
    """One variant, and where in the data it is."""

    def __init__(self, name: str, model: Any, data: list[Any], size: argparse.Namespace, target: Host) -> None:
        before = _memory(target)
        self._target, self._data, self._steps = target, data, 0
        self._step, held = VARIANTS[name](copy.deepcopy(model), size, target)
        self.losses: list[torch.Tensor] = []
        self.seconds: list[float] = []  # a step, of each block
        self.run(WARMUP_STEPS)
        self.seconds.clear()
        after = _memory(target)
        self.memory = {"torch": after[0] - before[1], "zerocore": held(), "device": after[2] - before[2]}
        self.memory["peak"] = self.memory["torch"] + self.memory["zerocore"]

    def run(self, steps: int) -> None:
        """A block of steps."""
        synchronize(self._target)
        start = time.perf_counter()
        for _ in range(steps):
            tokens, targets = self._data[self._steps % len(self._data)]
            self.losses.append(self._step(tokens, targets))
            self._steps += 1
        synchronize(self._target)
        self.seconds.append((time.perf_counter() - start) / steps)


def _memory(target: Host) -> tuple[int, int, int]:
    """What torch's allocator handed out at most since the last call, and hands out now; what the device has used."""
    if not target.runs_behind:
        return 0, 0, 0
    free, total = torch.cuda.mem_get_info(target.torch)
    counts = torch.cuda.max_memory_allocated(target.torch), torch.cuda.memory_allocated(target.torch), total - free
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(target.torch)
    return counts


def measure(report: Report, args: argparse.Namespace) -> None:
    """All variants, in turns."""
    target = device(dry=args.dry)
    size, blocks, steps = (DRY_SIZE, DRY_BLOCKS, DRY_STEPS) if args.dry else (SIZE, BLOCKS, STEPS)
    torch.distributed.init_process_group(
        "nccl" if target.runs_behind else "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    data = [[each.to(target.torch) for each in batch] for batch in workload.make_data(size, 0, 8)]
    model = workload.make_model(size)
    numel = sum(p.numel() for p in model.parameters())
    report.row("model", f"{numel / 1e6:.1f} M parameters, {size.micro_batch} x {size.seq} tokens, {name_of(target)}")
    flash = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if target.runs_behind else contextlib.nullcontext()
    trainers: dict[str, Trainer] = {}
    with flash:
        for name in VARIANTS:
            _memory(target)
            try:
                trainers[name] = Trainer(name, model, data, size, target)
            except Exception as error:  # the others go on
                report.failed.append(f"{name}: {type(error).__name__}: {error}")
        order = random.Random(0)
        for _ in range(blocks):
            for name in order.sample(sorted(trainers), len(trainers)):
                trainers[name].run(steps)
    losses = {name: trainer.losses[-1].item() for name, trainer in trainers.items()}
    typical = statistics.median(losses.values())
    for name, trainer in trainers.items():
        seconds, memory = statistics.median(trainer.seconds), trainer.memory
        tokens_per_s = size.micro_batch * size.seq / seconds
        report.row(
            name,
            f"{seconds * 1e3:8.2f} ms  {tokens_per_s:9.0f} tokens/s  peak {memory['peak'] / 1e9:6.2f} GB "
            f"(torch {memory['torch'] / 1e9:.2f} + zerocore {memory['zerocore'] / 1e9:.2f}; device "
            f"{memory['device'] / 1e9:.2f})  loss {losses[name]:.3f}",
            step_ms=seconds * 1e3,
            tokens_per_s=tokens_per_s,
            memory=memory,
            loss=losses[name],
            seconds=trainer.seconds,
        )
        good = abs(losses[name] / typical - 1) < TOLERANCE
        report.check(good, f"{name}: the loss is {losses[name]}, expected about {typical}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run_step(measure)
