"""Rank 0's line of progress for train_gpt.py."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import zerocore
from rich.console import Console
from zerocore.config import Config

SECONDS_PER_LINE = 5.0


class Progress:
    """Rank 0's line of progress: rewritten in a terminal, elsewhere printed every few seconds."""

    def __init__(self, engine: zerocore.Engine, args: argparse.Namespace):
        self.engine, self.args = engine, args
        self.start = self.last_time = time.monotonic()
        self.first_step = self.last_step = engine.global_steps  # of this process
        self.console = Console(quiet=engine.rank != 0, highlight=False, soft_wrap=True)
        self.status = self.console.status("first step")
        self.status.start()
        config, parameters = engine.config, sum(p.numel() for p in engine.module.parameters())
        why = " (chosen by the processor's flags)" if not args.config and args.dtype == "auto" else ""
        self.console.print(
            f"GPT of {parameters / 1e6:.2f} M parameters, {dtypes(config)}{why}, ZeRO-{config.zero.stage}, "
            f"{many(engine.world_size, 'rank')} x {many(args.threads, 'torch thread')}, "
            f"micro-batches of {config.micro_batch_size} x {args.seq} bytes, {config.micro_batches} a step"
        )

    def elapsed(self) -> float:
        """Seconds since training began."""
        return time.monotonic() - self.start

    def show(self, step: int, loss: float) -> None:
        """Says where the training is, unless it was said a moment ago."""
        now, last = time.monotonic(), step == self.args.steps
        if now - self.last_time < (0.5 if self.console.is_terminal else SECONDS_PER_LINE) and not last:
            return
        rate = (step - self.last_step) / (now - self.last_time)
        left = (self.args.steps - step) * self.elapsed() / (step - self.first_step)
        line = (
            f"step {step:{len(str(self.args.steps))}}/{self.args.steps}  loss {loss:.3f}  "
            f"{rate * self.engine.train_batch_size() * self.args.seq:6,.0f} tokens/s  "
            f"grad norm {self.engine.get_global_grad_norm():.3f}  loss scale {self.engine.loss_scale:g}  "
            f"{resident_mib():.0f} MiB a rank  ETA {int(left) // 60}:{int(left) % 60:02}"
        )
        self.status.update(line)
        if last or not self.console.is_terminal:
            self.console.print(line)
        self.last_time, self.last_step = now, step

    def close(self) -> None:
        """Removes the rewritten line."""
        self.status.stop()


def dtypes(config: Config) -> str:
    """What the model is kept and computed in, in words."""
    kept, computed = config.precision.dtype, config.precision.compute_dtype
    return kept if computed in (None, kept) else f"{kept} computed in {computed}"


def resident_mib() -> float:
    """This process's memory, in MiB: its proportional share (PSS), in which shared pages count once over all ranks."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def many(count: int, thing: str) -> str:
    """A number of things, in words."""
    return f"{count} {thing}{'s' if count != 1 else ''}"
