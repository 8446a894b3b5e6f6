"""What an engine tells of itself while it trains: monitors, times, FLOPs, collectives. Rank 0 tells its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from zerocore import _core, _flops, _monitors
from zerocore.config import ResolvedConfig

_PHASES = ("forward", "backward", "step")


class Reports:
    """Made before the engine changes the model.

    Raises:
        ConfigError: a monitor's library is not installed.
        IoError: a monitor's file cannot be made.
    """

    def __init__(self, config: ResolvedConfig, *, rank: int) -> None:
        _monitors.check_libraries(config)
        self._config = config
        self._rank = rank
        self._monitors = list(_monitors.open_monitors(config)) if rank == 0 else []
        self._clocked = config.wall_clock_breakdown and rank == 0
        self._nanoseconds = dict.fromkeys(_PHASES, 0)  # since the last line
        self._steps = 0  # since the last line
        self._profiles = config.flops_profiler is not None and rank == 0

    def run(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], step: int) -> Any:
        """The model's forward, profiled where that is due. step: so many were made before."""
        config = self._config.flops_profiler
        if not self._profiles or config is None or step != config.profile_step:
            return model(*args, **kwargs)
        self._profiles = False  # the step's other micro-batches are as this one
        out, costs = _flops.measure(model, args, kwargs)
        _flops.write(_flops.report(costs, config, step=step, rank=self._rank), config)
        return out

    def end_step(
        self,
        losses: list[torch.Tensor],
        *,
        loss_divisor: float,
        lr: float,
        loss_scale: float | None,
        samples: int,
    ) -> None:
        """A step was made.

        Args:
            losses: that backward() got on this rank.
            loss_divisor: of their sum, for their mean over micro-batches, or over tokens.
            lr, loss_scale: as the next step will use them.
            samples: over all ranks, from the start.
        """
        self._steps += 1
        if not self._monitors:
            return
        events = []
        if losses:
            mean = sum(float(loss) for loss in losses) / loss_divisor
            events.append(("Train/Samples/train_loss", mean, samples))
        events.append(("Train/Samples/lr", lr, samples))
        if loss_scale is not None:
            events.append(("Train/Samples/loss_scale", loss_scale, samples))
        for monitor in self._monitors:
            monitor.write(events)

    def spent(self, phase: str, nanoseconds: int, global_steps: int) -> None:
        """A call of forward(), backward() or step() has ended."""
        if not self._clocked:
            return
        self._nanoseconds[phase] += nanoseconds
        due = self._steps > 0 and global_steps % (self._config.steps_per_print or 1) == 0
        if phase == "step" and due:
            times = ", ".join(f"{name} {spent / self._steps / 1e6:.2f} ms" for name, spent in self._nanoseconds.items())
            print(f"[engine] step {global_steps}: {times}; mean of {self._steps} steps, rank {self._rank}", flush=True)
            self._nanoseconds = dict.fromkeys(_PHASES, 0)
            self._steps = 0

    def close(self) -> None:
        for monitor in self._monitors:
            monitor.close()
        self._monitors = []


def collectives(comms: Iterable[_core.Communicator]) -> str:
    """A table of what went through them, added up: calls, bytes handed in, and time from call to end."""
    total: dict[str, list[int]] = {}
    for comm in comms:
        for op, numbers in comm.traffic().items():
            total[op] = [a + b for a, b in zip(total.get(op, (0, 0, 0)), numbers, strict=True)]
    lines = [f"{'collective':<20}{'calls':>10}{'bytes':>20}{'total ms':>14}{'mean ms':>12}{'GB/s':>10}"]
    for op, (calls, size, nanoseconds) in total.items():
        if calls:
            rate, ms = size / nanoseconds if nanoseconds else 0.0, nanoseconds / 1e6
            lines.append(f"{op:<20}{calls:>10,}{size:>20,}{ms:>14.3f}{ms / calls:>12.4f}{rate:>10.3f}")
    return "\n".join(lines)
