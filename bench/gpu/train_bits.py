"""Step: a training run on the GPU ends with the CPU's bits, in stages 0 to 3, every dtype and optimizer.

The model is made of operations that give the same bits on both: single additions, multiplications and maxima, with all
sums as trees of additions. (A matrix product or a sum of torch's is not: each device has its own order.) On several
ranks, with --hashes, each trains on one device only and reports its hashes.

Without a GPU: two threads against one.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
from typing import Any

import torch
import zerocore
from step_report import Report, run_step
from zerocore import _core
from zerocore.config import Config, LossScaleConfig, OptimizerConfig, PrecisionConfig, ZeroConfig

STEPS, DRY_STEPS = 20, 3
MICRO_BATCHES, SAMPLES = 4, 3  # a step; a micro-batch
WIDTHS = (40, 100, 33, 16)
RUNS = [  # stage, dtype, optimizer
    *((stage, dtype, "adamw") for stage in range(4) for dtype in ("fp32", "bf16")),
    (0, "fp16", "adamw"),
    (2, "fp16", "adamw"),
    (1, "fp32", "sgd"),
    (2, "bf16", "lion"),
    (3, "bf16", "adagrad"),
    (0, "bf16", "muon"),
    (3, "fp32", "muon"),
]


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, by adding halves."""
    while len(x) > 1:
        half = len(x) // 2
        x = torch.cat([x[:half] + x[half : 2 * half], x[2 * half :]])
    return x[0]


class Repeat(torch.autograd.Function):
    """x, n times over in a new first dimension; its gradient is a tree sum, where expand()'s has a device's order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, n: int) -> torch.Tensor:
        """n: how often."""
        return x.expand(n, *x.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """Adds them up."""
        return tree_sum(grad), None


class Layer(torch.nn.Module):
    """A linear layer, product by product."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.bias = torch.nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (samples, inputs)."""
        outputs = len(self.bias)
        products = Repeat.apply(self.weight, len(x)) * Repeat.apply(x, outputs).transpose(0, 1)
        return tree_sum(products.permute(2, 0, 1)) + Repeat.apply(self.bias, len(x))


class ExactNet(torch.nn.Module):
    """Layers with ReLU between them; returns the squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(*pair) for pair in itertools.pairwise(WIDTHS))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """x, target: (samples, a width)."""
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        error = self.layers[-1](x) - target
        return tree_sum((error * error).flatten()).float() * 2.0**-6


def train(device: str, stage: int, dtype: str, optimizer: str, steps: int) -> str:
    """Trains, and returns a hash of the parameters, of the norms of all gradients, and of which steps were skipped."""
    torch.manual_seed(0)
    config = Config(
        micro_batch_size=SAMPLES,
        train_batch_size=SAMPLES * MICRO_BATCHES,
        device=device,
        gradient_clipping=1.0,
        optimizer=OptimizerConfig(type=optimizer, lr=1e-2, weight_decay=0.01),
        precision=PrecisionConfig(dtype=dtype, loss_scale=LossScaleConfig(initial_scale_power=20)),
        zero=ZeroConfig(stage=stage, bucket_numel=3000, unit_numel=1, persistent_param_numel=0, max_reuse_numel=0),
    )
    engine = zerocore.Engine(ExactNet(), config)
    engine_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    outcomes = []
    for step in range(steps):
        for k in range(MICRO_BATCHES // engine.world_size):
            number = (step * MICRO_BATCHES // engine.world_size + k) * engine.world_size + engine.rank
            random = torch.Generator().manual_seed(number)
            batch = [torch.randn(SAMPLES, width, generator=random) for width in (WIDTHS[0], WIDTHS[-1])]
            engine.backward(engine(*(each.to(engine.device, engine_dtype) for each in batch)))
            engine.step()
        outcomes.append((engine.get_global_grad_norm(), engine.was_step_applied()))
    params = zerocore.utils.params_sha256(engine.module)
    engine.close()
    return hashlib.sha256(f"{params} {outcomes}".encode()).hexdigest()


def hashes(device: str, *, dry: bool) -> dict[str, str]:
    """Of all runs, by name."""
    runs, steps = (RUNS[::3], DRY_STEPS) if dry else (RUNS, STEPS)
    return {f"stage {run[0]} {run[1]} {run[2]}": train(device, *run, steps) for run in runs}


def compare(report: Report, args: argparse.Namespace) -> None:
    """Trains on both devices; or, as the rank of a job, on one."""
    torch.set_num_threads(1)
    target = "cpu" if args.dry else "cuda"
    if args.hashes:
        _core.set_num_threads(2)
        report.figures = hashes(target, dry=args.dry)
        return
    _core.set_num_threads(1)
    wanted = hashes("cpu", dry=args.dry)
    _core.set_num_threads(2)
    report_equal(report, hashes(target, dry=args.dry), wanted)


def report_equal(report: Report, got: dict[str, str], wanted: dict[str, str]) -> None:
    """A row a run, and what differs."""
    for name, sha256 in wanted.items():
        equal = got.get(name) == sha256
        report.row(name, f"{sha256[:16]} {'equal' if equal else 'DIFFERS'}", sha256=sha256, got=got.get(name))
        report.check(equal, f"{name}: got {got.get(name)}, expected {sha256}")
    for dtype, optimizer in {run[1:] for run in RUNS}:
        of_stages = {sha256 for name, sha256 in wanted.items() if name.endswith(f" {dtype} {optimizer}")}
        report.check(len(of_stages) <= 1, f"stages differ in {dtype} {optimizer}")


if __name__ == "__main__":
    run_step(compare, "--hashes")
