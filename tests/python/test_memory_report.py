"""memory_report() against what the process holds."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import pytest
import torch
import zerocore
from zerocore.config import Config, OptimizerConfig, PrecisionConfig, ZeroConfig

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 1024


class Model(torch.nn.Module):
    """Blocks of 8 MiB in fp32, and a frozen one."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH))
            for _ in range(blocks)
        )
        self.blocks[0].requires_grad_(False)
        self.register_buffer("table", torch.zeros(WIDTH, WIDTH))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.float().square().mean()


def trained(blocks, steps, *, stage, dtype):
    config = Config(
        micro_batch_size=2,
        optimizer=OptimizerConfig(),
        zero=ZeroConfig(stage=stage),
        precision=PrecisionConfig(dtype=dtype),
    )
    engine = zerocore.Engine(Model(blocks), config)
    x = torch.randn(2, WIDTH, dtype=engine.module.blocks[0][0].bias.dtype)
    for _ in range(steps):
        engine.backward(engine(x))
        engine.step()
    return engine


def held_bytes():
    """What this process holds; memory that several map is divided among them."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


@pytest.mark.ranks(2)  # in processes of their own
@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "fp32"), (3, "bf16")])
def test_it_is_what_the_process_holds(stage, dtype):
    """Within 5 %, between steps; beside the libraries, which a small model has warmed up."""
    trained(2, 2, stage=stage, dtype=dtype).close()
    gc.collect()
    before = held_bytes()
    engine = trained(17, 3, stage=stage, dtype=dtype)
    engine.comm.barrier("all have trained").wait()
    held = held_bytes() - before
    engine.comm.barrier("all have looked").wait()
    report = engine.memory_report()
    assert sum(report.values()) == pytest.approx(held, rel=0.05), report
    engine.close()
