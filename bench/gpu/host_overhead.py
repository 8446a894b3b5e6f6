"""Step: the time that the host spends in backward() and step() of a model whose operations are tiny.

The device is idle before and is not waited for, so this is what the calls themselves take. (On the CPU it is all.)
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import zerocore
from step_report import Report, run_step
from timing import device, synchronize
from zerocore._device import Host
from zerocore.config import Config, OptimizerConfig, ZeroConfig

LAYERS, WIDTH, SAMPLES = 100, 16, 2
ROUNDS, WARMUP = 30, 8
DRY_ROUNDS, DRY_WARMUP = 2, 1

Made = tuple[torch.nn.Module, Callable[[torch.Tensor], None]]  # forward, and all that comes after it


def make_model() -> torch.nn.Module:
    """Many small parameters."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def make_torch(target: Host) -> Made:
    """Plain torch with its fused AdamW."""
    model = make_model().to(target.torch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def rest(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, rest


def make_zerocore(stage: int) -> Callable[[Host], Made]:
    """The engine."""

    def make(target: Host) -> Made:
        config = Config(
            micro_batch_size=SAMPLES,
            device=target.torch.type,
            gradient_clipping=0.0,
            optimizer=OptimizerConfig(type="adamw", lr=1e-3),
            zero=ZeroConfig(stage=stage),
        )
        engine = zerocore.Engine(make_model(), config)

        def rest(loss: torch.Tensor) -> None:
            engine.backward(loss)
            engine.step()

        return engine, rest

    return make


def measure(report: Report, args: argparse.Namespace) -> None:
    """All in turns."""
    target = device(dry=args.dry)
    rounds, warmup = (DRY_ROUNDS, DRY_WARMUP) if args.dry else (ROUNDS, WARMUP)
    makers = {"torch": make_torch} | {f"zerocore stage {stage}": make_zerocore(stage) for stage in (0, 1, 3)}
    made = {name: make(target) for name, make in makers.items()}
    microseconds: dict[str, list[float]] = {name: [] for name in made}
    inputs = torch.ones(SAMPLES, WIDTH, device=target.torch)
    for number in range(warmup + rounds):
        for name, (model, rest) in made.items():
            loss = model(inputs).square().mean()
            synchronize(target)
            start = time.perf_counter()
            rest(loss)
            taken = (time.perf_counter() - start) * 1e6
            synchronize(target)
            if number >= warmup:
                microseconds[name].append(taken)
    params = 2 * LAYERS
    plain = statistics.median(microseconds["torch"])
    for name, each in microseconds.items():
        us = statistics.median(each)
        report.row(
            name,
            f"{us:8.0f} us a step of {params} parameters, {us / params:6.2f} us each, {us / plain:.2f} of torch's",
            us=us,
            us_per_param=us / params,
            of_torch=us / plain,
        )


if __name__ == "__main__":
    run_step(measure)
